"""SVG coordinates: effects on one scale, a gate report's rules, calibration, an agent's versions and lineage."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rl.charts.lines import round_values
from rl.gates.evidence_kinds import Figures
from rl.gates.report import RULE_TITLES, RuleResult

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


def report_lines(verdicts: Sequence[RuleResult]) -> list[RuleLine]:
    """The stored verdicts, in their order."""
    return [
        RuleLine(
            rule=verdict.rule,
            title=RULE_TITLES.get(verdict.rule, verdict.rule),
            outcome=verdict.outcome,
            words=verdict.words,
            drawing=_interval_drawing(verdict.figures),
            details=_details(verdict.rule, verdict.figures),
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


VERSIONS_WIDTH, HEIGHT = 360, 160
LEFT, RIGHT, TOP, BOTTOM = 66, 8, 10, 24


@dataclass(frozen=True)
class VersionTick:
    """A grid line with its label."""

    y: float
    label: str


@dataclass(frozen=True)
class Version:
    """One version: its value, interval and position."""

    name: str
    stage: str
    x: float
    y: float
    top: float
    bottom: float
    words: str


@dataclass(frozen=True)
class Versions:
    """A figure over an agent's versions, oldest first, in the coordinates of a WIDTH x HEIGHT drawing."""

    title: str
    versions: list[Version]
    lines: list[tuple[float, float, float, float]]
    """From each version to the next."""
    ticks: list[VersionTick]
    summary: str
    first: str
    last: str
    newest: str
    """Value of the newest version."""
    newest_name: str
    width: int = VERSIONS_WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = VERSIONS_WIDTH - RIGHT
    floor: int = HEIGHT - BOTTOM


VersionPoint = tuple[str, str, float, float | None, float | None]
"""Name, stage, value, low and high, the last three in [0, 1]."""


def versions_of(title: str, points: Sequence[VersionPoint], *, percent: bool = True) -> Versions | None:
    """A figure in [0, 1] over versions with its intervals; None without any.

    The axis covers the tenths around the data. percent: show percentages; else plain numbers.
    """
    if not points:
        return None
    width, up = VERSIONS_WIDTH - LEFT - RIGHT - 16, HEIGHT - TOP - BOTTOM
    lows = [value if low is None else low for _, _, value, low, _ in points]
    highs = [value if high is None else high for _, _, value, _, high in points]
    floor = max(0.0, math.floor(10 * min(lows)) / 10)
    ceiling = min(1.0, max(math.ceil(10 * max(highs)) / 10, floor + 0.2))
    floor = min(floor, ceiling - 0.2)

    def height(value: float) -> float:
        return round(TOP + up * (1 - (min(max(value, floor), ceiling) - floor) / (ceiling - floor)), 1)

    def value_text(value: float, digits: int = 1) -> str:
        return f"{100 * value:.{digits}f} %" if percent else f"{value:.{digits + 1}f}"

    marks = [
        Version(
            name=name,
            stage=stage,
            x=round(LEFT + 8 + width * (number / (len(points) - 1) if len(points) > 1 else 0.5), 1),
            y=height(value),
            top=height(value if high is None else high),
            bottom=height(value if low is None else low),
            words=f"{name}, {stage}: {value_text(value)}",
        )
        for number, (name, stage, value, low, high) in enumerate(points)
    ]
    first, last = _short_names(points[0][0], points[-1][0])
    return Versions(
        title=title,
        versions=marks,
        lines=[(one.x, one.y, after.x, after.y) for one, after in pairwise(marks)],
        ticks=[
            VersionTick(height(part), value_text(part, 0) if percent else f"{round(part, 2):g}")
            for part in (floor, (floor + ceiling) / 2, ceiling)
        ],
        first=first,
        last=last,
        newest=value_text(points[-1][2]),
        newest_name=points[-1][0],
        summary=f"{title} over {len(marks)} versions: " + "; ".join(version.words for version in marks[-5:]),
    )


def _short_names(first: str, last: str) -> tuple[str, str]:
    """Two versions' names without their common prefix, so that they fit on a phone."""
    (head, _, short), (other, _, newest) = first.rpartition("-"), last.rpartition("-")
    return (short, newest) if head == other and short != newest else (first, last)


PITCH, EDGE = 68, 40
"""Distance between versions, and margin at both ends, in drawing units."""
TRUNK, BRANCH, LINEAGE_HEIGHT = 26, 68, 96


@dataclass(frozen=True)
class Descent:
    """One version: its name, stage and the name of its parent, empty for the base model."""

    name: str
    stage: str
    parent: str


@dataclass(frozen=True)
class Node:
    """A version's position."""

    name: str
    short: str
    stage: str
    x: float
    y: float


@dataclass(frozen=True)
class Lineage:
    """A drawing of width x height."""

    nodes: list[Node]
    edges: list[str]
    """SVG paths from parent to child."""
    width: int
    summary: str
    height: int = LINEAGE_HEIGHT


def lineage_of(agent: str, versions: Sequence[Descent], champions: Collection[str]) -> Lineage | None:
    """A drawing of an agent's versions, oldest first; None for fewer than two. champions: all that ever were one.

    A parent that is not listed is drawn at the left edge, as the base model is.
    """
    if len(versions) < 2:
        return None
    nodes = [
        Node(
            name=version.name,
            short=version.name.removeprefix(f"{agent}-"),
            stage=version.stage,
            x=EDGE + PITCH * (number + 1),
            y=TRUNK if version.name in champions else BRANCH,
        )
        for number, version in enumerate(versions)
    ]
    places = {node.name: node for node in nodes}
    edges = []
    for version, node in zip(versions, nodes, strict=True):
        parent = places.get(version.parent)
        x, y = (parent.x, parent.y) if parent is not None else (EDGE, TRUNK)
        bend = node.x - PITCH / 2
        edges.append(
            f"M{x:g} {y:g} L{bend - 14:g} {y:g} C{bend:g} {y:g} {bend:g} {node.y:g} {node.x:g} {node.y:g}"
        )
    descent = "; ".join(f"{v.name} from {v.parent or 'base'}" for v in versions[-5:])
    return Lineage(
        nodes, edges, 2 * EDGE + PITCH * len(nodes), f"Lineage of {len(nodes)} versions: {descent}"
    )
