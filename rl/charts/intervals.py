"""Intervals as SVG coordinates: effects on one scale, a gate report's rules, and calibration dots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.charts.lines import round_values
from rl.gates.evidence_kinds import Figures
from rl.gates.report import RULE_TITLES, StoredVerdict

WIDTH, MARGIN = 640, 26


@dataclass(frozen=True)
class ForestRow:
    """One interval: its label, position and text for screen readers."""

    label: str
    words: str
    state: str
    x: float
    low: float
    width: float


@dataclass(frozen=True)
class ForestTick:
    """A mark of the scale."""

    x: float
    label: str


@dataclass(frozen=True)
class Forest:
    """Intervals one under the other in a drawing of WIDTH; `zero` is the position of no difference."""

    rows: list[ForestRow]
    ticks: list[ForestTick]
    zero: float | None
    summary: str
    width: int = WIDTH


@dataclass(frozen=True)
class ForestLine:
    """One effect: value, low and high."""

    label: str
    words: str
    value: float
    low: float
    high: float
    state: str = ""


def forest_of(
    title: str, lines: Sequence[ForestLine], label: Callable[[float], str], *, zero: bool, share: bool = False
) -> Forest | None:
    """The lines on one scale; None without any. zero: the scale includes and marks 0; share: it stays in [0, 1]."""
    if not lines:
        return None
    low, high = min(line.low for line in lines), max(line.high for line in lines)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    pad = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - pad, high + pad
    if share:
        low, high = max(low, 0.0), min(high, 1.0)
    across = WIDTH - 2 * MARGIN

    def position(value: float) -> float:
        return round(MARGIN + across * min(max((value - low) / (high - low), 0.0), 1.0), 1)

    rows = [
        ForestRow(
            line.label,
            line.words,
            line.state,
            position(line.value),
            position(line.low),
            round(max(position(line.high) - position(line.low), 1.0), 1),
        )
        for line in lines
    ]
    return Forest(
        rows,
        [ForestTick(position(value), label(value)) for value in round_values(low, high)],
        position(0.0) if zero else None,
        f"{title}: " + "; ".join(f"{line.label}, {line.words}" for line in lines),
    )


SIDE = 200
"""Side of the square in drawing units."""


def calibration_dots(curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A dot per point of a calibration curve (`stated`, `observed` in [0, 1], `n`); its area grows with `n`."""
    most = max(point["n"] for point in curve)
    return [
        {
            "x": round(SIDE * point["stated"], 1),
            "y": round(SIDE * (1 - point["observed"]), 1),
            "r": round(3 + 7 * (point["n"] / most) ** 0.5, 1),
            "words": f"stated {point['stated']:.2f}, observed {point['observed']:.2f}, {point['n']} ratings",
        }
        for point in curve
    ]


BAR_WIDTH, REACH = 120, 0.5
"""Width of a drawn difference, and the difference at its ends; larger ones are drawn at the end."""


@dataclass(frozen=True)
class IntervalDrawing:
    """A difference with its interval in units of BAR_WIDTH; zero is in the middle."""

    dot: float
    start: float
    width: float
    summary: str
    zero: float = BAR_WIDTH / 2


@dataclass(frozen=True)
class RuleLine:
    """One rule of the report."""

    rule: str
    title: str
    outcome: str
    words: str
    drawing: IntervalDrawing | None
    details: list[tuple[str, str]]
    """(name, value) below the summary."""


def report_lines(verdicts: Sequence[StoredVerdict]) -> list[RuleLine]:
    """The stored verdicts, in their order."""
    return [
        RuleLine(
            rule=verdict["rule"],
            title=RULE_TITLES.get(verdict["rule"], verdict["rule"]),
            outcome=verdict["outcome"],
            words=verdict["words"],
            drawing=_interval_drawing(verdict["figures"]),
            details=_details(verdict["rule"], verdict["figures"]),
        )
        for verdict in verdicts
    ]


def _interval_drawing(figures: Figures) -> IntervalDrawing | None:
    value, low, high = (figures.get(name) for name in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return None

    def position(difference: float) -> float:
        return round(BAR_WIDTH / 2 * (1 + min(max(difference, -REACH), REACH) / REACH), 1)

    return IntervalDrawing(
        position(value),
        position(low),
        round(position(high) - position(low), 1),
        f"{value:+.3f}, {low:+.3f} to {high:+.3f}",
    )


def _details(rule: str, figures: Figures) -> list[tuple[str, str]]:
    if rule == "slices":
        worst_first = sorted(figures.items(), key=lambda item: item[1]["value"])
        return [(name, f"{100 * f['value']:+.1f} points over {f['n']} prompts") for name, f in worst_first]
    if rule == "golden":
        return [(c["name"], f"{c['why'] or 'wrong'}: {c['answer'][:200]}") for c in figures.get("failed", [])]
    if rule == "raters":
        without = figures.get("without", {})
        return [(f"without {rater}", f"{100 * left:+.1f} points") for rater, left in without.items()]
    return []
