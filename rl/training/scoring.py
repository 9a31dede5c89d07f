"""Log-probabilities of responses: one formula for training, evaluation and choosing among candidates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from trl.kernels import ChunkedLogProbFunction

from rl.agents.base import Message
from rl.training.encoding import EncodedResponse, prompt_messages, response_text
from rl.training.policy import LoadedPolicy, matmul

TILE = 32768
"""Widest slice of the vocabulary projected at once, so that no [tokens, vocabulary] tensor is ever held."""


class ScoringError(RuntimeError):
    """The quick log-probabilities do not agree with the model's own logits: an architecture that is not understood."""


@dataclass(frozen=True)
class ResponseScore:
    """How likely a policy is to answer exactly this, and then end its turn."""

    logp: float
    """Sum over the response's tokens, in nats; at most 0."""
    tokens: int
    """Response tokens summed over, the turn end included."""
    truncated: bool = False
    """Prompt or response did not fit the model's context and was cut before scoring."""

    @property
    def mean_logp(self) -> float:
        """Per token: length-normalised."""
        return self.logp / self.tokens if self.tokens else 0.0


def score_responses(
    policy: LoadedPolicy,
    items: Sequence[tuple[Sequence[Message], str]],
    *,
    batch_size: int = 16,
    adapter: bool = True,
) -> list[ResponseScore]:
    """Score each (prompt, response), in the order given; `adapter=False` scores under the base model.

    log p(response, turn end | prompt) = the sum of log p(token | all before it) over the response's tokens and the
    token that ends the turn. Prompts are never scored. Items of similar length share a batch.
    """
    encoded = policy.encoder.responses(items)
    with contextlib.nullcontext() if adapter else policy.without_adapter():
        logps = score_encoded(policy, encoded, batch_size=batch_size)
    return [
        ResponseScore(logp, len(item.response_ids), item.prompt_cut or item.response_cut)
        for item, logp in zip(encoded, logps, strict=True)
    ]


def score_pairs(
    policy: LoadedPolicy,
    rows: Sequence[Any],
    *,
    batch_size: int = 16,
    adapter: bool = True,
) -> list[tuple[ResponseScore, ResponseScore]]:
    """Score the chosen and the rejected response of rows {"prompt", "chosen", "rejected"} as training takes them."""
    items = [
        (prompt_messages(row, number), response_text(row, side, number))
        for number, row in enumerate(rows)
        for side in ("chosen", "rejected")
    ]
    scores = score_responses(policy, items, batch_size=batch_size, adapter=adapter)
    return list(zip(scores[::2], scores[1::2], strict=True))


def score_encoded(
    policy: LoadedPolicy, items: Sequence[EncodedResponse], *, batch_size: int = 16
) -> list[float]:
    """Summed log-probability of each response that is already tokens, in nats. The same item is scored once."""
    firsts: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    same = [firsts.setdefault((tuple(a.prompt_ids), tuple(a.response_ids)), i) for i, a in enumerate(items)]
    order = sorted(firsts.values(), key=lambda i: len(items[i].prompt_ids) + len(items[i].response_ids))
    logps = [0.0] * len(items)
    was_training = policy.model.training
    policy.model.eval()
    try:
        with torch.inference_mode(), matmul(policy.hardware):
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                batch = collate([items[i] for i in rows], policy.tokenizer.pad_token_id)
                batch = {name: tensor.to(policy.device) for name, tensor in batch.items()}
                scored = token_logps(causal_model(policy.model), **batch)
                for i, value in zip(rows, scored.double().sum(1).tolist(), strict=True):
                    logps[i] = value
    finally:
        policy.model.train(was_training)
    return [logps[i] for i in same]


def collate(items: Sequence[EncodedResponse], pad_token_id: int) -> dict[str, torch.Tensor]:
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
    model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor, completion_mask: torch.Tensor
) -> torch.Tensor:
    """Log-probability of each completion token, float32 [rows, length - 1]; 0 elsewhere. Differentiable.

    `model` is the causal model itself (see `causal_model`); all inputs are [rows, length]. Only positions that
    predict a completion token reach the head.
    """
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    mask = completion_mask[:, 1:].bool()
    logps = head_logps(model, hidden[:, :-1][mask], input_ids[:, 1:][mask])[0]
    return logps.new_zeros(mask.shape).masked_scatter(mask, logps)


def head_logps(
    model: Any, hidden: torch.Tensor, targets: torch.Tensor, extras: tuple[str, ...] = ()
) -> tuple[Any, ...]:
    """log softmax(head(hidden))[targets] for hidden [n, width] and targets [n], in vocabulary tiles.

    Returns (log-probabilities, entropy, log sum of squares, mean logit, is top 1), each [n]; those not named in
    `extras` are None. TRL's chunked function does the work; its backward recomputes the tiles.
    """
    head = model.get_output_embeddings()
    softcap, scale = logit_settings(model.config)
    outputs = ChunkedLogProbFunction.apply(
        hidden, head.weight, head.bias, targets, 1.0, min(head.weight.shape[0], TILE), softcap, scale, extras
    )
    return tuple(outputs)


def logit_settings(config: Any) -> tuple[float | None, float]:
    """What an architecture does to its logits after the head: soft cap (or None) and factor.

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


def head_check(policy: LoadedPolicy) -> None:
    """Compare the quick log-probabilities with the model's own logits on one short prompt. Raises ScoringError."""
    (item,) = policy.encoder.responses([([{"role": "user", "content": "Ratchet asks"}], "Ratchet answers")])
    batch = {k: v.to(policy.device) for k, v in collate([item], policy.tokenizer.pad_token_id).items()}
    was_training = policy.model.training
    policy.model.eval()
    try:
        with torch.inference_mode():
            quick = token_logps(causal_model(policy.model), **batch)
            logits = policy.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    finally:
        policy.model.train(was_training)
    own = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    own = own * batch["completion_mask"][:, 1:]
    # one rounding of a logit in the model's dtype, at most a few tens in size, in either of the two
    allowed = 64 * float(torch.finfo(logits.dtype).eps) * max(1.0, float(logits.abs().max()))
    worst = float((quick - own).abs().max())
    if not worst <= allowed:
        raise ScoringError(
            f"{policy.base_model} ({policy.model.config.model_type}): log-probabilities taken before its head differ "
            f"by {worst:.2g} nats from its own logits (allowed {allowed:.2g}); this architecture does something to its "
            f"logits that is not known here. Please report it"
        )


def causal_model(model: Any) -> Any:
    """The transformers model inside a PeftModel (its LoRA layers stay in place), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
