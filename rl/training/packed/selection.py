"""Which way over packed rows is right for a model: tried on its own first batch against the stock forward, never
assumed."""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rl.training.encoding import EncodedResponse
from rl.training.packed import fused_layers, layer_compilation, prefix_attention
from rl.training.packed.logps import causal_model, collate, head_logps, spread_at
from rl.training.packed.packing import Packed, ended, pack
from rl.training.packed.prefix_attention import Rung, packed_hidden
from rl.training.packed.selftest_cache import finding_keep, finding_key, finding_read
from rl.training.policy import LoadedPolicy

logger = logging.getLogger("rl.training.packed.selection")

TOLERANCE = {torch.float32: (1e-3, 2e-3), torch.bfloat16: (0.08, 0.15), torch.float16: (0.01, 0.1)}
"""dtype -> (root mean square difference of a token's log-probability in nats, relative difference of a gradient). A
wrong mask is off by 0.5 to 5 nats; float32 agrees to 1e-5 and bfloat16 to its rounding."""

PROBED = 4
"""Completions compared: those of the longest row and of the shortest."""

ROUNDINGS = 3
"""How often the stock forward is repeated with its input rounded otherwise, where half precision leaves a doubt."""

RUNG_ERRORS = (
    RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, NotImplementedError, AssertionError,
)  # fmt: skip
"""What a forward that was not made for packed rows may raise."""


@dataclass(frozen=True)
class Choice:
    """The rung a model is computed with, and why."""

    rung: Rung
    reason: str
    agreement: dict[str, str]
    """What became of each rung that was tried."""
    raised: bool = False
    """Whether one of them raised an error, which may not come again."""

    @property
    def said(self) -> str:
        """The same for a run's record."""
        if self.rung is Rung.STOCK:
            return f"rows are not packed: {self.reason}"
        return f"rows that share a prompt: {self.rung}, because it {self.reason}"


Head = Callable[[Any, torch.Tensor], torch.Tensor]
"""(the transformers model, hidden states [n, width]) -> scores [n]: what a run reads at the end of each response, where
it is not the log-probabilities of its tokens."""


def rung_choose(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    *,
    gradients: bool,
    lowest: Rung = Rung.LAST_LAYER,
    head: Head | None = None,
) -> Choice:
    """Find the first rung whose log-probabilities (and LoRA gradients) agree with the stock forward, and install it.

    `items` are the completions to come: the row that is longest is among those compared, because a sliding window shows
    only there. LoRA's B is zero at the start, so it is perturbed while the gradients of A are looked at. `lowest` is
    the first rung to try. With a `head` its scores are compared, not log-probabilities. What an earlier run found for
    the same weights, adapter shape, machine and code, on rows as long, is not tried again.
    """
    model = causal_model(policy.model)
    why_not = _not_packable(model, items)
    if why_not:
        install(policy, Rung.STOCK)
        return Choice(Rung.STOCK, why_not, {})
    longest = max(len(item.prompt_ids) + len(item.response_ids) for item in items)
    # a head's scores depend on its own code too: tried each time
    key = finding_key(policy, lowest, str(gradients)) if head is None else None
    known = finding_read(policy, key, longest) if key is not None else None
    if known is not None:
        install(policy, Rung(known["rung"]))
        return Choice(
            Rung(known["rung"]), f"{known['reason']}; found by an earlier run", dict(known["agreement"])
        )
    choice = _rung_tried(policy, items, gradients, lowest, head)
    if key is not None and choice.rung is not Rung.STOCK and not choice.raised:
        finding_keep(policy, key, longest, rung=choice.rung, reason=choice.reason, agreement=choice.agreement)
    return choice


