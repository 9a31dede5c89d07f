"""Queue of pairs: the two responses to one prompt that a rater compares next, and their sides."""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.db.models import OuterRef
from django.utils import timezone

from feedback.explorer.search import DecisionFilter, one_of
from feedback.models import Comparison, Decision, RaterKind
from feedback.selectors import comparisons_standing, decision_get

LOOK = 5_000
"""Decisions scanned at a time for prompts with different responses."""
LOOKS = 4
"""Scans, each further back, before the queue counts as empty."""
PROMPTS = 60
"""Newest prompts taken from one scan."""
RESPONSES = 6
"""Newest different responses to one prompt that are compared."""

Key = frozenset[uuid.UUID]


@dataclass(frozen=True)
class QueuedPair:
    """Two decisions on the same prompt, on the sides shown to the rater."""

    left: Decision
    right: Decision

    @property
    def key(self) -> str:
        """Key of the pair; sides do not matter."""
        return pair_key(self.left.pk, self.right.pk)


@dataclass(frozen=True)
class PairsWaiting:
    pair: QueuedPair | None
    count: int
    """Pairs among the scanned decisions; older ones may hold more."""


@dataclass(frozen=True)
class _Response:
    pk: uuid.UUID
    policy: str
    target: int


@dataclass(frozen=True)
class _Candidate:
    first: _Response
    second: _Response
    raters: int
    """People who compared it; this rater did not."""

    @property
    def rank(self) -> tuple[int, bool]:
        """Fewest comparisons first, then pairs of two policies: they show which policy is better."""
        return self.raters, self.first.policy == self.second.policy

    @property
    def key(self) -> str:
        return pair_key(self.first.pk, self.second.pk)


def pair_key(one: uuid.UUID, other: uuid.UUID) -> str:
    return "~".join(sorted((str(one), str(other))))


def sides_of(rater: str, one: uuid.UUID, other: uuid.UUID) -> tuple[uuid.UUID, uuid.UUID]:
    """(left, right) for this rater, by hash: no policy keeps a side, and a reload does not swap them."""
    first, second = sorted((one, other))
    swapped = _number("side", rater, pair_key(one, other)) % 2 == 1
    return (second, first) if swapped else (first, second)


def pairs_waiting(
    rater: str, within: DecisionFilter | None = None, skip: Collection[str] = ()
) -> PairsWaiting:
    """The next pair for this rater, skipping the keys in `skip`.

    Leaves out pairs that this rater compared, and pairs with as many comparisons as their decisions want ratings.
    Among pairs of equal rank, a hash of the rater chooses, so that two raters seldom get the same pair at once.
    """
    within = within or DecisionFilter()
    passed = set(skip)
    for prompts in _looks(within):
        candidates = [c for c in _candidates(rater, within, prompts) if c.key not in passed]
        if not candidates:
            continue
        foremost = min(c.rank for c in candidates)
        alike = [c for c in candidates if c.rank == foremost]
        chosen = min(alike, key=lambda c: _number("turn", rater, c.key))
        left, right = sides_of(rater, chosen.first.pk, chosen.second.pk)
        rows = Decision.objects.in_bulk([left, right])
        return PairsWaiting(QueuedPair(rows[left], rows[right]), len(candidates))
    return PairsWaiting(None, 0)


def pair_get(left: uuid.UUID, right: uuid.UUID) -> QueuedPair | None:
    """Two decisions as a pair on these sides; None unless both answer the same prompt."""
    first, second = decision_get(left), decision_get(right)
    if first is None or second is None or first.prompt_hash != second.prompt_hash or first == second:
        return None
    return QueuedPair(first, second)


def compared_today(rater: str, agent: str = "") -> int:
    """Comparisons by this rater since midnight (TIME_ZONE)."""
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    mine = comparisons_standing(agent or None).filter(rater=rater, created_at__gte=midnight)
    return mine.order_by().count()


def _looks(within: DecisionFilter) -> Iterator[list[tuple[str, str]]]:
    """(agent, prompt hash) of prompts with different responses, newest first, one list per scan."""
    another = Decision.objects.filter(agent=OuterRef("agent"), prompt_hash=OuterRef("prompt_hash"))
    another = another.filter(withdrawal=None).exclude(response=OuterRef("response")).order_by()
    end: datetime | None = None
    for _ in range(LOOKS):
        base = within.decisions().filter(withdrawal=None).order_by("-created_at", "-id")
        if end is not None:
            base = base.filter(created_at__lte=end)
        start, end = end, None
        for created_at in base.values_list("created_at", flat=True)[LOOK - 1 : LOOK]:
            end = created_at
        rows = base.alias(another=one_of(another)).exclude(another=None)
        if end is not None:
            rows = rows.filter(created_at__gte=end)
        found = rows.values_list("agent", "prompt_hash")[: PROMPTS * RESPONSES]
        yield list(dict.fromkeys(found))[:PROMPTS]
        if end is None or end == start:
            return


def _candidates(rater: str, within: DecisionFilter, prompts: list[tuple[str, str]]) -> list[_Candidate]:
    if not prompts:
        return []
    responses: dict[tuple[str, str], dict[str, _Response]] = defaultdict(dict)
    rows = (
        within.decisions()
        .filter(withdrawal=None)
        .filter(agent__in={agent for agent, _ in prompts}, prompt_hash__in=[hash for _, hash in prompts])
        .order_by("-created_at", "-id")
        .values_list("agent", "prompt_hash", "response", "pk", "policy", "ratings_wanted")
    )
    for agent, prompt, response, pk, policy, wanted in rows[: PROMPTS * RESPONSES * 4]:
        known = responses[agent, prompt]
        if response not in known and len(known) < RESPONSES:
            known[response] = _Response(pk, policy, wanted)
    everyone = [response for known in responses.values() for response in known.values()]
    mine, counts = _compared_pairs(rater, [response.pk for response in everyone])
    found = []
    for prompt_key in prompts:
        for first, second in itertools.combinations(responses[prompt_key].values(), 2):
            key = frozenset((first.pk, second.pk))
            if key not in mine and counts[key] < max(first.target, second.target):
                found.append(_Candidate(first, second, counts[key]))
    return found


def _compared_pairs(rater: str, ids: list[uuid.UUID]) -> tuple[set[Key], Counter[Key]]:
    """(pairs of these decisions that the rater compared, number of people per pair)."""
    mine: set[Key] = set()
    raters: set[tuple[Key, str]] = set()
    rows = Comparison.objects.filter(left__in=ids, superseded_by__isnull=True, withdrawn=False)
    for left, right, who, kind in rows.order_by().values_list("left_id", "right_id", "rater", "rater_kind"):
        if who == rater:
            mine.add(frozenset((left, right)))
        if kind == RaterKind.HUMAN:
            raters.add((frozenset((left, right)), who))
    return mine, Counter(key for key, _ in raters)


def _number(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8])
