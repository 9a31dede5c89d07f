"""Verdict of an experiment at any time: better, worse, harmful, or wait. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rl.recipes.experiment_metrics import LOWER, Guardrail, Metric
from rl.statistics import Interval
from rl.statistics.contrasts import (
    Contrast,
    Moments,
    always_valid,
    always_valid_low,
    always_valid_p,
    chance_above_zero,
    difference,
    half_width,
    units_needed,
)
from rl.statistics.sequential import proportion_sequence

COLLECTING, UNDECIDED, BETTER, NOT_INFERIOR, WORSE, HARM, MISMATCH = (
    "collecting",
    "undecided",
    "better",
    "not_inferior",
    "worse",
    "harm",
    "mismatch",
)

WON = (BETTER, NOT_INFERIOR)
"""Verdicts that answer an experiment's question for the challenger."""

GUARD_SHARE = 0.2
"""Share of alpha for the guardrails, if there are any."""
MISMATCH_P = 0.001
"""Below this p the split is off and no winner is named (Fabijan et al., KDD 2019)."""


@dataclass(frozen=True)
class Rule:
    """The rule of an experiment."""

    metric: Metric
    goal: str
    alpha: float
    tuning: float
    """Number of units at which intervals are tightest."""
    min_units: int
    """Fewest units per arm for any action."""
    guardrails: tuple[Guardrail, ...]
    challengers: int
    not_inferior: float = 0.0
    """Loss of the main metric that must be excluded, in its unit; of latency a share. 0: a gain is asked for."""

    @property
    def allowed(self) -> float:
        """The loss on the scale on which arms are compared."""
        return math.log1p(self.not_inferior) if self.metric.log else self.not_inferior

    @property
    def metric_alpha(self) -> float:
        """Error probability of one challenger's main metric, so that all arms together err with at most alpha."""
        return self.alpha * (1 - GUARD_SHARE if self.guardrails else 1) / self.challengers

    @property
    def guard_alpha(self) -> float:
        return self.alpha * GUARD_SHARE / (self.challengers * max(len(self.guardrails), 1))


@dataclass(frozen=True)
class UnadjustedEffect:
    """The effect without adjustment, and what the adjustment changed."""

    value: float
    low: float
    high: float
    variance_removed: float
    """Share of the difference's variance that the adjustment removed; negative if it added some."""
    covariates: tuple[str, ...]
    """Names of the covariates used."""


@dataclass(frozen=True)
class ArmEffect:
    """Effect of an arm against the control, in the metric's unit; of latency as a share of the control's."""

    value: float | None
    low: float | None
    high: float | None
    p: float | None
    """Always-valid p of no difference."""
    chance: float
    """Chance to be better than the control, under a flat prior."""
    units: int
    """Units of both arms with a value."""
    needed: int | None
    """Further units until it is settled at the present difference; None if out of reach."""
    state: str
    error: float | None = None
    """Variance of the difference, on the scale of the comparison."""
    unadjusted: UnadjustedEffect | None = None
    """The effect before the adjustment; None without one."""


@dataclass(frozen=True)
class GuardrailResult:
    """Result of a guardrail: `loss` against the control, with its lower bound `low`."""

    metric: str
    margin: float
    loss: float | None
    low: float | None
    state: str


def _stabilize(moments: Moments, metric: Metric) -> Moments:
    return moments.with_pseudo_unit() if metric.bounded else moments


def _contrast(new: Moments, old: Moments, metric: Metric, min_units: int) -> Contrast | None:
    """The difference; None with too few units."""
    if min(new.n, old.n) < max(min_units, 2):
        return None
    found = difference(_stabilize(new, metric), _stabilize(old, metric))
    return found if math.isfinite(found.error) and found.error > 0 else None


def effect_of(new: Moments, old: Moments, rule: Rule, *, alpha: float | None = None) -> ArmEffect:
    """The main metric of an arm against the control's."""
    level = rule.metric_alpha if alpha is None else alpha
    units, sign = new.n + old.n, -1.0 if rule.goal == LOWER else 1.0
    early = _contrast(new, old, rule.metric, 2)
    if early is None:
        return ArmEffect(None, None, None, None, 0.5, units, None, COLLECTING)
    found = always_valid(early, level, rule.tuning)
    chance = chance_above_zero(early)
    state = UNDECIDED
    if min(new.n, old.n) < rule.min_units:
        state = COLLECTING
    else:
        low, high = sorted((sign * found.low, sign * found.high))
        if low > 0:
            state = BETTER
        elif rule.allowed and low > -rule.allowed:
            state = NOT_INFERIOR
        elif high < -rule.allowed:
            state = WORSE
    return ArmEffect(
        value=_display_value(found.value, rule.metric),
        low=_display_value(found.low, rule.metric),
        high=_display_value(found.high, rule.metric),
        p=always_valid_p(early, level, rule.tuning),
        chance=chance if sign > 0 else 1 - chance,
        units=units,
        needed=units_needed(early, level, rule.tuning),
        state=state,
        error=early.error,
    )