def _rung_tried(
    policy: LoadedPolicy, items: Sequence[EncodedResponse], gradients: bool, lowest: Rung, head: Head | None
) -> Choice:
    probe = _probe(items)
    model = causal_model(policy.model)
    agreement: dict[str, str] = {}
    raised = False
    doubt: dict[str, float] = {}
    with _as_tested(policy, gradients):
        expected = _stock(policy, probe, gradients, head)
        ladder = list(Rung)
        for rung in ladder[ladder.index(lowest) :]:
            if rung is Rung.STOCK:
                break
            refused = _refused(policy, rung, gradients)
            if refused:
                agreement[rung] = refused
                continue
            install(policy, rung)
            try:
                found = _packed(policy, probe, rung, gradients, head)
            except RUNG_ERRORS as error:
                raised = True
                agreement[rung] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
                continue
            agrees, said = _compare(expected, found, model.dtype)
            if not agrees and gradients and model.dtype != torch.float32:
                doubt = doubt or _doubt(policy, probe, expected, head)
                agrees, said = _compare(expected, found, model.dtype, doubt)
                install(policy, rung)
            agreement[rung] = said
            if agrees:
                why = f"agrees with the stock forward: {said}"
                asked = agreement.get(lowest, "") if lowest in prefix_attention.FLEX_RUNGS else ""
                if rung not in prefix_attention.FLEX_RUNGS and asked:
                    why += f" (FlexAttention was asked for; {lowest}: {asked})"
                return Choice(rung, why, agreement, raised)
        install(policy, Rung.STOCK)
    tried = "; ".join(f"{rung}: {said}" for rung, said in agreement.items())
    logger.info("no packed forward agrees with %s: %s", policy.base_model, tried)
    return Choice(Rung.STOCK, f"no packed forward agrees with the stock one ({tried})", agreement)


def install(policy: LoadedPolicy, rung: Rung) -> None:
    """Prepare a policy's model for a rung; STOCK restores what transformers and peft made of it."""
    layer_compilation.uncompile_layers(causal_model(policy.model))
    prefix_attention.install(causal_model(policy.model), rung)
    if rung is Rung.STOCK:
        fused_layers.restore(policy.model)
    else:
        fused_layers.lighten(policy.model)


