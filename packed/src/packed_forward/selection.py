"""Choose the fastest forward strategy that matches the reference forward on this model.

Each candidate, fastest first, is run on the run's first rows and compared in log-probabilities and gradients
(`packed.selftest`). No agreement means STOCK: rows are then not packed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from packed_forward import layer_compilation, selftest
from packed_forward.forward import last_layer_supported
from packed_forward.layer_compilation import Buckets, buckets_fit, compiling_pays
from packed_forward.logps import causal_model
from packed_forward.packing import CompletionTokens
from packed_forward.prefix_attention import ATTENTION
from packed_forward.selftest import FORWARD_ERRORS, Fit, Head, PackablePolicy, install
from packed_forward.selftest_cache import selftest_key, selftest_read, selftest_store
from packed_forward.strategies import (
    FLEX_STRATEGIES,
    LAST_LAYER_STRATEGIES,
    PREFIX_ATTENTION_STRATEGIES,
    Strategy,
)

logger = logging.getLogger("packed_forward.selection")


@dataclass(frozen=True)
class StrategyChoice:
    """The forward strategy a model is computed with, and the reason."""

    strategy: Strategy
    reason: str
    agreement: dict[str, str]
    """Strategy -> the differences measured, or why it was not measured."""
    raised: bool = False
    """True if a candidate raised an error, which may have been a passing one."""

    @property
    def summary(self) -> str:
        """One line for a run's record."""
        if self.strategy is Strategy.STOCK:
            return f"rows are not packed: {self.reason}"
        return f"forward pass for rows that share a prompt: {self.strategy}, as it {self.reason}"


def strategy_select(
    policy: PackablePolicy,
    completions: Sequence[CompletionTokens],
    *,
    gradients: bool,
    first: Strategy = Strategy.LAST_LAYER,
    head: Head | None = None,
) -> StrategyChoice:
    """Find the first strategy whose log-probabilities (and gradients) agree with the reference, and install it.

    `completions` are those of the run to come. The longest row is among those compared where the model has a sliding
    window, which shows only there. LoRA's B is zero at the start, so it is perturbed while the gradients of A are
    compared. `first` is the first strategy to try. With a `head` its scores are compared, not log-probabilities. The
    result of an earlier run on the same weights, adapter shape, machine and code, and on rows as long, is taken from
    the policy's cache.
    """
    reason = _not_packable(causal_model(policy.model), completions)
    if reason:
        install(policy, Strategy.STOCK)
        return StrategyChoice(Strategy.STOCK, reason, {})
    completions = _telling(causal_model(policy.model), completions)
    longest = max(_length(item) for item in completions)
    # a head's scores depend on its own code too: measured each time
    key = selftest_key(policy, first, str(gradients)) if head is None else None
    known = selftest_read(policy, key, longest) if key is not None else None
    if known is not None:
        strategy = Strategy(known["rung"])
        install(policy, strategy)
        return StrategyChoice(
            strategy, f"{known['reason']}; tested by an earlier run", dict(known["agreement"])
        )
    choice = _select_by_test(policy, completions, gradients, first, head)
    if key is not None and choice.strategy is not Strategy.STOCK and not choice.raised:
        # `rung` is the strategy's name in files written since the first version
        selftest_store(
            policy, key, longest, rung=choice.strategy, reason=choice.reason, agreement=choice.agreement
        )
    return choice


def _select_by_test(
    policy: PackablePolicy,
    completions: Sequence[CompletionTokens],
    gradients: bool,
    first: Strategy,
    head: Head | None,
) -> StrategyChoice:
    probes = selftest.probe_completions(completions)
    dtype = selftest.compute_dtype(policy)
    agreement: dict[str, str] = {}
    has_error = False
    spread: selftest.Spread | None = None
    with selftest.measurement_mode(policy, gradients):
        expected = selftest.measure_reference(policy, probes, gradients, head)
        for strategy in _candidates(first):
            obstacle = _obstacle(policy, strategy, gradients)
            if obstacle:
                agreement[strategy] = obstacle
                continue
            install(policy, strategy)
            try:
                measured = selftest.measure_packed(policy, probes, strategy, gradients, head)
            except FORWARD_ERRORS as error:
                has_error = True
                agreement[strategy] = _error_line(error)
                continue
            agrees, text = selftest.compare(expected, measured, dtype)
            if not agrees and dtype != torch.float32:
                spread = spread or selftest.rounding_spread(policy, probes, expected, head)
                agrees, text = selftest.compare(expected, measured, dtype, spread)
                install(policy, strategy)
            agreement[strategy] = text
            if agrees:
                reason = f"matches the model's own forward pass: {text}"
                flex = agreement.get(first, "") if first in FLEX_STRATEGIES else ""
                if strategy not in FLEX_STRATEGIES and flex:
                    reason += f" (FlexAttention was asked for; {first}: {flex})"
                return StrategyChoice(strategy, reason, agreement, has_error)
        install(policy, Strategy.STOCK)
    tried = "; ".join(f"{strategy}: {text}" for strategy, text in agreement.items())
    logger.info("no packed forward pass matches that of %s: %s", _name(policy), tried)
    return StrategyChoice(
        Strategy.STOCK, f"no packed forward pass matches the model's own ({tried})", agreement
    )


