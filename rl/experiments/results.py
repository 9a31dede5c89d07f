"""Results of an experiment from the decision log: figures per arm, effects, guardrails, slices, verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from django.utils import timezone
from pydantic import AliasPath, Field

from backend.bodies import Answer, Time
from feedback.cache import CostAwareCache
from feedback.explorer.bulk_readers import Exposure, arms_set, exposures
from rl.experiments.traffic import arms_of
from rl.experiments.values import Adjustment, Values, adjustment_of, metric_values
from rl.experiments.verdicts import (
    COLLECTING,
    HARM,
    WON,
    ArmEffect,
    GuardrailResult,
    Rule,
    effect_adjusted,
    effect_of,
    figure_of,
    guardrail_judge,
    verdict_of,
    words_of,
)
from rl.models import Arm, Experiment
from rl.recipes.experiment_metrics import HIGHER, METRICS, guardrails_of, metric_of
from rl.statistics import Interval
from rl.statistics.contrasts import Moments, best_chances, ratio_mismatch_anytime_p, ratio_mismatch_p

Verdict = Literal["collecting", "undecided", "better", "not_inferior", "worse", "harm", "mismatch", "control"]

SLICES_SHOWN = 12
"""Most values shown per slice, the most frequent."""


@dataclass(frozen=True)
class ArmResult:
    """One arm: units, figures, and its effect against the control."""

    arm: Arm
    units: int
    exposures: int
    """Decisions."""
    figures: dict[str, Interval]
    """Metric -> value with its always-valid interval; n counts units."""
    value_count: int
    """Decisions with a value of the main metric."""
    moments: Moments
    """Moments of the main metric."""
    best: float
    """Chance to be the best arm."""
    effect: ArmEffect | None = None
    guardrails: tuple[GuardrailResult, ...] = ()
    verdict: str = "control"
    words: str = ""

    @property
    def name(self) -> str:
        return self.arm.name


@dataclass(frozen=True)
class SliceResult:
    """The main metric of one arm against the control in one slice, without a correction for many slices."""

    slice: str
    value: str
    arm: str
    effect: ArmEffect


@dataclass(frozen=True)
class Mismatch:
    """Test of units per arm against their weights (sample ratio mismatch). Both are None for a bandit, whose weights
    change."""

    p: float | None = None
    """Chi-square test."""
    anytime_p: float | None = None


@dataclass(frozen=True)
class Results:
    """All results of an experiment at this moment."""

    experiment: Experiment
    rule: Rule
    arms: list[ArmResult]
    slices: list[SliceResult]
    mismatch: Mismatch
    simulated: int
    """Number of simulated ratings among the values."""
    days_needed: float | None
    """Days until it is settled, at the present rate and difference."""
    at: datetime

    @property
    def control(self) -> ArmResult:
        return next(result for result in self.arms if result.arm.is_control)

    @property
    def challengers(self) -> list[ArmResult]:
        return [result for result in self.arms if not result.arm.is_control]

    @property
    def winners(self) -> list[ArmResult]:
        """Challengers shown to be what the experiment asks, and that can become champion."""
        return [
            result for result in self.challengers if result.verdict in WON and result.arm.policy is not None
        ]

    @property
    def leader(self) -> ArmResult:
        """The challenger most likely to be the best."""
        return max(self.challengers, key=lambda result: result.best)

    @property
    def confidence(self) -> float:
        return 1 - self.rule.metric_alpha

    def loss_excluded(self, ramp: int) -> float | None:
        """Loss of the metric, spread over all units of the agent, that is ruled out at this ramp; None: none yet.

        A challenger with half of 5 % of the units that loses at most 0.2 costs all units together at most 0.005.
        """
        total = sum(one.arm.weight for one in self.arms)
        loss = 0.0
        for one in self.challengers:
            effect = one.effect
            if effect is None or effect.low is None or effect.high is None or effect.state == COLLECTING:
                return None
            bound = -effect.low if self.rule.goal == HIGHER else effect.high
            loss += ramp / 100 * one.arm.weight / total * max(bound, 0.0)
        return loss

    @property
    def verdict(self) -> str:
        """Harm of any challenger, else the leading challenger's verdict."""
        return HARM if any(one.verdict == HARM for one in self.challengers) else self.leader.verdict


class ArmResults(Answer):
    name: str
    policy: str = Field(validation_alias=AliasPath("arm", "policy_name"))
    control: bool = Field(validation_alias=AliasPath("arm", "is_control"))
    weight: float = Field(validation_alias=AliasPath("arm", "weight"))
    units: int
    exposures: int
    """Decisions."""
    figures: dict[str, Interval]
    best: float
    """Probability of being the best arm."""
    effect: ArmEffect | None
    guardrails: list[GuardrailResult]
    verdict: Verdict
    words: str