def compiled_agrees(
    policy: LoadedPolicy,
    items: Sequence[EncodedResponse],
    rung: Rung,
    fit: Callable[[int, int], tuple[int, int]],
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[bool, str]:
    """Compile the layers for a rung and hold them to the stock forward as each rung is; left compiled if they agree.

    `fit` pads the rows as the run will, `autocast` is the run's. Returns whether they agree, and by how much.
    """
    probe, model = _probe(items), policy.model
    drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    try:
        with _as_tested(policy, True), autocast():
            expected = _stock(policy, probe, True)
            half = causal_model(model).dtype != torch.float32
            doubt = _doubt(policy, probe, expected) if half else {}
            install(policy, rung)
            layer_compilation.compile_layers(causal_model(model))
            model.train(not drops)  # a layer is compiled for training or for the rest
            found = _packed(policy, probe, rung, True, fit=fit)
        agrees, said = _compare(expected, found, causal_model(model).dtype, doubt)
    except RUNG_ERRORS as error:
        agrees, said = False, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if not agrees:
        install(policy, rung)
    return agrees, said


def packed_logps(
    model: Any, packed: Packed, rung: Rung, extras: tuple[str, ...] = (), temperature: float = 1.0
) -> tuple[Any, ...]:
    """Log-probability of each completion token, float32 [N, C], 0 where there is none; then what `extras` name, as
    `head_logps` returns it. `model` is the causal model itself. Differentiable.
    """
    hidden = packed_hidden(model, packed, rung)
    flat = hidden.reshape(-1, hidden.shape[-1])
    shape, places = packed.target_mask.shape, packed.places
    read = flat[packed.sources.flatten()[places]]
    found = head_logps(model, read, packed.targets.flatten()[places], extras, temperature)
    return tuple(None if values is None else spread_at(values, places, shape) for values in found)


def _not_packable(model: Any, items: Sequence[EncodedResponse]) -> str:
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return "a mixture of experts with a router loss, which depends on every token fed"
    if not all(item.prompt_ids and item.response_ids for item in items):
        return "an empty prompt or response among the rows"
    return ""


FLEX_FROM = 4096
"""Tokens of prompt, in the middle of a run's rows, from which FlexAttention is tried on CUDA unasked."""


def lowest_rung(attention: str, device: str, items: Sequence[EncodedResponse]) -> Rung:
    """The first rung to try, for a recipe's `attention`: auto, split or flex."""
    if attention == "auto" and device == "cuda" and items:
        lengths = sorted(len(item.prompt_ids) for item in items)
        attention = "flex" if lengths[len(lengths) // 2] >= FLEX_FROM else "split"
    return Rung.FLEX_LAST_LAYER if attention == "flex" else Rung.LAST_LAYER


def _refused(policy: LoadedPolicy, rung: Rung, gradients: bool) -> str:
    """Why a rung need not be tried, or nothing."""
    model = causal_model(policy.model)
    if rung in prefix_attention.FLEX_RUNGS and gradients and policy.device.type == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    if rung in prefix_attention.LAST_LAYER_RUNGS and not prefix_attention.last_layer_known(model):
        return "the last layer has parts of its own"
    if rung in prefix_attention.OWN_ATTENTION and model.config._attn_implementation not in (
        "sdpa",
        prefix_attention.ATTENTION,
    ):
        return f"its attention is {model.config._attn_implementation}, not sdpa"
    return ""


def _probe(items: Sequence[EncodedResponse]) -> list[EncodedResponse]:
    by_prompt: dict[tuple[int, ...], list[EncodedResponse]] = {}
    for item in items:
        by_prompt.setdefault(tuple(item.prompt_ids), []).append(item)

    def length(same: list[EncodedResponse]) -> int:
        return len(same[0].prompt_ids) + max(len(item.response_ids) for item in same)

    rows = sorted(by_prompt.values(), key=length)
    half = PROBED // 2
    longest = sorted(rows[-1], key=lambda item: -len(item.response_ids))[:half]
    return longest + (rows[0][:half] if len(rows) > 1 else [])


@contextlib.contextmanager
def _as_tested(policy: LoadedPolicy, gradients: bool) -> Iterator[None]:
    """Without dropout, and with LoRA matrices B that are not zero; everything is as before afterwards."""
    model = policy.model
    was_training = model.training
    kept = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if gradients and parameter.requires_grad and "lora_B" in name
    }
    model.eval()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in kept:
                    noise = torch.randn(parameter.shape, generator=generator) * 0.02
                    parameter.add_(noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in kept:
                    parameter.copy_(kept[name])
        model.zero_grad(set_to_none=True)
        model.train(was_training)


Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _stock(
    policy: LoadedPolicy, probe: list[EncodedResponse], gradients: bool, head: Head | None = None
) -> Found:
    install(policy, Rung.STOCK)
    batch = collate(probe, policy.tokenizer.pad_token_id)
    batch = {name: tensor.to(policy.device) for name, tensor in batch.items()}
    attention = batch["attention_mask"]
    with torch.set_grad_enabled(gradients):
        model = causal_model(policy.model)
        hidden = model.base_model(
            input_ids=batch["input_ids"], attention_mask=attention, use_cache=False
        ).last_hidden_state
        if head is not None:
            rows = torch.arange(len(probe), device=attention.device)
            return _scores_found(policy, head(model, hidden[rows, attention.sum(1) - 1]), gradients)
        mask = batch["completion_mask"][:, 1:].bool()
        return _found(policy, hidden[:, :-1][mask], batch["input_ids"][:, 1:][mask], gradients)


def _packed(
    policy: LoadedPolicy,
    probe: list[EncodedResponse],
    rung: Rung,
    gradients: bool,
    head: Head | None = None,
    fit: Callable[[int, int], tuple[int, int]] | None = None,
) -> Found:
    pad = policy.tokenizer.pad_token_id
    answers = [item.response_ids if head is None else ended(item.response_ids, pad) for item in probe]
    packed = pack([item.prompt_ids for item in probe], answers, pad_token_id=pad, fit=fit).to(policy.device)
    with torch.set_grad_enabled(gradients):
        model = causal_model(policy.model)
        hidden = packed_hidden(model, packed, rung)
        flat, mask = hidden.reshape(-1, hidden.shape[-1]), packed.target_mask
        if head is not None:
            return _scores_found(policy, head(model, flat[packed.ends()]), gradients)
        return _found(policy, flat[packed.sources[mask]], packed.targets[mask], gradients)


def _scores_found(policy: LoadedPolicy, scores: torch.Tensor, gradients: bool) -> Found:
    """The scores, and the gradients of one fixed weighing of them."""
    if not gradients:
        return scores.detach().float(), {}
    policy.model.zero_grad(set_to_none=True)
    (scores * torch.linspace(-1, 1, len(scores), device=scores.device)).sum().backward()
    return scores.detach().float(), _gradients(policy)


def _found(policy: LoadedPolicy, hidden: torch.Tensor, targets: torch.Tensor, gradients: bool) -> Found:
    """The tokens' log-probabilities from hidden states [n, width], and gradients of one fixed weighing of others'.

    A token the model is sure of has next to no gradient, and what there is would be rounding: the gradients are those
    of other tokens in the same places, which it did not expect.
    """
    model = causal_model(policy.model)
    logps = head_logps(model, hidden.detach(), targets)[0]
    if not gradients:
        return logps.detach().float(), {}
    policy.model.zero_grad(set_to_none=True)
    unexpected = (targets * 7919 + 13) % model.get_output_embeddings().weight.shape[0]
    weights = torch.linspace(-1, 1, len(logps), device=logps.device)
    (head_logps(model, hidden, unexpected)[0] * weights).sum().backward()
    return logps.detach().float(), _gradients(policy)


def _gradients(policy: LoadedPolicy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad.detach().float().clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


def _doubt(
    policy: LoadedPolicy, probe: list[EncodedResponse], expected: Found, head: Head | None = None
) -> dict[str, float]:
    """How far each of the stock forward's own gradients moves, at most, when its input is rounded another way.

    Some rows are ill-conditioned in half precision, one token over and over for example: there two right ways differ
    by more than TOLERANCE, and so does one way from itself.
    """
    embedding = causal_model(policy.model).get_input_embeddings()
    generator = torch.Generator().manual_seed(0)

    def rounded(module: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
        # a rounding is off by a quarter of the spacing of numbers, in the mean
        noise = torch.randn(out.shape, generator=generator) * torch.finfo(out.dtype).eps / 4
        return (out.float() * (1 + noise.to(out.device))).to(out.dtype)

    most: dict[str, float] = {}
    hook = embedding.register_forward_hook(rounded)
    try:
        for _ in range(ROUNDINGS):
            moved = _differences(expected, _stock(policy, probe, True, head))
            most = {name: max(by, most.get(name, 0.0)) for name, by in moved.items()}
    finally:
        hook.remove()
    return most


def _differences(expected: Found, found: Found) -> dict[str, float]:
    """How far each gradient is from the one expected, relative to it."""
    largest = max((float(gradient.norm()) for gradient in expected[1].values()), default=0.0)
    differences = {}
    for name, gradient in expected[1].items():
        other = found[1].get(name)
        difference = math.inf if other is None else float((gradient - other).norm())
        # a gradient that is nearly nothing is compared with the largest, not with itself
        differences[name] = difference / max(float(gradient.norm()), 0.01 * largest)
    return differences


def _compare(
    expected: Found, found: Found, dtype: torch.dtype, doubt: Mapping[str, float] | None = None
) -> tuple[bool, str]:
    """Whether they agree, and by how much. A gradient may differ by twice its `doubt`, one of which each of the two
    may have, where that is more than TOLERANCE; half of them at least must be within that."""
    off = float((expected[0] - found[0]).square().mean().sqrt())
    logp_limit, gradient_limit = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    said = f"log-probabilities within {off:.1e} nats"
    if not expected[1]:
        return off <= logp_limit, said
    differences, doubt = _differences(expected, found), doubt or {}
    said += f", gradients within {max(differences.values()):.1e}"
    if doubt:
        said += f" (of rounding alone {max(doubt.values()):.1e})"
    near = statistics.median(differences.values()) <= gradient_limit and all(
        by <= max(gradient_limit, 2 * doubt.get(name, 0.0)) for name, by in differences.items()
    )
    return off <= logp_limit and near, said