def _candidates(first: Strategy) -> list[Strategy]:
    """The packed strategies from `first` on, fastest first."""
    ordered = list(Strategy)
    return [strategy for strategy in ordered[ordered.index(first) :] if strategy is not Strategy.STOCK]


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _name(policy: PackablePolicy) -> str:
    return str(getattr(policy.model.config, "_name_or_path", "") or type(causal_model(policy.model)).__name__)


def compiled_agrees(
    policy: PackablePolicy,
    completions: Sequence[CompletionTokens],
    strategy: Strategy,
    fit: Fit,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> tuple[bool, str]:
    """Compile the layers for a strategy and self-test them as each strategy is; left compiled if they agree.

    `fit` pads the rows as the run will, `autocast` is the run's. Returns whether they agree, and the differences.
    """
    probes, model = selftest.probe_completions(completions), policy.model
    dtype = causal_model(model).dtype
    drops = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
    try:
        with selftest.measurement_mode(policy, True), autocast():
            expected = selftest.measure_reference(policy, probes, True)
            spread = selftest.rounding_spread(policy, probes, expected) if dtype != torch.float32 else None
            install(policy, strategy)
            layer_compilation.compile_layers(causal_model(model))
            model.train(not drops)  # a layer is compiled for training or for the rest
            measured = selftest.measure_packed(policy, probes, strategy, True, fit=fit)
        agrees, text = selftest.compare(expected, measured, dtype, spread)
    except FORWARD_ERRORS as error:
        agrees, text = False, _error_line(error)
    if not agrees:
        install(policy, strategy)
    return agrees, text


def _not_packable(model: torch.nn.Module, completions: Sequence[CompletionTokens]) -> str:
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return "a mixture of experts with a router loss, which depends on every token fed"
    if not all(item.prompt_ids and item.response_ids for item in completions):
        return "an empty prompt or response among the rows"
    return ""


def _telling(model: Any, completions: Sequence[CompletionTokens]) -> Sequence[CompletionTokens]:
    """The completions that a self-test has to see: long ones only where attention or positions depend on the length of
    a row, or where there are no others. A test on rows of 2,000 tokens takes minutes on one core."""
    text = model.config.get_text_config()
    rotation = getattr(text, "rope_parameters", None) or {}
    depends = (
        getattr(text, "sliding_window", None)
        or set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
        or rotation.get("rope_type", "default") != "default"
    )
    short = [item for item in completions if _length(item) <= selftest.GRADIENT_TOKENS]
    return completions if depends or not short else short


def _length(item: CompletionTokens) -> int:
    return len(item.prompt_ids) + len(item.response_ids)


FLEX_FROM = 4096
"""Tokens of a run's median prompt from which `attention: auto` tries FlexAttention on CUDA."""


def first_strategy(attention: str, device: str, completions: Sequence[CompletionTokens]) -> Strategy:
    """The first strategy to try, for a recipe's `attention`: auto, split or flex."""
    if attention == "auto" and device == "cuda" and completions:
        lengths = sorted(len(item.prompt_ids) for item in completions)
        attention = "flex" if lengths[len(lengths) // 2] >= FLEX_FROM else "split"
    return Strategy.FLEX_LAST_LAYER if attention == "flex" else Strategy.LAST_LAYER


def _obstacle(policy: PackablePolicy, strategy: Strategy, gradients: bool) -> str:
    """The reason why a strategy need not be tried; empty where there is none."""
    model = causal_model(policy.model)
    if strategy in FLEX_STRATEGIES and gradients and policy.device.type == "cpu":
        return "FlexAttention has no backward pass on a CPU"
    if strategy in LAST_LAYER_STRATEGIES and not last_layer_supported(model):
        return "the last layer has parts of its own"
    if strategy in PREFIX_ATTENTION_STRATEGIES and model.config._attn_implementation not in (
        "sdpa",
        ATTENTION,
    ):
        return f"its attention is {model.config._attn_implementation}, not sdpa"
    return ""


# --- Decision whether to compile a run's decoder layers ---


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
    if not layer_compilation.compilable(causal_model(policy.model)):
        return "its layers were not found in the model"
    if wish == "auto" and policy.device.type != "cuda":
        return "only on CUDA, unless asked for with compile=on"
    return ""
