"""The one place that says on which side of the split a prompt stands: stored where it was seen, else as it would be."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

from rl.datasets.feedback_types import Split
from rl.datasets.holdout import Clusters, SplitCounts, draw_splits, no_clusters
from rl.datasets.prompt_clusters import MIN_PROMPTS, ClusteredPrompt, clusters_of
from rl.gates.report import GateBounds
from rl.models import GateSettings, PromptSplit

AT_ONCE = 900
"""Rows named in one statement; older SQLite takes 999 values."""

MAX_NAMED_PROMPTS = 20 * AT_ONCE
"""Of more prompts than these, all sides of the agent are read: that is quicker than naming each."""

MOST_CLUSTERED = 20_000
"""Prompts up to which near-identical ones are drawn together: comparing so many takes about five seconds. With more, a
holdout is large enough without those that stand on two sides."""

CACHE_SIZE = 4
"""Sets of prompts whose clusters are kept in memory: one dry run asks for the same ones several times."""

ReadPrompts = Callable[[list[str]], Mapping[str, ClusteredPrompt]]
"""Prompt hashes -> what tells whether those prompts that are text are near-identical."""


def no_prompts(prompt_hashes: list[str]) -> Mapping[str, ClusteredPrompt]:
    """No prompt can be read."""
    return {}


def splits_of(
    agent: str,
    rated: Collection[str],
    rewarded: Collection[str] = (),
    unrated: Collection[str] = (),
    clustered: ReadPrompts = no_prompts,
) -> dict[str, Split]:
    """Prompt hash -> train, eval or holdout; writes nothing.

    A prompt that was in a dataset stands where it stood then. Of the others it is said where they would stand if all
    given here were seen now: `rated` are those somebody said something of, `rewarded` those that only have a reward,
    `unrated` the rest (see `rl.datasets.holdout.draw_splits`). clustered: reads what near-identical prompts are told
    by, which are drawn together.
    """
    known = _stored_splits(agent, {*rated, *rewarded, *unrated})
    return known | _new_sides(agent, known, rated, rewarded, unrated, clustered)


def splits_store(
    agent: str,
    rated: Collection[str],
    rewarded: Collection[str] = (),
    unrated: Collection[str] = (),
    clustered: ReadPrompts = no_prompts,
) -> dict[str, Split]:
    """Sides of prompts like `splits_of`; new ones are stored for good. Of two processes at once the first
    one's word stands."""
    known = _stored_splits(agent, {*rated, *rewarded, *unrated})
    drawn = _new_sides(agent, known, rated, rewarded, unrated, clustered)
    if not drawn:
        return known
    rows = (PromptSplit(prompt_hash=name, agent=agent, split=drawn[name]) for name in sorted(drawn))
    PromptSplit.objects.bulk_create(rows, batch_size=AT_ONCE, ignore_conflicts=True)
    # read again: another process may have entered some of them a moment earlier
    return known | _stored_splits(agent, drawn.keys())


def min_evidence_of(agent: str) -> int:
    """Held-out prompts that the agent's gate asks for."""
    set_here = GateSettings.objects.filter(agent=agent).values_list("min_evidence", flat=True).first()
    return GateBounds().min_evidence if set_here is None else set_here


def _new_sides(
    agent: str,
    known: Mapping[str, Split],
    rated: Collection[str],
    rewarded: Collection[str],
    unrated: Collection[str],
    clustered: ReadPrompts,
) -> dict[str, Split]:
    if all(name in known for names in (rated, rewarded, unrated) for name in names):
        return {}
    clusters: Clusters = no_clusters if clustered is no_prompts else partial(_clusters, clustered)
    return draw_splits(
        known, rated, rewarded, unrated, min_evidence=min_evidence_of(agent), clusters=clusters
    )


_cache: dict[bytes, dict[str, str]] = {}
"""Digest of prompt hashes -> their clusters, the newest few: a hash names the words, so an entry never goes stale."""


def _clusters(clustered: ReadPrompts, prompt_hashes: Sequence[str]) -> Mapping[str, str]:
    """Clusters of near-identical prompts; none of too few to tell a template from a question, or of too many."""
    if not MIN_PROMPTS <= len(prompt_hashes) <= MOST_CLUSTERED:
        return {}
    digest = hashlib.sha256("".join(prompt_hashes).encode()).digest()
    if (clusters := _cache.get(digest)) is None:
        prompts = clustered(list(prompt_hashes))
        clusters = clusters_of({name: prompts[name] for name in prompt_hashes if name in prompts})
        if len(_cache) >= CACHE_SIZE:
            _cache.clear()
        _cache[digest] = clusters
    return clusters


def _stored_splits(agent: str, prompt_hashes: Collection[str]) -> dict[str, Split]:
    rows = PromptSplit.objects.order_by()
    if len(prompt_hashes) > MAX_NAMED_PROMPTS:
        every = rows.filter(agent=agent).values_list("prompt_hash", "split").iterator(chunk_size=AT_ONCE)
        return {name: cast(Split, split) for name, split in every if name in prompt_hashes}
    found: dict[str, Split] = {}
    names = sorted(prompt_hashes)
    for start in range(0, len(names), AT_ONCE):
        stored = rows.filter(pk__in=names[start : start + AT_ONCE]).values_list("prompt_hash", "split")
        found |= {name: cast(Split, split) for name, split in stored}
    return found


class HasPrompt(Protocol):
    """Anything that is said of a prompt."""

    @property
    def prompt_hash(self) -> str: ...


P = TypeVar("P", bound=HasPrompt)


class SourceSplits:
    """The sides of a source's prompts: noted while its evidence is read, settled together when the first is asked for.

    What a prompt's side is drawn by must not depend on which kind of dataset is made of it first; so everything that
    was said is noted, whether this kind of dataset makes a row of it or not.
    """

    def __init__(self, agent: str, *, dry_run: bool, clustered: ReadPrompts = no_prompts) -> None:
        self.agent, self._clustered = agent, clustered
        self._settle: Callable[..., dict[str, Split]] = splits_of if dry_run else splits_store
        self._rated: dict[str, None] = {}
        self._rewarded: dict[str, None] = {}
        self._known: dict[str, Split] = {}

    def track_rated(self, evidence: Iterable[P]) -> Iterator[P]:
        """The same evidence, its prompts noted as it passes."""
        for item in evidence:
            self._rated[item.prompt_hash] = None
            yield item

    def track_rewarded(self, rewards: Iterable[P]) -> Iterator[P]:
        """The same rewards, their prompts noted as they pass."""
        for item in rewards:
            self._rewarded[item.prompt_hash] = None
            yield item

    def settle(self, prompt_hashes: Collection[str]) -> None:
        """Settle these too, of which nothing may have been said."""
        self._known = self._settle(self.agent, self._rated, self._rewarded, prompt_hashes, self._clustered)

    @property
    def tally(self) -> SplitCounts:
        """Counts of prompts with feedback or a reward on each side."""
        self.settle([])
        return SplitCounts.of(self._known[name] for name in {**self._rated, **self._rewarded})

    def __call__(self, prompt_hash: str) -> Split:
        if prompt_hash not in self._known:
            self.settle([])
        return self._known[prompt_hash]