class ResultsShown(Answer):
    """Results as the API and the command answer them, and as events store them."""

    experiment: str = Field(validation_alias=AliasPath("experiment", "name"))
    status: str = Field(validation_alias=AliasPath("experiment", "status"))
    metric: str = Field(validation_alias=AliasPath("experiment", "metric"))
    goal: Literal["higher", "lower"] = Field(validation_alias=AliasPath("experiment", "goal"))
    confidence: float
    """Simultaneous confidence of the effects' intervals over all looks."""
    verdict: Verdict
    arms: list[ArmResults]
    mismatch: Mismatch
    slices: list[SliceResult]
    simulated: int
    """Ratings among them by simulated raters."""
    days_needed: float | None
    """Days at the present rate."""
    at: Time


_results: CostAwareCache[Results] = CostAwareCache()


def results_cached(experiment: Experiment) -> Results:
    """`results_of`, cached for pages; a little old if there is much to read."""
    return _results.get((experiment.pk, experiment.status, experiment.ramp), lambda: results_of(experiment))


def results_of(experiment: Experiment) -> Results:
    """Reads the experiment's decisions and judges them: one query for the exposures, one per metric.

    Raises ExperimentRefused for a draft without a control and a challenger.
    """
    arms = arms_of(experiment)
    rule = rule_of(experiment, len(arms) - 1)
    columns = [_column(name) for name in experiment.slices]
    log_rows = arms_set(experiment.agent, [arm.key for arm in arms])
    rows = list(exposures(log_rows, columns))
    is_weighted = experiment.allocation == Experiment.Allocation.THOMPSON
    beside = (METRICS["latency_ms"], METRICS["cost_usd_per_1000"])
    wanted = (rule.metric, *(guard.metric for guard in rule.guardrails), *beside)
    metrics = {metric.name: metric for metric in wanted}
    values, simulated = {}, 0
    for name, metric in metrics.items():
        values[name], count = metric_values(log_rows, metric, rows)
        simulated = max(simulated, count)
    log = {name: _by_arm(rows, values[name], is_weighted) for name in metrics}
    main_values = values[rule.metric.name]
    adjustment = adjustment_of(experiment, rule.metric, rows, main_values)
    units = Counter(arm for arm, _ in {(row.arm, row.unit) for row in rows})
    decisions = Counter(row.arm for row in rows)
    mismatch = Mismatch() if is_weighted else _mismatch(arms, units)
    chances = _chances(arms, log[rule.metric.name], adjustment, rule)
    control = next(arm for arm in arms if arm.is_control)
    results = []
    for number, arm in enumerate(arms):
        parts = {name: log[name].get(arm.key, EMPTY_PART) for name in metrics}
        figures = {
            name: figure_of(part.moments, metrics[name], part.decisions, part.successes, rule)
            for name, part in parts.items()
        }
        main = parts[rule.metric.name]
        found = ArmResult(
            arm, units[arm.key], decisions[arm.key], figures, main.decisions, main.moments, chances[number]
        )
        if arm.pk != control.pk:
            old = {name: log[name].get(control.key, EMPTY_PART).moments for name in metrics}
            found = _with_verdict(
                found,
                {name: part.moments for name, part in parts.items()},
                old,
                rule,
                mismatch.anytime_p,
                control,
                adjustment,
            )
        results.append(found)
    slices = _slices(experiment, arms, rows, main_values, rule, is_weighted)
    now = timezone.now()
    return Results(
        experiment, rule, results, slices, mismatch, simulated, _days(experiment, results, now), now
    )


def rule_of(experiment: Experiment, challengers: int) -> Rule:
    return Rule(
        metric_of(experiment.metric),
        experiment.goal,
        experiment.alpha,
        experiment.tuning,
        experiment.min_units,
        tuple(guardrails_of(experiment.guardrails)),
        max(challengers, 1),
        experiment.not_inferior,
    )


# --- From rows to moments -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One arm's values of one metric."""

    moments: Moments
    decisions: int
    successes: int | None
    """Count of 1 among 0/1 values; None for other values."""


EMPTY_PART = Part(Moments(0, math.nan, math.nan), 0, None)


