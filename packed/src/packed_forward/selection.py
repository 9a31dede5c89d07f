"""Choose the fastest forward strategy that matches the reference forward on this model.

Each candidate, fastest first, is run on the run's first rows and compared in log-probabilities and gradients
(`packed.selftest`). No agreement means STOCK: rows are then not packed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from packed_forward import selftest
from packed_forward.forward import last_layer_supported
from packed_forward.logps import causal_model
from packed_forward.packing import (
    PREFIX_ATTENTION_STRATEGIES,
    CompletionTokens,
    Strategy,
    StrategyChoice,
)
from packed_forward.prefix_attention import ATTENTION
from packed_forward.row_cache import selftest_key, selftest_read, selftest_store
from packed_forward.selftest import FORWARD_ERRORS, Head, PackablePolicy, install

logger = logging.getLogger("packed_forward.selection")


def strategy_select(
    policy: PackablePolicy,
    completions: Sequence[CompletionTokens],
    *,
    gradients: bool,
    head: Head | None = None,
) -> StrategyChoice:
    """Find the first strategy whose log-probabilities (and gradients) agree with the reference, and install it.

    `completions` are those of the run to come. The longest row is among those compared where the model has a sliding
    window, which shows only there. LoRA's B is zero at the start, so it is perturbed while the gradients of A are
    compared. With a `head` its scores are compared, not log-probabilities. The
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
    key = selftest_key(policy, str(gradients)) if head is None else None
    known = selftest_read(policy, key, longest) if key is not None else None
    if known is not None:
        strategy = Strategy(known["rung"])
        install(policy, strategy)
        return StrategyChoice(
            strategy, f"{known['reason']}; tested by an earlier run", dict(known["agreement"])
        )
    choice = _select_by_test(policy, completions, gradients, head)
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
    head: Head | None,
) -> StrategyChoice:
    probes = selftest.probe_completions(completions)
    dtype = selftest.compute_dtype(policy)
    agreement: dict[str, str] = {}
    has_error = False
    spread: selftest.Spread | None = None
    with selftest.measurement_mode(policy, gradients):
        expected = selftest.measure_reference(policy, probes, gradients, head)
        for strategy in PREFIX_ATTENTION_STRATEGIES:
            obstacle = _obstacle(policy, strategy)
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
                return StrategyChoice(strategy, reason, agreement, has_error)
        install(policy, Strategy.STOCK)
    tried = "; ".join(f"{strategy}: {text}" for strategy, text in agreement.items())
    logger.info("no packed forward pass matches that of %s: %s", _name(policy), tried)
    return StrategyChoice(
        Strategy.STOCK, f"no packed forward pass matches the model's own ({tried})", agreement
    )


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _name(policy: PackablePolicy) -> str:
    return str(getattr(policy.model.config, "_name_or_path", "") or type(causal_model(policy.model)).__name__)


def _not_packable(model: torch.nn.Module, completions: Sequence[CompletionTokens]) -> str:
    text = model.config.get_text_config()
    if getattr(text, "output_router_logits", False):
        return "a mixture of experts with a router loss, which depends on every token fed"
    if not all(item.prompt_ids and item.response_ids for item in completions):
        return "an empty prompt or response among the rows"
    return ""


def _telling(model: torch.nn.Module, completions: Sequence[CompletionTokens]) -> Sequence[CompletionTokens]:
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


def _obstacle(policy: PackablePolicy, strategy: Strategy) -> str:
    """The reason why a strategy need not be tried; empty where there is none."""
    model = causal_model(policy.model)
    if strategy is Strategy.LAST_LAYER and not last_layer_supported(model):
        return "the last layer has parts of its own"
    if strategy in PREFIX_ATTENTION_STRATEGIES and model.config._attn_implementation not in (
        "sdpa",
        ATTENTION,
    ):
        return f"its attention is {model.config._attn_implementation}, not sdpa"
    return ""
