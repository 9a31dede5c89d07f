"""Line charts over training steps: coordinates for an SVG drawn on the server, numbers for the script that enhances it.

Coordinates are percentages of the plot from its left and top, so that text and strokes keep their size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

HEIGHT, LEADING_HEIGHT = 150, 220
"""Heights of a plot in pixels."""
SLOTS = 5
"""Number of line colours."""
MAX_POINTS = 400
"""Most points of a line; longer histories are averaged over equal stretches."""
LOG_SPAN = 30.0
LARGEST = 1e300
"""Larger values are not drawn: their differences overflow."""
FEW_POINTS = 12
"""Most points of a line that has a marker at each."""
SCALE = 1000
"""Side of the square in which paths are written; it is stretched over the plot."""

Points = Sequence[tuple[int, float]]
"""(step, value) in the order of steps."""


@dataclass(frozen=True)
class LineData:
    """Points of one line, with its colour (`slot`, 1 to SLOTS) and dashes if held out."""

    label: str
    points: Points
    slot: int = 1
    held_out: bool = False


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: its position in percent and its label."""

    position: str
    label: str


@dataclass(frozen=True)
class Line:
    """A drawn line; `markers` only with few points."""

    label: str
    slot: int
    held_out: bool
    path: str
    markers: list[tuple[str, str]]
    last: str


@dataclass(frozen=True)
class LineChart:
    """One figure over the steps: a server-drawn plot of `height` pixels, and `data` for the script."""

    slug: str
    title: str
    hint: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str
    data: Mapping[str, object]
    height: int = HEIGHT

    @property
    def data_id(self) -> str:
        return f"data-{self.slug}"


def finite_points(points: Points) -> list[tuple[int, float]]:
    """The points whose values an axis can hold."""
    return [(step, value) for step, value in points if abs(value) < LARGEST]


def line_chart(
    slug: str,
    title: str,
    lines: Sequence[LineData],
    *,
    hint: str = "",
    share: bool = False,
    logarithmic: bool = False,
    height: int = HEIGHT,
) -> LineChart | None:
    """The chart of some lines; None unless one has two points. share: the vertical axis is 0 to 1. logarithmic: it has
    powers of ten where the largest value is LOG_SPAN times the smallest."""
    finite_lines = [(line, points) for line in lines if (points := finite_points(line.points))]
    if max((len(points) for _, points in finite_lines), default=0) < 2:
        return None
    thin = [(line, _thin(points)) for line, points in finite_lines]
    first, last = (
        min(points[0][0] for _, points in finite_lines),
        max(points[-1][0] for _, points in finite_lines),
    )
    values = [value for _, points in thin for _, value in points]
    by_tens = logarithmic and 0 < LOG_SPAN * min(values) <= max(values)
    place: Callable[[float], float] = math.log10 if by_tens else float
    rounded = log_range if by_tens else round_range
    levels = [0.0, 0.25, 0.5, 0.75, 1.0] if share else rounded(min(values), max(values))
    low, high = levels[0], levels[-1]

    def x_share(step: float) -> float:
        return (step - first) / (last - first) if last > first else 0.5

    def y_share(value: float) -> float:
        return 1 - (place(min(max(value, low), high)) - place(low)) / (place(high) - place(low))

    steps = (
        [step for step in round_values(first, last, 6) if step == round(step)] if last > first else [first]
    )
    return LineChart(
        slug=slug,
        title=title,
        hint=f"{hint}; logarithmic scale" if by_tens else hint,
        lines=[
            Line(
                label=line.label,
                slot=line.slot,
                held_out=line.held_out,
                path="M" + " L".join(f"{SCALE * x_share(s):.0f} {SCALE * y_share(v):.0f}" for s, v in points)
                if len(points) > 1
                else "",
                markers=[(_percent(x_share(s)), _percent(y_share(v))) for s, v in points]
                if len(points) <= FEW_POINTS
                else [],
                last=number_text(points[-1][1]),
            )
            for line, points in thin
        ],
        x_ticks=[
            Tick(_percent(x_share(step)), text) for step, text in zip(steps, tick_texts(steps), strict=True)
        ],
        y_ticks=[
            Tick(_percent(y_share(level)), text)
            for level, text in zip(
                levels, map(number_text, levels) if by_tens else tick_texts(levels), strict=True
            )
        ],
        summary=f"{title}: " + "; ".join(_line_text(line.label, points) for line, points in finite_lines),
        data={"low": low, "high": high, "levels": levels if by_tens else None, **_data(thin)},
        height=height,
    )