def _by_arm(rows: Iterable[Exposure], values: Values, weighted: bool) -> dict[str, Part]:
    """Arm -> its values. Units are independent, decisions of one unit are not.

    weighted: each decision counts 1 / its arm's propensity, so that a bandit's figures are those of all its traffic
    (Horvitz & Thompson 1952).
    """
    sums: dict[str, dict[str, list[float]]] = defaultdict(dict)
    decisions: Counter[str] = Counter()
    successes: dict[str, int | None] = {}
    for row in rows:
        value = values.get(row.id)
        if value is None:
            continue
        weight = 1 / row.arm_propensity if weighted and row.arm_propensity else 1.0
        unit = sums[row.arm].setdefault(row.unit, [0.0, 0.0])
        unit[0] += weight * value
        unit[1] += weight
        decisions[row.arm] += 1
        before = successes.get(row.arm, 0)
        yes_or_no = value in (0.0, 1.0) and not weighted
        successes[row.arm] = before + int(value) if yes_or_no and before is not None else None
    return {
        arm: Part(
            Moments.of_ratio([s for s, _ in units.values()], [c for _, c in units.values()]),
            decisions[arm],
            successes[arm],
        )
        for arm, units in sums.items()
    }


def _with_verdict(
    found: ArmResult,
    new: Mapping[str, Moments],
    old: Mapping[str, Moments],
    rule: Rule,
    mismatch_p: float | None,
    control: Arm,
    adjustment: Adjustment | None,
) -> ArmResult:
    main = rule.metric.name
    effect = effect_of(new[main], old[main], rule)
    if adjustment is not None:
        moments = adjustment.moments[found.arm.key], adjustment.moments[control.key]
        effect = effect_adjusted(effect, *moments, adjustment.covariates, rule)
    guards = tuple(guardrail_judge(new[g.metric.name], old[g.metric.name], g, rule) for g in rule.guardrails)
    verdict = verdict_of(effect, guards, 1.0 if mismatch_p is None else mismatch_p)
    words = words_of(
        verdict,
        guards,
        {name: f"{arm.name} ({arm.policy_name})" for name, arm in (("arm", found.arm), ("control", control))},
        {"arm": new[main].n, "control": old[main].n},
        rule.min_units,
    )
    return replace(found, effect=effect, guardrails=guards, verdict=verdict, words=words)


def _mismatch(arms: Sequence[Arm], units: Mapping[str, int]) -> Mismatch:
    counts, weights = [units[arm.key] for arm in arms], [arm.weight for arm in arms]
    return Mismatch(ratio_mismatch_p(counts, weights), ratio_mismatch_anytime_p(counts, weights))


def _chances(
    arms: Sequence[Arm], parts: Mapping[str, Part], adjustment: Adjustment | None, rule: Rule
) -> list[float]:
    moments = [parts.get(arm.key, EMPTY_PART).moments for arm in arms]
    if adjustment is not None:
        moments = [adjustment.moments[arm.key] for arm in arms]
    moments = [one.with_pseudo_unit() if rule.metric.bounded else one for one in moments]
    if not all(one.informative for one in moments):
        return [1 / len(arms)] * len(arms)
    sign = 1.0 if rule.goal == HIGHER else -1.0
    return best_chances([sign * one.mean for one in moments], [one.error for one in moments])


# --- Slices and time ----------------------------------------------------------------------------------------


def _column(slice_name: str) -> str:
    return {"tag": "tags"}.get(slice_name, slice_name.replace("metadata.", "metadata__", 1))


def _slices(
    experiment: Experiment,
    arms: Sequence[Arm],
    rows: Sequence[Exposure],
    values: Values,
    rule: Rule,
    weighted: bool,
) -> list[SliceResult]:
    slices = []
    control = next(arm for arm in arms if arm.is_control)
    for number, name in enumerate(experiment.slices):
        parts: dict[str, list[Exposure]] = defaultdict(list)
        for row in rows:
            given = row.slices[number]
            for value in given if isinstance(given, list) else [given]:
                if value is not None and value != "":
                    parts[str(value)[:80]].append(row)
        for value in sorted(parts, key=lambda value: -len(parts[value]))[:SLICES_SHOWN]:
            log = _by_arm(parts[value], values, weighted)
            old = log.get(control.key, EMPTY_PART).moments
            for arm in arms:
                if not arm.is_control:
                    effect = effect_of(log.get(arm.key, EMPTY_PART).moments, old, rule, alpha=rule.alpha)
                    slices.append(SliceResult(name, value, arm.name, effect))
    return slices


def _days(experiment: Experiment, results: Sequence[ArmResult], now: datetime) -> float | None:
    """Days until the first challenger is settled."""
    if experiment.started_at is None:
        return None
    elapsed = ((experiment.ended_at or now) - experiment.started_at).total_seconds() / 86_400
    waits = [
        result.effect.needed / (result.effect.units / elapsed)
        for result in results
        if result.effect is not None
        and result.effect.needed is not None
        and result.effect.units > 0
        and elapsed > 0
    ]
    return min(waits, default=None)
