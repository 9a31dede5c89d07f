"""Learning curves as SVG, drawn on the server: no script, no chart library in the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 320, 160
BROAD = 360
"""Width of a drawing of versions."""
LEFT, RIGHT, TOP, BOTTOM = 66, 8, 10, 24
MAX_POINTS = 400
"""Points drawn at most; longer histories are thinned by means of equal stretches."""

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Tick:
    """A grid line: where it is, and what stands beside it."""

    y: float
    label: str


@dataclass(frozen=True)
class Curve:
    """One figure over the steps of a run, in the coordinates of a WIDTH x HEIGHT drawing."""

    title: str
    path: str
    dot: tuple[float, float]
    ticks: list[Tick]
    first_step: int
    last_step: int
    last: str
    summary: str
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    floor: int = HEIGHT - BOTTOM


def curve_of(title: str, points: Points, *, share: bool = False) -> Curve | None:
    """A curve of (step, value) points; None where nothing finite was logged. `share`: the axis is 0 to 1."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite:
        return None
    thin = _thinned(finite)
    low, high = (0.0, 1.0) if share else _range([value for _, value in thin])
    first, last = finite[0][0], finite[-1][0]
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + across * ((step - first) / (last - first) if last > first else 0.5)
        return round(x, 1), round(TOP + up * (1 - (value - low) / (high - low)), 1)

    shown = [at(step, value) for step, value in thin]
    values = [value for _, value in finite]
    return Curve(
        title=title,
        path="M" + " L".join(f"{x} {y}" for x, y in shown),
        dot=shown[-1],
        ticks=[
            Tick(at(first, value)[1], _beside(0.0 if abs(value) < (high - low) / 1000 else value))
            for value in (low, (low + high) / 2, high)
        ],
        first_step=first,
        last_step=last,
        last=_words(values[-1]),
        summary=f"{title}: from {values[0]:.4g} at step {first} to {values[-1]:.4g} at step {last}, "
        f"lowest {min(values):.4g}, highest {max(values):.4g}",
    )


def _words(value: float) -> str:
    """Three figures, without an exponent where a plain number is short enough."""
    if 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.1e}".partition("e")
        return f"{digits}e{int(power)}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def _beside(value: float) -> str:
    """Words for a value (`_words`) in the width that is left of the curve: "-0.0094" is the longest that
    fits."""
    words = _words(value)
    return words if len(words) <= len("-0.0094") else _words(float(f"{value:.2g}"))


def _thinned(points: Points) -> list[tuple[float, float]]:
    if len(points) <= MAX_POINTS:
        return [(float(step), value) for step, value in points]
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(step for step, _ in group) / len(group), sum(value for _, value in group) / len(group))
        for group in groups
    ]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        # a flat curve runs through the middle
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


@dataclass(frozen=True)
class Version:
    """One version in a drawing of versions: a value with its interval, where it lies."""

    name: str
    stage: str
    x: float
    y: float
    top: float
    bottom: float
    words: str


@dataclass(frozen=True)
class Versions:
    """A figure over an agent's versions, oldest first, in the coordinates of a BROAD x HEIGHT drawing."""

    title: str
    versions: list[Version]
    lines: list[tuple[float, float, float, float]]
    """From each version to the next."""
    ticks: list[Tick]
    summary: str
    first: str
    last: str
    newest: str
    """The value of the newest version."""
    width: int = BROAD
    height: int = HEIGHT
    left: int = LEFT
    right: int = BROAD - RIGHT
    floor: int = HEIGHT - BOTTOM


VersionPoint = tuple[str, str, float, float | None, float | None]
"""Name, stage, value, low and high, all in [0, 1]."""


def versions_of(title: str, points: Sequence[VersionPoint], *, percent: bool = True) -> Versions | None:
    """A figure of [0, 1] over versions with its intervals; None where there is none.

    The axis runs over the tenths that hold all of it, so that versions can be told apart. percent: a share; else the
    figure as it is.
    """
    if not points:
        return None
    across, up = BROAD - LEFT - RIGHT - 16, HEIGHT - TOP - BOTTOM
    lows = [value if low is None else low for _, _, value, low, _ in points]
    highs = [value if high is None else high for _, _, value, _, high in points]
    floor = max(0.0, math.floor(10 * min(lows)) / 10)
    ceiling = min(1.0, max(math.ceil(10 * max(highs)) / 10, floor + 0.2))
    floor = min(floor, ceiling - 0.2)

    def height(value: float) -> float:
        return round(TOP + up * (1 - (min(max(value, floor), ceiling) - floor) / (ceiling - floor)), 1)

    def said(value: float, digits: int = 1) -> str:
        return f"{100 * value:.{digits}f} %" if percent else f"{value:.{digits + 1}f}"

    shown = [
        Version(
            name=name,
            stage=stage,
            x=round(LEFT + 8 + across * (number / (len(points) - 1) if len(points) > 1 else 0.5), 1),
            y=height(value),
            top=height(value if high is None else high),
            bottom=height(value if low is None else low),
            words=f"{name}, {stage}: {said(value)}",
        )
        for number, (name, stage, value, low, high) in enumerate(points)
    ]
    return Versions(
        title=title,
        versions=shown,
        lines=[(one.x, one.y, after.x, after.y) for one, after in pairwise(shown)],
        ticks=[
            Tick(height(part), said(part, 0) if percent else f"{round(part, 2):g}")
            for part in (floor, (floor + ceiling) / 2, ceiling)
        ],
        first=points[0][0],
        last=points[-1][0],
        newest=said(points[-1][2]),
        summary=f"{title} over {len(shown)} versions: " + "; ".join(version.words for version in shown[-5:]),
    )
