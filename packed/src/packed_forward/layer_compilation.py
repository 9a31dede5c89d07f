"""Decoder layers compiled one by one (regional compilation), over few widths of rows, where a run is long enough.

A layer is compiled once and used for all that are made alike; embeddings, head and loss stay as they are. Each width of
rows is compiled for itself, so rows are padded to a few widths that suit the run's own lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

MOST_PROMPTS, MOST_SUFFIXES = 4, 2
"""Widths of the prompt's part and of the completions' part that a run is given, at most."""

STEP = 8
"""Widths are multiples of so many tokens, as tensor cores want them."""

LIMIT = 64
"""Most compiled versions of one layer; widths beyond them run uncompiled."""

COMPILE_S = 30.0
"""Seconds that compiling one pair of widths is taken to cost, forward and backward. Not measured on a GPU."""

GAIN = 0.1
"""Share of a step that compiling is taken to save: torchtitan reports 1.16 times on an H100 (5,762 to 6,667 tokens a
second, Llama 3 8B), some of it in parts that are not compiled here."""


@dataclass(frozen=True)
class Buckets:
    """Widths to which packed rows are padded, ascending."""

    prompts: tuple[int, ...]
    suffixes: tuple[int, ...]

    def fit(self, prompt: int, suffix: int) -> tuple[int, int]:
        """The widths for rows of so many tokens. What is wider than all goes to a multiple of the widest."""
        return _at_least(prompt, self.prompts), _at_least(suffix, self.suffixes)

    @property
    def shapes(self) -> int:
        return len(self.prompts) * len(self.suffixes)


def _at_least(length: int, widths: Sequence[int]) -> int:
    return next((width for width in widths if width >= length), -(-length // widths[-1]) * widths[-1])


def buckets_fit(prompts: Sequence[int], suffixes: Sequence[int]) -> Buckets:
    """The few widths that pad rows of these lengths least."""
    return Buckets(widths_fit(prompts, MOST_PROMPTS), widths_fit(suffixes, MOST_SUFFIXES))


def widths_fit(lengths: Sequence[int], most: int) -> tuple[int, ...]:
    """At most `most` widths, multiples of STEP, of which each length takes the next larger one, with least padding.

    Exact, by dynamic programming over the distinct lengths in order; fewer widths where more would save nothing.
    """
    rounded = [-(-max(length, 1) // STEP) * STEP for length in lengths]
    distinct = sorted(set(rounded))
    count = [rounded.count(width) for width in distinct]
    cumulative = [0]
    for number in count:
        cumulative.append(cumulative[-1] + number)
    # best[j]: least tokens for the first j distinct lengths, and the widths that give it
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())] + [
        (cumulative[j] * distinct[j - 1], (distinct[j - 1],)) for j in range(1, len(distinct) + 1)
    ]
    for _ in range(1, most):
        best = [best[0]] + [
            min(
                [best[j]]
                + [
                    (
                        best[i][0] + (cumulative[j] - cumulative[i]) * distinct[j - 1],
                        (*best[i][1], distinct[j - 1]),
                    )
                    for i in range(1, j)
                ]
            )
            for j in range(1, len(distinct) + 1)
        ]
    return best[-1][1]


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> None:
    """Compile each decoder layer of a causal model that is prepared for its strategy. A second call changes nothing."""
    for layer in model.base_model.layers:
        if hasattr(layer, "ratchet_compiled"):
            continue
        layer.ratchet_uncompiled = vars(layer).get("forward")
        layer.ratchet_compiled = True
        layer.forward = _compile_forward(layer.forward, backend)


def uncompile_layers(model: torch.nn.Module) -> None:
    """Undo `compile_layers`."""
    for layer in getattr(model.base_model, "layers", None) or ():
        if not hasattr(layer, "ratchet_compiled"):
            continue
        before = layer.ratchet_uncompiled
        del layer.forward, layer.ratchet_uncompiled, layer.ratchet_compiled
        if before is not None:
            layer.forward = before


def is_compiled(model: torch.nn.Module) -> bool:
    """True if `compile_layers` has compiled the layers of a causal model."""
    return any(
        hasattr(layer, "ratchet_compiled") for layer in getattr(model.base_model, "layers", None) or ()
    )


def compilable(model: torch.nn.Module) -> bool:
    """True if a causal model keeps its decoder layers where `compile_layers` looks for them."""
    return bool(getattr(model.base_model, "layers", None))


def _compile_forward(own: Callable[..., Any], backend: str) -> Callable[..., Any]:
    run = torch.compile(own, dynamic=False, backend=backend, recompile_limit=LIMIT)

    def forward(*args: object, **kwargs: object) -> Any:
        # how many rows a batch packs into differs, their widths do not
        for tensor in _tensors([*args, *kwargs.values()]):
            if tensor.ndim > 1 and tensor.shape[0] > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return run(*args, **kwargs)

    return forward


def _tensors(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif is_dataclass(value):
            yield from _tensors([getattr(value, field.name) for field in fields(value)])


def compiling_pays(step_s: float, steps: int, shapes: int) -> tuple[bool, str]:
    """True if a run of so many steps of `step_s` seconds gains more by compiling than it costs, with the
    figures."""
    saved, cost = GAIN * step_s * steps, COMPILE_S * shapes
    figures = (
        f"{steps:,} steps of {step_s:.2g} s, of which a tenth is {saved:,.0f} s, against {cost:,.0f} s for compiling "
        f"{shapes} {'width' if shapes == 1 else 'widths'} of rows"
    )
    return saved > cost, figures
