"""Decision whether to compile a run's decoder layers: requested, profitable, and equal to the stock forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packed_forward import layer_compilation
from packed_forward.layer_compilation import Buckets, buckets_fit, compiling_pays
from packed_forward.logps import causal_model
from packed_forward.packing import CompletionTokens
from packed_forward.selection import compiled_agrees
from packed_forward.selftest import PackablePolicy
from packed_forward.strategies import FLEX_STRATEGIES, Strategy


@dataclass(frozen=True)
class CompileChoice:
    """The decision; `buckets` are the widths rows are padded to, None where nothing is compiled."""

    buckets: Buckets | None
    reason: str

    @property
    def summary(self) -> str:
        """One line for a run's record."""
        if self.buckets is None:
            return f"layers are not compiled: {self.reason}"
        widths = " or ".join(map(str, self.buckets.prompts)), " or ".join(map(str, self.buckets.suffixes))
        return f"layers are compiled, for prompts of {widths[0]} and completions of {widths[1]} tokens: {self.reason}"


def compile_choose(
    policy: PackablePolicy,
    strategy: Strategy,
    items: Sequence[CompletionTokens],
    *,
    wish: str,
    steps: int,
    step_s: Callable[[], float],
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> CompileChoice:
    """Decide for a run of `steps` micro-batches, and compile where the decision is to do so.

    `wish` is the recipe's `compile`: auto, on or off. `items` are completions in pairs, those of one row next to each
    other. `step_s` measures a micro-batch; it is asked only where the answer counts.
    """
    why_not = _impossible(policy, strategy, wish)
    if why_not:
        return CompileChoice(None, why_not)
    pairs = list(zip(items[::2], items[1::2], strict=True))
    buckets = buckets_fit(
        [len(first.prompt_ids) for first, _ in pairs],
        [max(len(first.response_ids) + len(second.response_ids) - 2, 1) for first, second in pairs],
    )
    reason = "asked for"
    if wish == "auto":
        try:
            pays, reason = compiling_pays(step_s(), steps, buckets.shapes)
        except torch.OutOfMemoryError:
            return CompileChoice(None, "a step that was to be timed did not fit into memory")
        if not pays:
            return CompileChoice(None, reason)
    agrees, differences = compiled_agrees(policy, items, strategy, buckets.fit, autocast)
    if not agrees:
        return CompileChoice(
            None, f"compiled, they do not match the model's own forward pass ({differences})"
        )
    return CompileChoice(buckets, f"{reason}; {differences}")


def _impossible(policy: PackablePolicy, strategy: Strategy, wish: str) -> str:
    if wish == "off":
        return "asked not to be"
    if strategy is Strategy.STOCK:
        return "rows are not packed"
    if strategy in FLEX_STRATEGIES:
        return "FlexAttention compiles its own kernel, and its rows have no few widths"
    if strategy is Strategy.CACHE:
        return "two passes over a key-value cache are not one form of a layer"
    if not layer_compilation.compilable(causal_model(policy.model)):
        return "its layers were not found in the model"
    if wish == "auto" and policy.device.type != "cuda":
        return "only on CUDA, unless asked for with compile=on"
    return ""
