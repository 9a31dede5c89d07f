"""Effects with their intervals on one scale, as SVG coordinates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl.charts.lines import round_values

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
