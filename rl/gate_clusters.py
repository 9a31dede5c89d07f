"""Near-identical held-out prompts as one piece of evidence: groups of three promoted 18 % of series for 5 %. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rl.gate_sheets import Case, Item, Rated


def one_per_cluster(items: Sequence[Item], clusters: Sequence[str]) -> list[Item]:
    """One item for each cluster of several prompts, the mean of its members; the others as they are, in their order.

    clusters: per item the name of its prompt's cluster, or "" for a prompt like no other. So every test sees
    independent items, whatever the members of a cluster have to do with each other, and a large cluster has one voice,
    as a small one has. Several answers to one prompt stay: tests take them together already.
    """
    members: dict[str, list[int]] = {}
    for place, name in enumerate(clusters):
        if name:
            members.setdefault(name, []).append(place)
    merged: dict[int, Item] = {}
    dropped: set[int] = set()
    for name, places in members.items():
        group = [items[place] for place in places]
        prompts = {item.prompt if isinstance(item, Rated) else str(i) for i, item in enumerate(group)}
        if len(prompts) > 1:
            merged[places[0]] = _mean(name, group)
            dropped |= set(places[1:])
    return [merged.get(place, item) for place, item in enumerate(items) if place not in dropped]


def _mean(name: str, group: Sequence[Item]) -> Item:
    """The mean figures of a group, in the slices and with the raters of any of them."""
    slices = tuple(dict.fromkeys(one for item in group for one in item.slices))
    raters = tuple(dict.fromkeys(one for item in group for one in item.raters))
    rated = [item for item in group if isinstance(item, Rated)]
    if rated:
        value, shift = (
            math.fsum(column) / len(rated)
            for column in zip(*((r.value, r.shift) for r in rated), strict=True)
        )
        return replace(rated[0], prompt=name, value=value, shift=shift, slices=slices, raters=raters)
    cases = [item for item in group if isinstance(item, Case)]
    own, other = (
        math.fsum(column) / len(cases) for column in zip(*((c.own, c.other) for c in cases), strict=True)
    )
    return Case(own, other, slices, raters)
