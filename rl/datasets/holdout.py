"""The share of prompts held out, and the draw of a new prompt's split. Pure.

A gate needs a number of held-out prompts, not a share: a tenth of 100 rated prompts is too few for a verdict, a tenth
of 10,000 is plenty. So the share for a new prompt depends on how many are held out already. `rl.datasets.splits` stores
the drawn split for good.

Shares depend on counts alone, the draw on the prompt's hash alone, never on answers or feedback. Held-out prompts are
therefore a random sample, and error rates for random samples hold (`benchmarks/split.py`).

Near-identical prompts are drawn together: a cluster on two sides must be left out of the holdout. When groups of three
were drawn one by one, 8 of 9 held-out prompts were lost that way. A new prompt takes the side of its cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl.datasets.feedback_types import Split

SHARE = 0.1
"""Share of the eval split and of the holdout when data abound."""

FIRST_SHARE = 1 / 3
"""Share held out until the gate has enough prompts."""

FIRST_SHARE_OF_CLUSTERS = 1 / 2
"""FIRST_SHARE if clusters have two or more prompts on average: many wordings of few questions are little evidence.
A third of 72 questions is too few for a gate that needs 30."""

SPARE = 4 / 3
"""Factor on the gate's minimum before the share falls, because some held-out prompts have no usable evidence."""

PULL = 0.1
"""Change of the share per prompt too few or too many (biased coin, Efron 1971, Biometrika 58).

Of 100 prompts it holds out 30 to 36; a fair draw would hold out 23 to 43."""

MOST_HELD_OUT, MOST_EVALUATED, LEAST_EVALUATED = 0.5, 0.2, 0.02
"""Bounds of the shares. At most half of new prompts is held out."""

LARGE, LARGE_SHARE = 5, 0.1
"""A cluster larger than this number and this share of all prompts is drawn prompt by prompt.

It may be a template that many questions share; holding out all of it could leave nothing to train on."""


def largest_cluster(prompts: int) -> float:
    """Size of the largest cluster that is drawn together, for an agent with `prompts` prompts."""
    return max(LARGE, LARGE_SHARE * prompts)


Clusters = Callable[[Sequence[str]], Mapping[str, str]]
"""Ordered prompt hashes -> {hash: name of its cluster, or ""} (`rl.datasets.prompt_clusters.clusters_of`)."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the next prompt, in [0, 1]; the rest is trained on."""

    eval: float
    holdout: float


@dataclass(slots=True)
class SplitCounts:
    """Prompts with evidence: all, on eval, on holdout."""

    prompts: int = 0
    eval: int = 0
    holdout: int = 0

    def add(self, split: Split) -> None:
        self.prompts += 1
        self.eval += split == "eval"
        self.holdout += split == "holdout"

    @classmethod
    def of(cls, splits: Iterable[Split]) -> SplitCounts:
        tally = cls()
        for split in splits:
            tally.add(split)
        return tally


