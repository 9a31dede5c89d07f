"""Share of prompts held out, and the side of the split a prompt is given when it is first seen. Pure.

A gate needs a number of held-out prompts, not a share of them: a tenth of 100 rated prompts is too few for any verdict,
a tenth of 10,000 is plenty. So the share for a prompt that is seen for the first time depends on how many are held out
already; the prompt's side is then written down (`rl.datasets.splits`) and never changes.

The shares depend on counts alone and the draw on the prompt's hash alone, never on what was answered or what people
said of it. So the held-out prompts are a random sample of those that were seen with them, and error rates worked out
for a random sample hold (`benchmarks/split.py` shows it end to end).

Near-identical prompts are drawn together, as one: a cluster that stands on two sides judges nobody, and of groups of
three drawn one by one 8 of 9 held-out prompts were lost. A prompt takes the side that its cluster stands on already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rl.datasets.feedback_types import Split

SHARE = 0.1
"""Share that stands on each of the eval and the holdout side where data abound."""

FIRST_SHARE = 1 / 3
"""Share held out until a gate can speak."""

FIRST_SHARE_OF_CLUSTERS = 1 / 2
"""The same where clusters of near-identical prompts have two prompts or more on average: one question in many wordings
is little evidence and much to train on. Of 72 questions a third is too few for a gate that asks for 30."""

SPARE = 4 / 3
"""Factor on the gate's fewest prompts, held out before the share falls: of some prompts nothing can be
told."""

PULL = 0.1
"""By how much the share rises for each prompt too few held out, and falls for each too many: the biased coin of Efron
(1971, Biometrika 58). Of 100 prompts it holds out 30 to 36, where a fair draw would hold out anything from 23 to 43."""

MOST_HELD_OUT, MOST_EVALUATED, LEAST_EVALUATED = 0.5, 0.2, 0.02
"""Bounds of the shares, whatever is missing: half of what comes is always trained on."""


LARGE, LARGE_SHARE = 5, 0.1
"""A cluster of more prompts than both, the number and the share of all prompts, is drawn prompt by prompt: it may be a
template that many questions share, and nothing would be left to train on where all of them were held out. If it is one
question after all, a vote of the holdout is lost with it."""


def largest_cluster(prompts: int) -> float:
    """Prompts of the largest cluster that is drawn as one, of an agent with so many."""
    return max(LARGE, LARGE_SHARE * prompts)


Clusters = Callable[[Sequence[str]], Mapping[str, str]]
"""Prompt hashes, in the order in which they may lead a cluster -> the name of the cluster of each, "" for a prompt like
no other (`rl.datasets.prompt_clusters.clusters_of`)."""


@dataclass(frozen=True, slots=True)
class Shares:
    """The shares in force for the next prompt, each in [0, 1]; the rest is trained on."""

    eval: float
    holdout: float


@dataclass(slots=True)
class SplitCounts:
    """Prompts that stand on a side already, of those that carry evidence."""

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
    """Held-out prompts until which a third of what comes is held out, for a gate that asks for `min_evidence`."""
    return -int(-min_evidence * SPARE // 1)


def share_held_out(held_out: int, min_evidence: int) -> float:
    """A third until `holdout_target` prompts are held out; then 1/10 + 7/30 x wanted / held out, towards a tenth."""
    wanted = holdout_target(min_evidence)
    return SHARE + (FIRST_SHARE - SHARE) * wanted / max(held_out, wanted)


def shares_in_force(tally: SplitCounts, min_evidence: int, first_share: float = FIRST_SHARE) -> Shares:
    """The shares for the next prompt: pulled towards an exact `first_share` until enough are held out, towards an exact
    tenth on the eval side."""
    missing = SHARE * tally.prompts - tally.eval
    evaluated = min(max(SHARE + PULL * missing, LEAST_EVALUATED), MOST_EVALUATED)
    held_out = share_held_out(tally.holdout, min_evidence)
    if tally.holdout < holdout_target(min_evidence):
        held_out += first_share - FIRST_SHARE + PULL * (first_share * tally.prompts - tally.holdout)
    return Shares(evaluated, min(max(held_out, SHARE), MOST_HELD_OUT))


def position_of(prompt_hash: str) -> float:
    """A prompt's number in [0, 1), uniform over prompts: the first eight hex digits of its hash over 2^32."""
    return int(prompt_hash[:8], 16) / 2**32


def draw_split(prompt_hash: str, shares: Shares) -> Split:
    """Holdout at the upper end of [0, 1), eval below it, train below that.

    A prompt from 0.9 on is held out under any shares that `shares_in_force` gives, one below 0.3 always trained on.
    """
    position = position_of(prompt_hash)
    if position >= 1 - shares.holdout:
        return "holdout"
    return "eval" if position >= 1 - shares.holdout - shares.eval else "train"


def no_clusters(prompt_hashes: Sequence[str]) -> Mapping[str, str]:
    """No two prompts are near-identical."""
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
    """The sides of those prompts that stand on none yet; `known` are the others', prompt hash -> split.

    First those with a rating, one after the other in an order that has nothing to do with the draw;
    then those that only have a reward; both count. Prompts without either all stand by the shares in force
    after that: there are plenty of them, and what they lack is feedback.

    clusters: called first with the prompts that have feedback, so that their sides do not depend on which others were
    recorded; then with all, where one without feedback stands on no side.
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
    """Prompts that are drawn together, and the side of each group: the near-identical ones, or a prompt alone.

    Of a cluster that stands on two sides, and of a large one, each prompt is a group.
    """

    def __init__(self, known: Mapping[str, Split], prompts: Collection[str], clusters: Clusters) -> None:
        self._counted: set[str] = set()
        self._sides: dict[str, Split] = {}
        self._names: Mapping[str, str] = {}
        self.first_share = FIRST_SHARE
        if known.keys() >= set(prompts):
            return  # nothing is drawn
        # prompts with a side come first, so that a cluster keeps the name it was drawn by
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
        """The side of a prompt's group, drawn by the prompt where the group has none."""
        return self._sides.setdefault(self._group(prompt_hash), draw_split(prompt_hash, shares))

    def first_counted(self, prompt_hash: str) -> bool:
        """True once for each group."""
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
    """Number of further prompts, on average, until `wanted` of all are held out."""
    held_out, prompts = float(tally.holdout), tally.prompts
    while held_out < wanted - 1e-9:
        # the count as it is expected to be, rounded: shares are of whole prompts
        share = shares_in_force(SplitCounts(prompts, 0, round(held_out)), min_evidence).holdout
        held_out, prompts = held_out + share, prompts + 1
    return prompts - tally.prompts
