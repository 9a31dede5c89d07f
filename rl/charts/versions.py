"""An agent's versions as SVG coordinates: a figure over them with its intervals, and their lineage."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

WIDTH, HEIGHT = 360, 160
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
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    floor: int = HEIGHT - BOTTOM


VersionPoint = tuple[str, str, float, float | None, float | None]
"""Name, stage, value, low and high, the last three in [0, 1]."""


def versions_of(title: str, points: Sequence[VersionPoint], *, percent: bool = True) -> Versions | None:
    """A figure in [0, 1] over versions with its intervals; None without any.

    The axis covers the tenths around the data. percent: show percentages; else plain numbers.
    """
    if not points:
        return None
    width, up = WIDTH - LEFT - RIGHT - 16, HEIGHT - TOP - BOTTOM
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