def holdout_target(min_evidence: int) -> int:
    """Held-out prompts at which the share starts to fall, for a gate that needs `min_evidence`."""
    return -int(-min_evidence * SPARE // 1)


def share_held_out(held_out: int, min_evidence: int) -> float:
    """1/3 until `holdout_target` prompts are held out, then 1/10 + 7/30 * target / held out, towards 1/10."""
    wanted = holdout_target(min_evidence)
    return SHARE + (FIRST_SHARE - SHARE) * wanted / max(held_out, wanted)


def shares_in_force(tally: SplitCounts, min_evidence: int, first_share: float = FIRST_SHARE) -> Shares:
    """Shares of the next prompt, corrected towards `first_share` (until enough are held out) and SHARE on eval."""
    missing = SHARE * tally.prompts - tally.eval
    evaluated = min(max(SHARE + PULL * missing, LEAST_EVALUATED), MOST_EVALUATED)
    held_out = share_held_out(tally.holdout, min_evidence)
    if tally.holdout < holdout_target(min_evidence):
        held_out += first_share - FIRST_SHARE + PULL * (first_share * tally.prompts - tally.holdout)
    return Shares(evaluated, min(max(held_out, SHARE), MOST_HELD_OUT))


def position_of(prompt_hash: str) -> float:
    """First eight hex digits of the hash over 2^32: uniform in [0, 1)."""
    return int(prompt_hash[:8], 16) / 2**32


def draw_split(prompt_hash: str, shares: Shares) -> Split:
    """Position in [0, 1) -> split: train at the lower end, then eval, then holdout.

    Under the bounds of the shares, positions from 0.9 on are always held out and those below 0.3 always trained on.
    """
    position = position_of(prompt_hash)
    if position >= 1 - shares.holdout:
        return "holdout"
    return "eval" if position >= 1 - shares.holdout - shares.eval else "train"


def no_clusters(prompt_hashes: Sequence[str]) -> Mapping[str, str]:
    return {}


def draw_splits(
    known: Mapping[str, Split],
    rated: Collection[str],
    rewarded: Collection[str] = (),
    unrated: Collection[str] = (),
    *,
    min_evidence: int,
    clusters: Clusters = no_clusters,
) -> dict[str, Split]:
    """Splits of the prompts that are not in `known` (prompt hash -> split).

    Rated prompts are drawn first, one by one in an order independent of the draw, then prompts with only a reward.
    Both change the shares. Prompts without feedback are drawn last with the resulting shares.

    clusters: called with the prompts with feedback, so that their splits do not depend on other recorded prompts; then
        with all prompts.
    """
    splits: dict[str, Split] = {}
    with_feedback = set(rated) | set(rewarded)
    groups = _Groups(known, with_feedback, clusters)
    tally = SplitCounts()
    seen: set[str] = set()
    for prompts in (rated, rewarded):
        fresh = set(prompts) - seen
        seen |= fresh
        for prompt_hash in fresh & known.keys():
            if groups.first_counted(prompt_hash):
                tally.add(known[prompt_hash])
        for prompt_hash in sorted(fresh - known.keys(), key=_place):
            shares = shares_in_force(tally, min_evidence, groups.first_share)
            splits[prompt_hash] = groups.side(prompt_hash, shares)
            if groups.first_counted(prompt_hash):
                tally.add(splits[prompt_hash])
    rest = Shares(SHARE, share_held_out(tally.holdout, min_evidence))
    groups = _Groups({**known, **splits}, with_feedback | set(unrated), clusters)
    for prompt_hash in sorted(set(unrated) - with_feedback - known.keys(), key=_place):
        splits[prompt_hash] = groups.side(prompt_hash, rest)
    return splits


class _Groups:
    """Groups of prompts drawn together: near-identical ones, or a single prompt.

    In a large cluster, or one that is on two sides already, each prompt is its own group.
    """

    def __init__(self, known: Mapping[str, Split], prompts: Collection[str], clusters: Clusters) -> None:
        self._counted: set[str] = set()
        self._sides: dict[str, Split] = {}
        self._names: Mapping[str, str] = {}
        self.first_share = FIRST_SHARE
        if known.keys() >= set(prompts):
            return  # Nothing to draw.
        # Known prompts first, so that a cluster keeps the name it was drawn by.
        found = clusters(sorted(prompts, key=lambda name: (name not in known, _place(name))))
        members = Counter(name for name in found.values() if name)
        most = largest_cluster(len(prompts))
        sides: dict[str, set[Split]] = {}
        for prompt_hash, name in found.items():
            if name and prompt_hash in known:
                sides.setdefault(name, set()).add(known[prompt_hash])
        whole = {name for name, n in members.items() if n <= most and len(sides.get(name, ())) <= 1}
        self._names = {prompt_hash: name for prompt_hash, name in found.items() if name in whole}
        self._sides = {name: side for name in whole for side in sides.get(name, ())}
        if len(prompts) >= 2 * len({self._group(prompt_hash) for prompt_hash in prompts}):
            self.first_share = FIRST_SHARE_OF_CLUSTERS

    def side(self, prompt_hash: str, shares: Shares) -> Split:
        """The split of a prompt's group; drawn by this prompt if the group has none."""
        return self._sides.setdefault(self._group(prompt_hash), draw_split(prompt_hash, shares))

    def first_counted(self, prompt_hash: str) -> bool:
        """True for the first prompt of each group."""
        group = self._group(prompt_hash)
        if group in self._counted:
            return False
        self._counted.add(group)
        return True

    def _group(self, prompt_hash: str) -> str:
        return self._names.get(prompt_hash, prompt_hash)


def _place(prompt_hash: str) -> str:
    return prompt_hash[8:]


def prompts_until(wanted: int, tally: SplitCounts, min_evidence: int) -> int:
    """Expected number of further prompts until `wanted` are held out."""
    held_out, prompts = float(tally.holdout), tally.prompts
    while held_out < wanted - 1e-9:
        # Shares take whole prompts: round the expected count.
        share = shares_in_force(SplitCounts(prompts, 0, round(held_out)), min_evidence).holdout
        held_out, prompts = held_out + share, prompts + 1
    return prompts - tally.prompts