def _percent(part: float) -> str:
    return f"{100 * part:.2f}%"


def _line_text(label: str, points: Points) -> str:
    values = [value for _, value in points]
    if len(points) == 1:
        return f"{label} {number_text(values[0])} at step {points[0][0]}"
    return (
        f"{label} from {number_text(values[0])} at step {points[0][0]} to {number_text(values[-1])} at step "
        f"{points[-1][0]}, lowest {number_text(min(values))}, highest {number_text(max(values))}"
    )


def _data(lines: Sequence[tuple[LineData, Points]]) -> dict[str, object]:
    """Numbers for the script: lines over the union of their steps, null where a line has no value."""
    steps = sorted({step for _, points in lines for step, _ in points})
    return {
        "steps": steps,
        "lines": [
            {
                "label": line.label,
                "slot": line.slot,
                "held_out": line.held_out,
                "marked": len(points) <= FEW_POINTS,
                "values": [
                    None if (value := at.get(step)) is None else float(f"{value:.6g}") for step in steps
                ],
            }
            for line, points in lines
            for at in [dict(points)]
        ],
    }


def _thin(points: Points) -> list[tuple[int, float]]:
    if len(points) <= MAX_POINTS:
        return list(points)
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (round(sum(step for step, _ in group) / len(group)), sum(value for _, value in group) / len(group))
        for group in groups
    ]


# --- Ticks and numbers ---


TICKS = 4
"""Approximate number of values on an axis."""
SMALLEST = 1e-300
"""Values closer than this are equal: a smaller distance has no logarithm."""


def round_step(low: float, high: float, ticks: int = TICKS) -> float:
    """Step for about `ticks` ticks between low and high: 1, 2 or 5 times a power of ten."""
    rough = (high - low) / ticks
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def round_values(low: float, high: float, ticks: int = TICKS) -> list[float]:
    """About `ticks` values between low and high, 1, 2 or 5 times a power of ten apart."""
    return _multiples(low, high, round_step(low, high, ticks))


def round_range(low: float, high: float, ticks: int = TICKS) -> list[float]:
    """Round values from at most low to at least high; a constant figure is in the middle."""
    if high - low <= max(1e-9 * max(abs(low), abs(high)), SMALLEST):
        # also if means of equal values differ in their last bits
        pad = max(abs(low) * 0.1, SMALLEST) if abs(low) > SMALLEST else 1.0
        low, high = low - pad, high + pad
    step = round_step(low, high, ticks)
    return _multiples(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)


def log_range(low: float, high: float) -> list[float]:
    """Powers of ten from at most low to at least high, at most eight."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    step = math.ceil((last - first) / 6)
    return [10.0**power for power in range(first, last + step, step)]


def _multiples(low: float, high: float, step: float) -> list[float]:
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first
    return [(first + number) * step for number in range(count + 1)]


def tick_texts(values: Sequence[float]) -> list[str]:
    """Labels of equidistant ticks, with as many decimals as their distance needs."""
    step = values[1] - values[0] if len(values) > 1 else 1.0
    largest = max(abs(value) for value in values)
    if largest < 1e-3 or largest >= 1e7:
        digits = (
            max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9)) if largest else 0
        )
        return ["0" if abs(value) < step / 1000 else _exponent(value, digits) for value in values]
    decimals = next(places for places in range(12) if abs(round(step, places) - step) < step / 1000)
    return ["0" if abs(value) < step / 1000 else f"{value:,.{decimals}f}" for value in values]


def number_text(value: float) -> str:
    """Three significant digits, without an exponent if a plain number is short."""
    if 0 < abs(value) < 1e-3:
        return _exponent(value, 1)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _exponent(value: float, decimals: int) -> str:
    digits, _, power = f"{value:.{decimals}e}".partition("e")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}e{int(power)}"
