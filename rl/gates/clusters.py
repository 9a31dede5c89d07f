"""Clustering of votes: one for each held-out prompt or cluster of near-identical ones, however many pairs. Pure.

Pairs of one prompt share answers and a rater, near-identical prompts share nearly everything: counted one by one,
groups of three promoted 18 % of series for 5 %. Averaged, what they have to do with each other changes no test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from rl.gates.report import Case, Item, RatedAnswer


def one_per_prompt(cases: Sequence[Case], prompts: Sequence[str]) -> dict[int, Case]:
    """One case for each prompt, the mean of its pairs: place of its first pair -> case. prompts: per case the name of
    its prompt, or "" for a case that is a prompt of its own."""
    members: dict[str, list[int]] = {}
    for place, name in enumerate(prompts):
        members.setdefault(name or f"\0{place}", []).append(place)
    return {
        places[0]: _mean_case([cases[place] for place in places]) if len(places) > 1 else cases[places[0]]
        for places in members.values()
    }


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
        prompts = {item.prompt if isinstance(item, RatedAnswer) else str(i) for i, item in enumerate(group)}
        if len(prompts) > 1:
            merged[places[0]] = _mean(name, group)
            dropped |= set(places[1:])
    return [merged.get(place, item) for place, item in enumerate(items) if place not in dropped]


def _mean(name: str, group: Sequence[Item]) -> Item:
    """The mean figures of a group, in the slices and with the raters of any of them."""
    rated = [item for item in group if isinstance(item, RatedAnswer)]
    if rated:
        slices = tuple(dict.fromkeys(one for item in group for one in item.slices))
        raters = tuple(dict.fromkeys(one for item in group for one in item.raters))
        value, shift = (
            math.fsum(column) / len(rated)
            for column in zip(*((r.value, r.shift) for r in rated), strict=True)
        )
        return replace(rated[0], prompt=name, value=value, shift=shift, slices=slices, raters=raters)
    return _mean_case([item for item in group if isinstance(item, Case)])


def _mean_case(cases: Sequence[Case]) -> Case:
    """The mean figures of cases, and of those in a slice where these differ."""
    slices = tuple(dict.fromkeys(one for case in cases for one in case.slices))
    raters = tuple(dict.fromkeys(one for case in cases for one in case.raters))
    own, other = _figures(cases)
    parts = (
        (name, *_figures([case.restrict_to_slice(name) for case in cases if name in case.slices]))
        for name in slices
    )
    return Case(own, other, slices, raters, tuple(part for part in parts if part[1:] != (own, other)))


def _figures(cases: Sequence[Case]) -> tuple[float, float]:
    own, other = (
        math.fsum(side) / len(cases)
        for side in zip(*((c.policy_score, c.reference_score) for c in cases), strict=True)
    )
    return own, other