def effect_adjusted(
    plain: ArmEffect, new: Moments, old: Moments, covariates: Sequence[str], rule: Rule
) -> ArmEffect:
    """The adjusted effect, with the plain one beside it; the plain one if the adjusted one is undefined."""
    found = effect_of(new, old, rule)
    if plain.value is None or plain.low is None or plain.high is None or not plain.error or not found.error:
        return plain
    removed = 1 - found.error / plain.error
    return replace(
        found,
        unadjusted=UnadjustedEffect(plain.value, plain.low, plain.high, removed, tuple(covariates)),
    )


def guardrail_judge(new: Moments, old: Moments, guardrail: Guardrail, rule: Rule) -> GuardrailResult:
    """A guardrail is broken if the loss exceeds the margin, at any look, with error probability guard_alpha."""
    metric = guardrail.metric
    contrast = _contrast(new, old, metric, rule.min_units)
    if contrast is None:
        return GuardrailResult(metric.name, guardrail.margin, None, None, COLLECTING)
    sign = 1.0 if guardrail.goal == LOWER else -1.0
    loss = Contrast(sign * contrast.value, contrast.error, contrast.n)
    low = always_valid_low(loss, rule.guard_alpha, rule.tuning)
    state = HARM if low > guardrail.bound else UNDECIDED
    return GuardrailResult(
        metric.name, guardrail.margin, _display_value(loss.value, metric), _display_value(low, metric), state
    )


def _display_value(value: float, metric: Metric) -> float:
    return math.expm1(min(value, 700.0)) if metric.log else value


def verdict_of(effect: ArmEffect, guards: Sequence[GuardrailResult], mismatch_p: float) -> str:
    """One word for an arm. Harm always counts; a winner needs units split as intended."""
    if any(guard.state == HARM for guard in guards) or effect.state == WORSE:
        return HARM
    if mismatch_p < MISMATCH_P:
        return MISMATCH
    return effect.state


def figure_of(
    moments: Moments, metric: Metric, decisions: int, successes: int | None, rule: Rule
) -> Interval:
    """An arm's figure with its always-valid interval.

    successes: count of 1 among 0/1 values with one decision per unit, for an exact interval (beta-binomial); None
    otherwise.
    """
    if moments.n == 0 or not math.isfinite(moments.mean):
        return Interval(None, None, None, moments.n)
    if successes is not None and moments.n == decisions:
        low, high = proportion_sequence(successes, decisions, rule.alpha, int(rule.tuning))
        return Interval(moments.mean, low, high, moments.n)
    steady = _stabilize(moments, metric)
    if moments.n < 2 or not math.isfinite(steady.variance):
        return Interval(_level(moments.mean, metric), None, None, moments.n)
    half = half_width(steady.error, moments.n, rule.alpha, rule.tuning)
    low, high = moments.mean - half, moments.mean + half
    if metric.bounded:
        low, high = max(low, 0.0), min(high, 1.0)
    return Interval(_level(moments.mean, metric), _level(low, metric), _level(high, metric), moments.n)


def _level(value: float, metric: Metric) -> float:
    return math.exp(min(value, 700.0)) if metric.log else value


def words_of(
    verdict: str,
    guards: Sequence[GuardrailResult],
    names: Mapping[str, str],
    units: Mapping[str, int],
    min_units: int,
) -> str:
    """The verdict in a sentence; names: the titles of `arm` and `control`; units: those of each with a value."""
    arm, control = names["arm"], names["control"]
    broken = [guard for guard in guards if guard.state == HARM]
    if broken:
        guard = broken[0]
        return f"{arm} breaks the guardrail on {guard.metric}: worse than {control} by more than {guard.margin:g}"
    if verdict == HARM:
        return f"{arm} is worse than {control}, by an anytime-valid test"
    if verdict == MISMATCH:
        return (
            "sample ratio mismatch: the arms' numbers of units do not fit their weights, so no winner is "
            "named; look for lost decisions"
        )
    if verdict == BETTER:
        return f"{arm} is better than {control}, by an anytime-valid test"
    if verdict == NOT_INFERIOR:
        return (
            f"{arm} is not worse than {control} by more than the experiment allows, by an anytime-valid test"
        )
    if verdict == COLLECTING:
        short = [f"{names[one]} has {count:,}" for one, count in units.items() if count < min_units]
        if not short:
            return f"the values of {arm} and {control} are too much alike for a test yet"
        return f"{' and '.join(short)} of the {min_units:,} units with a value that each arm needs"
    return f"no difference between {arm} and {control} is shown yet"
