"""Lineage of policies as SVG coordinates: champions on a line, the others as branches off it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

PITCH, EDGE = 68, 40
"""Distance between versions, and margin at both ends, in drawing units."""
TRUNK, BRANCH, HEIGHT = 26, 68, 96


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
    height: int = HEIGHT


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
