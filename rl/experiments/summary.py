"""An experiment's results in words and drawings, for its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.charts.intervals import Forest, ForestLine, forest_of
from rl.experiments.results import ArmResult, Results, SliceResult
from rl.experiments.verdicts import COLLECTING, MISMATCH_P, ArmEffect, GuardrailResult
from rl.recipes.experiment_metrics import Metric, metric_of
from rl.statistics import Interval

VERDICTS = {
    "collecting": "collecting",
    "undecided": "not settled",
    "better": "better",
    "not_inferior": "not worse",
    "worse": "worse",
    "harm": "harm",
    "mismatch": "split is off",
}
"""Verdict -> its label."""


def level_text(value: float | None, metric: Metric) -> str:
    """A figure of an arm: percent, milliseconds, or a plain number."""
    if value is None:
        return "–"
    if metric.log:
        return f"{value:,.0f}\u202fms" if value >= 10 else f"{value:.1f}\u202fms"
    if metric.name in ("thumbs_up", "error_rate"):
        return f"{100 * value:.1f}\u202f%"
    return f"{value:.3g}"


def effect_text(value: float | None, metric: Metric, *, unit: bool = True) -> str:
    """A difference between arms with its sign: points, percent of the control's, or a plain number."""
    if value is None:
        return "–"
    if metric.log:
        return f"{100 * value:+.1f}" + ("\u202f%" if unit else "")
    if metric.name in ("thumbs_up", "error_rate"):
        return f"{100 * value:+.1f}" + (" points" if unit else "")
    return f"{value:+.3g}"


def effect_tick(value: float, metric: Metric) -> str:
    scaled = 100 * value if metric.log or metric.name in ("thumbs_up", "error_rate") else value
    return "0" if abs(scaled) < 1e-9 else f"{scaled:+.4g}"


def level_tick(value: float, metric: Metric) -> str:
    return f"{100 * value:.4g}\u202f%" if metric.name in ("thumbs_up", "error_rate") else f"{value:,.4g}"


def interval_text(figure: Interval, metric: Metric) -> str:
    if figure.low is None or figure.high is None:
        return level_text(figure.value, metric)
    ends = " to ".join(level_text(end, metric).partition("\u202f")[0] for end in (figure.low, figure.high))
    return f"{level_text(figure.value, metric)} [{ends}]"


def effect_interval_text(effect: ArmEffect, metric: Metric) -> str:
    if effect.value is None:
        return "nothing yet"
    ends = " to ".join(effect_text(end, metric, unit=False) for end in (effect.low, effect.high))
    return f"{effect_text(effect.value, metric)} [{ends}]"


def adjustment_text(effect: ArmEffect, metric: Metric) -> str:
    """How much variance the adjustment removed, in words; empty without an adjustment."""
    plain = effect.unadjusted
    if plain is None:
        return ""
    *others, last = plain.covariates
    known = f"{', '.join(others)} and {last}" if others else last
    ends = " to ".join(effect_text(end, metric, unit=False) for end in (plain.low, plain.high))
    removed = f"removes {100 * plain.variance_removed:.0f}\u202f% of the variance"
    if plain.variance_removed < 0.005:
        removed = "removes no variance"
    return (
        f"adjusted for covariates from before assignment ({known}), which {removed}; unadjusted "
        f"{effect_text(plain.value, metric)} [{ends}]"
    )


@dataclass(frozen=True)
class GuardRow:
    """A guardrail of an arm on the page."""

    words: str
    metric: str
    loss: str
    margin: str
    state: str


@dataclass(frozen=True)
class ArmRow:
    """An arm on the page."""

    result: ArmResult
    figure: str
    secondary_metrics: list[tuple[str, str]]
    effect: str
    chance: str
    best: str
    p: str
    units_remaining: str
    adjustment: str
    verdict: str
    guards: list[GuardRow]


@dataclass(frozen=True)
class ExperimentSummary:
    """An experiment's results on its page."""

    results: Results
    verdict: str
    verdict_words: str
    words: str
    metric_words: str
    confidence: str
    arms: list[ArmRow]
    levels: Forest | None
    effects: Forest | None
    slices: Forest | None
    mismatch: str
    mismatch_below: float
    """The split is off below this p."""
    wait: str


