"""Log-probabilities of tokens from hidden states: the one formula behind scoring, training and candidate selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint
from trl.kernels import ChunkedLogProbFunction

from packed_forward.packing import NO_CHOICE, AllowedTokens, CompletionTokens, allowed_logps

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TILE = 32768
"""Widest slice of the vocabulary projected at once, so that no [tokens, vocabulary] tensor is ever held."""


def collate(items: Sequence[CompletionTokens], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `attention_mask` and `completion_mask`, each [items, longest], int64."""
    longest = max(len(item.prompt_ids) + len(item.response_ids) for item in items)
    ids = torch.full((len(items), longest), pad_token_id)
    attention = torch.zeros((len(items), longest), dtype=torch.long)
    completion = torch.zeros((len(items), longest), dtype=torch.long)
    for row, item in enumerate(items):
        start, end = len(item.prompt_ids), len(item.prompt_ids) + len(item.response_ids)
        ids[row, :end] = torch.tensor(item.prompt_ids + item.response_ids)
        attention[row, :end] = 1
        completion[row, start:end] = 1
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def token_logps(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_mask: torch.Tensor,
    allowed: AllowedTokens | None = None,
) -> torch.Tensor:
    """Log-probability of each completion token, float32 [rows, length - 1]; 0 elsewhere. Differentiable.

    `model` is the causal model itself (see `causal_model`); all inputs are [rows, length]. Only positions that
    predict a completion token reach the head; `allowed` as `head_logps` takes it.
    """
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    mask = completion_mask[:, 1:].bool()
    found = head_logps(model, hidden[:, :-1][mask], input_ids[:, 1:][mask], allowed=allowed)
    return spread(found[0], mask)


def spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[n] -> the shape of a mask with n true places, in order; 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)


def spread_at(values: torch.Tensor, places: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """[n] -> `shape`, value i at place i counted row by row; 0 elsewhere. `spread` without counting a mask."""
    return values.new_zeros(shape.numel()).index_copy(0, places, values).view(shape)


HeadLogps = tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
]
"""Log-probabilities, entropy, log sum of squares, mean logit, is top 1: each [n], or None where it is not asked for."""


def head_logps(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    extras: tuple[str, ...] = (),
    temperature: float = 1.0,
    allowed: AllowedTokens | None = None,
) -> HeadLogps:
    """log softmax(head(hidden) / temperature)[targets] for hidden [n, width] and targets [n], without ever holding all
    logits of a large batch.

    Returns (log-probabilities, entropy, log sum of squares, mean logit, is top 1), each [n]; those not named in
    `extras` are None. TRL's chunked function does the work, ours where the head is frozen and on a CPU.

    allowed: tokens among which the probability is taken, of each of the n places; the targets are among them. Then
    log-probabilities and entropy alone are returned, and None in the places of the others.
    """
    if allowed is not None:
        return _allowed_logps(model, hidden, targets, allowed, temperature)
    head = model.get_output_embeddings()
    softcap, scale = logit_settings(model.config)
    if _frozen_on_cpu(head, hidden):
        return FrozenHeadLogProb.apply(
            hidden, head.weight, head.bias, targets, temperature, softcap, scale, extras
        )
    outputs = ChunkedLogProbFunction.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        temperature,
        min(head.weight.shape[0], TILE),
        softcap,
        scale,
        extras,
    )
    return tuple(outputs)


