"""Splits of prompts: the stored split of a known prompt, the drawn one of a new prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, cast

from feedback.storage.sql import IDS, chunks
from rl.datasets.feedback_types import Split
from rl.datasets.holdout import Clusters, SplitCounts, draw_splits, no_clusters, position_of
from rl.datasets.prompt_clusters import MIN_PROMPTS, ClusteredPrompt, clusters_of
from rl.gates.report import GateBounds
from rl.models import GateSettings, PromptSplit

MAX_NAMED_PROMPTS = 20 * IDS
"""For more prompts, all splits of the agent are read, which is faster than naming each prompt."""

MOST_CLUSTERED = 20_000
"""Most prompts among which near-identical ones are drawn together; comparing so many takes about 5 s.

With more, the holdout is large enough without the clusters that are on two sides."""

EVAL_SHARE_OF_VALIDATION = 0.25
"""Share of a validation file's prompts on the eval split; the others are held out."""

CACHE_SIZE = 4
"""Sets of prompts whose clusters are cached, because one dry run asks for the same ones several times."""

ReadPrompts = Callable[[list[str]], Mapping[str, ClusteredPrompt]]
"""Prompt hashes -> {hash: what near-identity is decided by}, for text prompts."""


def no_prompts(prompt_hashes: list[str]) -> Mapping[str, ClusteredPrompt]:
    return {}


def splits_of(
    agent: str,
    rated: Collection[str],
    rewarded: Collection[str] = (),
    unrated: Collection[str] = (),
    clustered: ReadPrompts = no_prompts,
    validation: Collection[str] | None = None,
) -> dict[str, Split]:
    """Prompt hash -> split: the stored one, or the one that would be drawn now. Writes nothing.

    Args:
        rated: Prompts with feedback.
        rewarded: Prompts with only a reward.
        unrated: Other prompts (see `rl.datasets.holdout.draw_splits`).
        clustered: Reads what near-identity is decided by; near-identical prompts are drawn together.
        validation: The new prompts to hold out; all other new ones are trained on. None: they are drawn.
    """
    known = _stored_splits(agent, {*rated, *rewarded, *unrated})
    return known | _new_sides(agent, known, rated, rewarded, unrated, clustered, validation)


def splits_store(
    agent: str,
    rated: Collection[str],
    rewarded: Collection[str] = (),
    unrated: Collection[str] = (),
    clustered: ReadPrompts = no_prompts,
    validation: Collection[str] | None = None,
) -> dict[str, Split]:
    """As `splits_of`, and stores new splits for good. Of two processes at once, the first one's draw stands."""
    known = _stored_splits(agent, {*rated, *rewarded, *unrated})
    drawn = _new_sides(agent, known, rated, rewarded, unrated, clustered, validation)
    if not drawn:
        return known
    rows = (PromptSplit(prompt_hash=name, agent=agent, split=drawn[name]) for name in sorted(drawn))
    PromptSplit.objects.bulk_create(rows, batch_size=IDS, ignore_conflicts=True)
    # Read again: another process may have stored some of them first.
    return known | _stored_splits(agent, drawn.keys())


def min_evidence_of(agent: str) -> int:
    """Held-out prompts that the agent's gate needs."""
    set_here = GateSettings.objects.filter(agent=agent).values_list("min_evidence", flat=True).first()
    return GateBounds().min_evidence if set_here is None else set_here


def _new_sides(
    agent: str,
    known: Mapping[str, Split],
    rated: Collection[str],
    rewarded: Collection[str],
    unrated: Collection[str],
    clustered: ReadPrompts,
    validation: Collection[str] | None,
) -> dict[str, Split]:
    new = [name for names in (rated, rewarded, unrated) for name in names if name not in known]
    if not new:
        return {}
    if validation is not None:
        return {name: side_in_validation(name) if name in validation else "train" for name in new}
    clusters: Clusters = no_clusters if clustered is no_prompts else partial(_clusters, clustered)
    return draw_splits(
        known, rated, rewarded, unrated, min_evidence=min_evidence_of(agent), clusters=clusters
    )


def side_in_validation(prompt_hash: str) -> Split:
    """Side of a prompt of a validation file: a quarter steers the training, the rest is for the verdict."""
    return "eval" if position_of(prompt_hash) < EVAL_SHARE_OF_VALIDATION else "holdout"


_cache: dict[bytes, dict[str, str]] = {}
"""Digest of prompt hashes -> their clusters. A hash identifies its text, so entries never go stale."""


def _clusters(clustered: ReadPrompts, prompt_hashes: Sequence[str]) -> Mapping[str, str]:
    """Clusters of near-identical prompts; none for fewer than MIN_PROMPTS or more than MOST_CLUSTERED."""
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
        every = rows.filter(agent=agent).values_list("prompt_hash", "split").iterator(chunk_size=IDS)
        return {name: cast(Split, split) for name, split in every if name in prompt_hashes}
    found: dict[str, Split] = {}
    names = sorted(prompt_hashes)
    for chunk in chunks(names):
        stored = rows.filter(pk__in=chunk).values_list("prompt_hash", "split")
        found |= {name: cast(Split, split) for name, split in stored}
    return found


class HasPrompt(Protocol):
    @property
    def prompt_hash(self) -> str: ...


P = TypeVar("P", bound=HasPrompt)


class SourceSplits:
    """Splits of a source's prompts: collected while its evidence is read, drawn together at the first lookup.

    All evidence is collected, whatever this kind of dataset makes of it, so that a split does not depend on which kind
    of dataset was made first.
    """

    def __init__(
        self,
        agent: str,
        *,
        dry_run: bool,
        clustered: ReadPrompts = no_prompts,
        validation: Collection[str] | None = None,
    ) -> None:
        self.agent, self._clustered, self._validation = agent, clustered, validation
        self._settle: Callable[..., dict[str, Split]] = splits_of if dry_run else splits_store
        self._rated: dict[str, None] = {}
        self._rewarded: dict[str, None] = {}
        self._known: dict[str, Split] = {}

    def track_rated(self, evidence: Iterable[P]) -> Iterator[P]:
        """Passes evidence through and collects its prompts."""
        for item in evidence:
            self._rated[item.prompt_hash] = None
            yield item

    def track_rewarded(self, rewards: Iterable[P]) -> Iterator[P]:
        """Passes rewards through and collects their prompts."""
        for item in rewards:
            self._rewarded[item.prompt_hash] = None
            yield item

    def settle(self, prompt_hashes: Collection[str]) -> None:
        """Draw these prompts too, which may have no feedback."""
        self._known = self._settle(
            self.agent, self._rated, self._rewarded, prompt_hashes, self._clustered, self._validation
        )

    def clusters(self, prompt_hashes: Collection[str]) -> Mapping[str, str]:
        """Prompt -> its cluster of near-identical prompts among these, or ""."""
        return _clusters(self._clustered, sorted(set(prompt_hashes)))

    @property
    def tally(self) -> SplitCounts:
        """Prompts with feedback or a reward per split."""
        self.settle([])
        return SplitCounts.of(self._known[name] for name in {**self._rated, **self._rewarded})

    def __call__(self, prompt_hash: str) -> Split:
        if prompt_hash not in self._known:
            # without it where it was recorded after the prompts were collected
            self.settle([] if prompt_hash in self._rated or prompt_hash in self._rewarded else [prompt_hash])
        return self._known[prompt_hash]