def summarize(results: Results) -> ExperimentSummary:
    """All words and drawings of the page."""
    metric = results.rule.metric
    verdict = results.verdict
    speaker = next((one for one in results.challengers if one.verdict == verdict), results.leader)
    return ExperimentSummary(
        results=results,
        verdict=verdict,
        verdict_words=VERDICTS[verdict],
        words=speaker.words,
        metric_words=metric.words,
        confidence=f"{100 * (1 - results.rule.metric_alpha):.3g}\u202f%",
        arms=[_arm(result, metric) for result in results.arms],
        levels=_levels(results.arms, metric),
        effects=_effects(results.challengers, metric, results.control.name),
        slices=_slices(results.slices, metric),
        mismatch="" if results.mismatch.p is None else _p(results.mismatch.p),
        mismatch_below=MISMATCH_P,
        wait=_wait(results),
    )


def _arm(result: ArmResult, metric: Metric) -> ArmRow:
    others = [
        (metric_of(name).words, interval_text(figure, metric_of(name)))
        for name, figure in result.figures.items()
        if name != metric.name and figure.value is not None
    ]
    effect = result.effect
    return ArmRow(
        result=result,
        figure=interval_text(result.figures[metric.name], metric),
        secondary_metrics=others,
        effect=effect_interval_text(effect, metric) if effect else "",
        chance=_chance(effect.chance) if effect and effect.value is not None else "",
        best=_chance(result.best),
        p=_p(effect.p) if effect and effect.p is not None else "",
        units_remaining=_units_needed_text(result),
        adjustment=adjustment_text(effect, metric) if effect else "",
        verdict=VERDICTS.get(result.verdict, ""),
        guards=[_guard(guard) for guard in result.guardrails],
    )


def _guard(guard: GuardrailResult) -> GuardRow:
    metric = metric_of(guard.metric)
    margin = f"{100 * guard.margin:g}\u202f%" if metric.log else effect_text(guard.margin, metric).lstrip("+")
    states = {"harm": "broken", "undecided": "holds", "collecting": "not enough data yet"}
    return GuardRow(metric.words, guard.metric, effect_text(guard.loss, metric), margin, states[guard.state])


def _units_needed_text(result: ArmResult) -> str:
    effect = result.effect
    if effect is None or effect.value is None or effect.state == COLLECTING or effect.needed == 0:
        return ""
    if effect.needed is None:
        return f"To settle {result.name} takes very many units, as the difference is close to zero"
    return f"To settle {result.name} takes about {effect.needed:,} more units, if the difference stays as measured"


def _wait(results: Results) -> str:
    days = results.days_needed
    if days is None or days == 0:
        return ""
    return f"about {days:.0f} days" if days >= 2 else f"about {max(days * 24, 1):.0f} hours"


def _chance(value: float) -> str:
    """An estimated probability; never shown as 0 or 100 %."""
    if value > 0.999:
        return "> 99.9\u202f%"
    return "< 0.1\u202f%" if value < 0.001 else f"{100 * value:.1f}\u202f%"


def _p(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def _levels(arms: Sequence[ArmResult], metric: Metric) -> Forest | None:
    lines = []
    for result in arms:
        figure = result.figures[metric.name]
        if figure.value is not None and figure.low is not None and figure.high is not None:
            label = f"{result.name} ({result.arm.policy_name})"
            lines.append(
                ForestLine(
                    label, interval_text(figure, metric), figure.value, figure.low, figure.high, "level"
                )
            )
    return forest_of(metric.words, lines, lambda v: level_tick(v, metric), zero=False, share=metric.bounded)


def _effects(arms: Sequence[ArmResult], metric: Metric, control: str) -> Forest | None:
    lines = [
        _line(f"{result.name} against {control}", result.effect, metric)
        for result in arms
        if result.effect is not None and result.effect.value is not None
    ]
    return forest_of("Difference", lines, lambda v: effect_tick(v, metric), zero=True)


def _slices(slices: Sequence[SliceResult], metric: Metric) -> Forest | None:
    lines = [
        _line(f"{one.slice.removeprefix('metadata.')} {one.value}: {one.arm}", one.effect, metric)
        for one in slices
        if one.effect.value is not None
    ]
    return forest_of("Difference by slice", lines, lambda v: effect_tick(v, metric), zero=True)


def _line(label: str, effect: ArmEffect, metric: Metric) -> ForestLine:
    assert effect.value is not None
    assert effect.low is not None
    assert effect.high is not None
    words = effect_interval_text(effect, metric)
    return ForestLine(label, words, effect.value, effect.low, effect.high, effect.state)