def _allowed_logps(
    model: torch.nn.Module,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    allowed: AllowedTokens,
    temperature: float,
) -> HeadLogps:
    """`head_logps` among allowed tokens. Only places that leave a choice reach the head, a slice of CELLS logits at a
    time; of more than one slice the logits are computed again in the backward pass instead of being held."""
    places = (allowed.index != NO_CHOICE).nonzero()[:, 0]

    def part(hidden: torch.Tensor, targets: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return allowed_logps(head_logits(model, hidden) / temperature, targets, allowed.sets[index])

    slices = places.split(max(1, CELLS // allowed.sets.shape[1]))
    again = len(slices) > 1 and torch.is_grad_enabled()
    found = [
        checkpoint(part, *read, use_reentrant=False) if again else part(*read)
        for chosen in slices
        for read in [(hidden[chosen], targets[chosen], allowed.index[chosen])]
    ]
    # a place without a choice has no gradient, but a batch of nothing else is still to be gone back through
    nothing = hidden.float().sum(-1) * 0
    logps, entropy = (nothing.index_add(0, places, values) for values in torch.cat(found, 1))
    return logps, entropy, None, None, None


def head_logits(model: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary], float32, of hidden states [n, width]: all at once, so n should be small."""
    softcap, scale = logit_settings(model.config)
    logits: torch.Tensor = model.get_output_embeddings()(hidden).float() * scale
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _frozen_on_cpu(head: torch.nn.Module, hidden: torch.Tensor) -> bool:
    weight = head.weight
    return (
        hidden.device.type == "cpu"
        and type(weight) in (torch.Tensor, torch.nn.Parameter)  # not a shard of one
        and not weight.requires_grad
        and (head.bias is None or not head.bias.requires_grad)
        and weight.dtype == hidden.dtype
        and not torch.is_autocast_enabled("cpu")
    )


def logit_settings(config: PretrainedConfig) -> tuple[float | None, float]:
    """Soft cap (or None) and factor that an architecture applies to its logits after the head.

    Cohere (logit_scale), Falcon-H1 (lm_head_multiplier), Granite and MiniCPM3 (divide by logits_scaling), Gemma 2
    (final_logit_softcapping). `head_check` finds what is missing here.
    """
    text = config.get_text_config()
    scale = next(
        (
            s
            for name in ("logit_scale", "output_multiplier", "lm_head_multiplier")
            if (s := getattr(text, name, None))
        ),
        None,
    )
    if scale is None and getattr(text, "logits_scaling", None) is not None:
        scale = text.logits_scaling if text.model_type == "hyperclovax" else 1 / text.logits_scaling
    return getattr(text, "final_logit_softcapping", None), 1.0 if scale is None else float(scale)


def causal_model(model: torch.nn.Module) -> torch.nn.Module:
    """The transformers model inside a PeftModel (its LoRA layers stay in place), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


# --- Log-probabilities over a frozen output layer on a CPU ---

CELLS = 1 << 23
"""Most logits held at once (32 MB in float32): tokens go in slices, each over the whole vocabulary."""


class FrozenHeadLogProb(torch.autograd.Function):
    """Log-probability function like TRL's `ChunkedLogProbFunction` (same arguments, but for its tile width;
    same five outputs, each [n] float32 or None), for a head without gradients.

    With z = T^-1 c(s h W^T + b) for temperature T, logit scale s and soft cap c, and f = dz / d(h W^T):
    d log p_t / dh = (f_t e_t - f p) W, of which the backward pass only multiplies rows.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        temperature: float,
        softcap: float | None,
        scale: float,
        extras: tuple[str, ...],
    ) -> HeadLogps:
        ctx.set_materialize_grads(False)
        chunks: list[HeadLogps] = []
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        at_once = max(1, CELLS // weight.shape[0])
        for start in range(0, max(len(hidden), 1), at_once):
            part = slice(start, start + at_once)
            logits = torch.nn.functional.linear(hidden[part], weight, bias)
            z, factor = _transform_logits(logits, temperature, softcap, scale)
            logps = torch.log_softmax(z, -1)
            chunk_targets = targets[part, None]
            chosen = logps.gather(-1, chunk_targets)
            p = torch.exp(logps)
            rows = p[:, None]
            chunks.append(
                (
                    chosen[:, 0],
                    -torch.bmm(rows, logps.nan_to_num(neginf=0.0)[..., None]).view(-1)
                    if "entropy" in extras
                    else None,
                    torch.bmm(rows, p[..., None]).view(-1).log() if "log_sum_sq_probs" in extras else None,
                    z.mean(-1) if "mean_logits" in extras else None,
                    # the greatest value is found six times as fast as its place
                    chosen[:, 0] == logps.amax(-1) if "is_top1" in extras else None,
                )
            )
            if slopes is not None:
                # 1 - p of the target before it is rounded: a sure token keeps its small gradient
                p.scatter_(-1, chunk_targets, torch.expm1(chosen)).mul_(-factor)
                torch.mm(p.to(hidden.dtype), weight, out=slopes[part])
        joined = (None if values[0] is None else torch.cat(values) for values in zip(*chunks, strict=True))
        logps, entropy, log_sum_sq, mean_logits, is_top1 = joined
        outputs = logps, entropy, log_sum_sq, mean_logits, is_top1
        ctx.save_for_backward(hidden, weight, bias, targets, slopes)
        ctx.settings = (temperature, min(weight.shape[0], CELLS), softcap, scale)
        ctx.mark_non_differentiable(*(values for values in outputs[2:] if values is not None))
        return outputs

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, slopes = ctx.saved_tensors
        logps_grad, entropy_grad = grads[:2]
        no_gradients = (None,) * 7
        if slopes is None:
            return None, *no_gradients
        if entropy_grad is not None and bool(entropy_grad.any()):  # a bonus for entropy: the general function
            with torch.enable_grad():
                again = hidden.detach().requires_grad_()
                outputs = ChunkedLogProbFunction.apply(
                    again, weight, bias, targets, *ctx.settings, ("entropy",)
                )
                if logps_grad is None:
                    logps_grad = torch.zeros_like(outputs[0])
                (hidden_grad,) = torch.autograd.grad(outputs[:2], again, (logps_grad, entropy_grad))
            return hidden_grad, *no_gradients
        return None if logps_grad is None else slopes * logps_grad[:, None].to(slopes.dtype), *no_gradients


def _transform_logits(
    logits: torch.Tensor, temperature: float, softcap: float | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """z in float32 and its derivative by the logits, a number or as wide as z."""
    z = logits.float()
    if scale != 1:
        z = z * scale
    factor: torch.Tensor | float = scale / temperature
    if softcap is not None:
        bent = torch.tanh(z / softcap)
        z, factor = bent * softcap, (1 - bent.square()).mul_(factor)
    return (z if temperature == 1 else z / temperature), factor
