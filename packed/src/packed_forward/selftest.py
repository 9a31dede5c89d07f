"""Self-test of packed forwards: log-probabilities and gradients of a few rows, measured packed and by the reference.

The reference is the model's own forward over unpacked rows. Nothing is assumed about an architecture: a strategy is
used for a model only where its numbers agree with the reference on that model's weights and on the run's own rows.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from packed_forward import forward as packed_forward
from packed_forward import fused_layers
from packed_forward.forward import packed_hidden
from packed_forward.logps import causal_model, collate, head_logps
from packed_forward.packing import CompletionTokens, Strategy, completion_with_end, pack
from packed_forward.row_cache import SelftestCache

TOLERANCE = {torch.float32: (1e-3, 2e-3), torch.bfloat16: (0.08, 0.15), torch.float16: (0.01, 0.1)}
"""dtype -> (root mean square difference of a token's log-probability in nats, relative difference of a gradient). A
wrong mask is off by 0.5 to 5 nats; float32 agrees to 1e-5 and bfloat16 to its rounding."""

LEAST_WRONG = 0.4
"""Nats that no rounding excuses: a wrong mask is off by more."""

PROBES = 4
"""Completions compared: those of the longest row and of the shortest."""

GRADIENT_TOKENS = 512
"""Tokens of a row up to which its gradients are compared, too; of a longer one the log-probabilities alone, where there
are shorter ones. A backward pass over 2,048 tokens takes gigabytes, and minutes on one core."""

ROUNDINGS = 3
"""Repetitions of the reference with its input rounded otherwise, where half precision leaves a doubt."""

FORWARD_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
    AssertionError,
)
"""Errors that a forward which was not made for packed rows may raise."""

Head = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""(the transformers model, hidden states [n, width]) -> scores [n]: for a run that reads a score at the end of each
response instead of the log-probabilities of its tokens."""

Measurement = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probabilities [n] (or scores) in float32, and the gradient of each trained parameter by its name."""


class PackablePolicy(Protocol):
    """A causal language model, with what a self-test needs besides; `LoadedPolicy` is one."""

    @property
    def model(self) -> torch.nn.Module:
        """A transformers causal model, or a PeftModel around one."""

    @property
    def device(self) -> torch.device: ...

    @property
    def pad_token_id(self) -> int: ...

    @property
    def selftest_cache(self) -> SelftestCache | None:
        """Results of earlier self-tests; None keeps nothing."""


@dataclass(frozen=True)
class PackableModel:
    """A model that is no loaded policy: from a notebook, or in a trainer of TRL's."""

    model: torch.nn.Module
    """A transformers causal model, or a PeftModel around one."""
    pad_token_id: int
    selftest_cache: SelftestCache | None = None
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    """Context of the run's forward passes; backward passes run outside of it."""

    @property
    def device(self) -> torch.device:
        return torch.device(causal_model(self.model).device)


def forward_context(policy: PackablePolicy) -> contextlib.AbstractContextManager[object]:
    """The autocast under which a policy's forward is measured; a loaded policy is measured in its own dtype."""
    return policy.autocast() if isinstance(policy, PackableModel) else contextlib.nullcontext()


def compute_dtype(policy: PackablePolicy) -> torch.dtype:
    """The dtype of a policy's matrix products: autocast's where that is on, else the weights'."""
    kind = policy.device.type
    with forward_context(policy):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    dtype: torch.dtype = causal_model(policy.model).dtype
    return dtype


def install(policy: PackablePolicy, strategy: Strategy) -> None:
    """Prepare a policy's model for a strategy; STOCK restores what transformers and peft made of it."""
    packed_forward.install(causal_model(policy.model), strategy)
    if strategy is Strategy.STOCK:
        fused_layers.restore_layers(policy.model)
    else:
        fused_layers.fuse_layers(policy.model)


def probe_completions(completions: Sequence[CompletionTokens]) -> list[CompletionTokens]:
    """The completions to compare: those of the longest row, where a sliding window would show, and of the shortest;
    where the longest is above GRADIENT_TOKENS, also of the longest below."""
    by_prompt: dict[tuple[int, ...], list[CompletionTokens]] = {}
    for item in completions:
        by_prompt.setdefault(tuple(item.prompt_ids), []).append(item)

    def length(same: list[CompletionTokens]) -> int:
        return len(same[0].prompt_ids) + max(len(item.response_ids) for item in same)

    rows = sorted(by_prompt.values(), key=length)
    within = [row for row in rows if length(row) <= GRADIENT_TOKENS]
    places = {len(rows) - 1, max(len(within) - 1, 0), 0}
    return [
        item
        for place in sorted(places, reverse=True)
        for item in sorted(rows[place], key=lambda item: -len(item.response_ids))[: PROBES // 2]
    ]


@contextlib.contextmanager
def measurement_mode(policy: PackablePolicy, gradients: bool) -> Iterator[None]:
    """Inside, no dropout, and LoRA matrices B that are not zero; everything is as before afterwards.

    B is zero at the start of a run, and then A has no gradient that could be compared.
    """
    model = policy.model
    was_training = model.training
    originals = {
        name: parameter.detach().clone()
        for name, parameter in model.named_parameters()
        if gradients and parameter.requires_grad and "lora_B" in name
    }
    model.eval()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in originals:
                    noise = torch.randn(parameter.shape, generator=generator) * 0.02
                    parameter.add_(noise.to(parameter))
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in originals:
                    parameter.copy_(originals[name])
        model.zero_grad(set_to_none=True)
        model.train(was_training)


def measure_reference(
    policy: PackablePolicy, probes: Sequence[CompletionTokens], gradients: bool, head: Head | None = None
) -> Measurement:
    """The probes measured by the model's own forward, over rows padded side by side."""
    install(policy, Strategy.STOCK)
    return _joined(
        [_reference(policy, part, with_gradients, head) for part, with_gradients in _parts(probes, gradients)]
    )


def _parts(
    probes: Sequence[CompletionTokens], gradients: bool
) -> list[tuple[Sequence[CompletionTokens], bool]]:
    """The probes in the parts that are measured together, each with whether its gradients are."""
    tokens = [len(item.prompt_ids) + len(item.response_ids) for item in probes]
    short = [item for item, n in zip(probes, tokens, strict=True) if n <= GRADIENT_TOKENS]
    if not short or len(short) == len(probes):
        return [(probes, gradients)]
    return [
        ([item for item, n in zip(probes, tokens, strict=True) if n > GRADIENT_TOKENS], False),
        (short, gradients),
    ]


def _joined(parts: Sequence[Measurement]) -> Measurement:
    return torch.cat([logps for logps, _ in parts]), parts[-1][1]


def _reference(
    policy: PackablePolicy, probes: Sequence[CompletionTokens], gradients: bool, head: Head | None
) -> Measurement:
    batch = collate(probes, policy.pad_token_id)
    batch = {name: tensor.to(policy.device) for name, tensor in batch.items()}
    ids, attention = batch["input_ids"], batch["attention_mask"]
    model = causal_model(policy.model)

    def run(rows: slice) -> torch.Tensor:
        with forward_context(policy):
            states: torch.Tensor = model.base_model(
                input_ids=ids[rows], attention_mask=attention[rows], use_cache=False
            ).last_hidden_state
        return states

    def measure(hidden: torch.Tensor) -> Measurement:
        if head is not None:
            rows = torch.arange(len(probes), device=attention.device)
            return _measure_scores(policy, head(model, hidden[rows, attention.sum(1) - 1]), gradients)
        mask = batch["completion_mask"][:, 1:].bool()
        return _measure_logps(policy, hidden[:, :-1][mask], ids[:, 1:][mask], gradients)

    everything = slice(len(probes))
    if not gradients or policy.device.type == "cpu":
        with torch.set_grad_enabled(gradients):
            return measure(run(everything))
    # back through one row at a time: an accelerator has less memory, and stock layers keep twice what packed ones do
    with torch.no_grad():
        hidden = run(everything)
    logps, _ = measure(hidden.requires_grad_())
    assert hidden.grad is not None
    for row in range(len(probes)):
        run(slice(row, row + 1)).backward(hidden.grad[row : row + 1])
    return logps, gradients_of(policy)


def measure_packed(
    policy: PackablePolicy,
    probes: Sequence[CompletionTokens],
    strategy: Strategy,
    gradients: bool,
    head: Head | None = None,
) -> Measurement:
    """The probes measured over packed rows, by a model that is prepared for the strategy."""
    return _joined(
        [
            _packed(policy, part, strategy, with_gradients, head)
            for part, with_gradients in _parts(probes, gradients)
        ]
    )


def _packed(
    policy: PackablePolicy,
    probes: Sequence[CompletionTokens],
    strategy: Strategy,
    gradients: bool,
    head: Head | None,
) -> Measurement:
    pad = policy.pad_token_id
    answers = [
        item.response_ids if head is None else completion_with_end(item.response_ids, pad) for item in probes
    ]
    packed = pack([item.prompt_ids for item in probes], answers, pad_token_id=pad).to(policy.device)
    with torch.set_grad_enabled(gradients):
        model = causal_model(policy.model)
        with forward_context(policy):
            hidden = packed_hidden(model, packed, strategy)
        flat, mask = hidden.reshape(-1, hidden.shape[-1]), packed.target_mask
        if head is not None:
            return _measure_scores(policy, head(model, flat[packed.ends()]), gradients)
        return _measure_logps(policy, flat[packed.sources[mask]], packed.targets[mask], gradients)


def _measure_scores(policy: PackablePolicy, scores: torch.Tensor, gradients: bool) -> Measurement:
    """The scores, and the gradients of one fixed weighted sum of them."""
    if not gradients:
        return scores.detach().float(), {}
    policy.model.zero_grad(set_to_none=True)
    (scores * torch.linspace(-1, 1, len(scores), device=scores.device)).sum().backward()
    return scores.detach().float(), gradients_of(policy)


def _measure_logps(
    policy: PackablePolicy, hidden: torch.Tensor, targets: torch.Tensor, gradients: bool
) -> Measurement:
    """The tokens' log-probabilities from hidden states [n, width], and gradients of one fixed weighted sum of others'.

    A token the model is sure of has next to no gradient, and what there is would be rounding: the gradients are those
    of other tokens in the same places, which it did not expect.
    """
    model = causal_model(policy.model)
    with forward_context(policy):
        logps = head_logps(model, hidden.detach(), targets)[0]
    if not gradients:
        return logps.detach().float(), {}
    policy.model.zero_grad(set_to_none=True)
    unexpected = (targets * 7919 + 13) % model.get_output_embeddings().weight.shape[0]
    weights = torch.linspace(-1, 1, len(logps), device=logps.device)
    with forward_context(policy):
        total = (head_logps(model, hidden, unexpected)[0] * weights).sum()
    total.backward()
    return logps.detach().float(), gradients_of(policy)


def gradients_of(policy: PackablePolicy) -> dict[str, torch.Tensor]:
    """A float32 copy of the gradient of each trained parameter, by its name."""
    return {
        name: parameter.grad.detach().float().clone()
        for name, parameter in policy.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }


@dataclass(frozen=True)
class Spread:
    """Largest changes of the reference's own numbers when its input is rounded another way."""

    logps: float = 0.0
    """Root mean square of those of the log-probabilities, in nats."""
    gradients: Mapping[str, float] = field(default_factory=dict)
    """Relative change of each gradient."""


def rounding_spread(
    policy: PackablePolicy,
    probes: Sequence[CompletionTokens],
    expected: Measurement,
    head: Head | None = None,
) -> Spread:
    """Measure what rounding alone changes.

    Some rows are ill-conditioned in half precision, one token over and over for example: there two right forwards
    differ by more than TOLERANCE, and so does one forward from itself.
    """
    embedding = causal_model(policy.model).get_input_embeddings()
    generator = torch.Generator().manual_seed(0)

    def round_output(module: torch.nn.Module, inputs: object, out: torch.Tensor) -> torch.Tensor:
        # a rounding is off by a quarter of the spacing of numbers, in the mean
        noise = torch.randn(out.shape, generator=generator) * torch.finfo(out.dtype).eps / 4
        return (out.float() * (1 + noise.to(out.device))).to(out.dtype)

    logps, most = 0.0, dict[str, float]()
    hook = embedding.register_forward_hook(round_output)
    try:
        for _ in range(ROUNDINGS):
            rounded = measure_reference(policy, probes, bool(expected[1]), head)
            logps = max(logps, logp_difference(expected, rounded))
            moved = gradient_differences(expected, rounded)
            most = {name: max(by, most.get(name, 0.0)) for name, by in moved.items()}
    finally:
        hook.remove()
    return Spread(logps, most)


def logp_difference(expected: Measurement, measured: Measurement) -> float:
    """Root mean square difference of the log-probabilities, in nats."""
    return float((expected[0] - measured[0]).square().mean().sqrt())


def gradient_differences(expected: Measurement, measured: Measurement) -> dict[str, float]:
    """Distance of each gradient from the one expected, relative to the norm of that."""
    largest = max((float(gradient.norm()) for gradient in expected[1].values()), default=0.0)
    differences = {}
    for name, gradient in expected[1].items():
        other = measured[1].get(name)
        difference = math.inf if other is None else float((gradient - other).norm())
        # a gradient that is nearly nothing is compared with the largest, not with itself
        differences[name] = difference / max(float(gradient.norm()), 0.01 * largest)
    return differences


def compare(
    expected: Measurement,
    measured: Measurement,
    dtype: torch.dtype,
    spread: Spread | None = None,
) -> tuple[bool, str]:
    """True if two measurements agree, with the differences in words.

    A log-probability or gradient may differ by twice its rounding `spread`, one of which each of the two may have,
    where that is more than TOLERANCE. Log-probabilities never differ by LEAST_WRONG, and half of the gradients at least
    are within TOLERANCE.
    """
    error, spread = logp_difference(expected, measured), spread or Spread()
    logp_limit, gradient_limit = TOLERANCE.get(dtype, TOLERANCE[torch.float32])
    logp_limit = max(logp_limit, min(2 * spread.logps, LEAST_WRONG))
    text = f"log-probabilities within {error:.1e} nats"
    if spread.logps:
        text += f" (of rounding alone {spread.logps:.1e})"
    if not expected[1]:
        return error <= logp_limit, text
    differences = gradient_differences(expected, measured)
    text += f", gradients within {max(differences.values()):.1e}"
    if spread.gradients:
        text += f" (of rounding alone {max(spread.gradients.values()):.1e})"
    near = statistics.median(differences.values()) <= gradient_limit and all(
        by <= max(gradient_limit, 2 * spread.gradients.get(name, 0.0)) for name, by in differences.items()
    )
    return error <= logp_limit and near, text
