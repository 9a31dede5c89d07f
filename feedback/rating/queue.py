"""Rating queue: its order, the next decision, leases and progress.

Order: requested decisions, then further responses to the prompt rated last, then fewest ratings, then highest
annotation priority, then prompts that nobody rated, then oldest.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import connection, transaction
from django.db.models import Count, Exists, F, IntegerField, OuterRef, Q, QuerySet, Subquery
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce
from django.db.models.lookups import Exact, IsNull
from django.utils import timezone

from feedback.explorer.search import DecisionFilter, one_of
from feedback.models import Decision, Lease, Rating
from feedback.rating.requests import decision_requested
from feedback.selectors import ratings_standing, tag_condition

WINDOW = 100
"""Decisions of an index range read first."""
WINDOW_GROWTH, WINDOW_MAX = 8, 5_000
"""Each further window is larger by this factor, up to this size."""

TAG_RANGES = 3
"""The first tags of a decision have an index each (PostgreSQL)."""
FURTHER_MOST = 100_000
"""Most decisions in which a later tag is looked for."""


class QueueSegment(NamedTuple):
    """Part of the queue; segments are yielded in the queue's order."""

    rated: bool
    """True if people rated its decisions already."""
    ranges: list[QuerySet[Decision]]
    """Disjoint index ranges that together make up the segment."""


def awaiting_ratings(decisions: QuerySet[Decision]) -> QuerySet[Decision]:
    """Decisions with fewer human ratings than wanted; the condition of the queue's indexes."""
    return decisions.filter(ratings_human__lt=F("ratings_wanted"))


def queue_sort(queued: QuerySet[Decision]) -> QuerySet[Decision]:
    return queued.order_by("ratings_human", "-annotation_priority", "created_at", "id")


def queue_segments(within: DecisionFilter) -> Iterator[QueueSegment]:
    """Segments of the queue that all raters share, in order.

    A filter by days gets a segment for decisions without annotation priority, which are often most of the queue.
    That segment is ordered by time, so the index finds the days at once.
    """
    unrated = Q(ratings_human=0)
    parts = [unrated]
    if within.since or within.until:
        parts = [unrated & Q(annotation_priority__gt=0), unrated & Q(annotation_priority=0)]
    ranges = _tag_conditions_by_index(within.tag) if within.tag else [Q()]
    everything = awaiting_ratings(within.but(tag="").decisions())
    for part in parts:
        yield QueueSegment(False, [everything.filter(index_range, part) for index_range in ranges])
    yield QueueSegment(True, [everything.filter(index_range, ratings_human__gt=0) for index_range in ranges])


def _tag_conditions_by_index(tag: str) -> list[Q]:
    """The condition "has this tag" as disjoint conditions, each served by an index of the queue."""
    if connection.vendor != "postgresql":
        return [tag_condition(tag)]
    places = [KT(f"tags__{place}") for place in range(TAG_RANGES + 1)]
    first = [Q(Exact(place, tag)) for place in places[:TAG_RANGES]]
    many = awaiting_ratings(Decision.objects.order_by()).filter(
        tag_condition(tag), IsNull(places[TAG_RANGES], False)
    )
    # The limit makes PostgreSQL run this subquery first instead of walking the whole queue.
    further = Q(pk__in=many.values("pk")[:FURTHER_MOST])
    for condition in first:
        further &= ~condition
    return [*first, further]


class Window(NamedTuple):
    ids: QuerySet[Decision, object]
    size: int
    """Most rows in it."""


def windows(index_range: QuerySet[Decision], first: int = WINDOW) -> Iterator[Window]:
    """Ids of an index range, in windows of growing size. Never ends: stop at a window that is not full."""
    ids = queue_sort(index_range).values("pk")
    at, size = 0, first
    while True:
        yield Window(ids[at : at + size], size)
        at, size = at + size, min(size * WINDOW_GROWTH, WINDOW_MAX)


COUNT_LIMIT = 2_000
"""The queue is counted up to here; a longer one is shown as "2,000+"."""

SAME_PROMPT_RUN = 12
"""Responses to one prompt shown in a row before another prompt."""

SAME_PROMPT_LOOK = 500
"""Most waiting responses to one prompt among which the next is chosen."""

NEW_PROMPT_LOOK = 50
"""Decisions of equal rank searched for one whose prompt nobody rated."""

LEASE = timedelta(minutes=10)
"""How long a shown decision is reserved for its rater."""

EVERYTHING = DecisionFilter()


def decisions_queued(rater: str, within: DecisionFilter = EVERYTHING) -> QuerySet[Decision]:
    """Decisions with fewer human ratings than wanted and none by this rater. Simulated ratings do not count."""
    # ratings_human=0 saves the lookup of this rater's rating for most of a long queue.
    return awaiting_ratings(within.decisions()).filter(Q(ratings_human=0) | Q(IsNull(_mine(rater), True)))


def _mine(rater: str) -> Subquery:
    return one_of(ratings_standing(of_withdrawn=True).filter(decision=OuterRef("pk"), rater=rater).order_by())


def _lease_count(rater: str) -> Coalesce:
    """Leases of other raters on a decision."""
    held = (
        Lease.objects.filter(decision=OuterRef("pk"), until__gt=timezone.now())
        .exclude(rater=rater)
        .order_by()
        .values("decision")
        .annotate(n=Count("pk"))
        .values("n")
    )
    return Coalesce(Subquery(held, output_field=IntegerField()), 0)


def next_decision(
    rater: str,
    within: DecisionFilter = EVERYTHING,
    skip: Collection[uuid.UUID | str] = (),
    after: Decision | None = None,
) -> Decision | None:
    """The decision to show next; None if the queue is empty. Deterministic for the same data.

    Responses to the prompt rated last come right after a request, at most SAME_PROMPT_RUN in a row. Training needs
    pairs of responses to one prompt, and the rater reads each prompt once.

    Args:
        skip: Ids skipped in this session.
        after: The decision that the rater has open; it counts as rated.
    """
    skip_ids = [*skip, after.pk] if after is not None else list(skip)
    if (asked := decision_requested(rater, within.decisions(), skip_ids)) is not None:
        return Decision.objects.get(pk=asked)
    # Superseded ratings count here: checking each would cost a lookup of its successor.
    latest = list(
        Rating.objects.filter(rater=rater, withdrawn=False)
        .order_by("-created_at", "-id")
        .values_list("decision__agent", "decision__prompt_hash")[:SAME_PROMPT_RUN]
    )
    if after is not None:
        latest = [(after.agent, after.prompt_hash), *latest][:SAME_PROMPT_RUN]
    if latest and within.agent in ("", latest[0][0]):
        slug, prompt = latest[0]
        if latest == [(slug, prompt)] * SAME_PROMPT_RUN:
            others = ~Q(agent=slug, prompt_hash=prompt)
            return _foremost(rater, within, skip_ids, others) or _foremost(rater, within, skip_ids)
        # Sorted in Python: with ORDER BY, SQLite walks the whole queue index to find one prompt.
        free = decisions_queued(rater, within).alias(others=_lease_count(rater)).exclude(pk__in=skip_ids)
        free = free.filter(ratings_human__lt=F("ratings_wanted") - F("others"))
        same = free.filter(agent=slug, prompt_hash=prompt).order_by()
        found = same.values_list("ratings_human", "annotation_priority", "created_at", "pk")[
            :SAME_PROMPT_LOOK
        ]
        if ranked := sorted((ratings, -priority, at, pk) for ratings, priority, at, pk in found):
            return Decision.objects.get(pk=ranked[0][3])
    return _foremost(rater, within, skip_ids)


def _foremost(
    rater: str, within: DecisionFilter, passed: Collection[uuid.UUID | str], condition: Q | None = None
) -> Decision | None:
    """The first in the queue's order after the rating requests and the last prompt."""
    for segment in queue_segments(within):
        first: list[_Free] = []
        for index_range in segment.ranges:
            first += _free(rater, index_range.filter(condition or Q()).exclude(pk__in=passed))
        if first:
            first = sorted(first)[:NEW_PROMPT_LOOK]
            alike = [row for row in first if row.place[:2] == first[0].place[:2]]
            chosen = next((row for row in alike if not row.known), alike[0])
            return Decision.objects.get(pk=chosen.pk)
    return None


class _Free(NamedTuple):
    """A decision that this rater may be shown."""

    place: tuple[int, float, datetime]
    """Sort key: (ratings, -priority, time)."""
    pk: uuid.UUID
    known: bool
    """True if a response to its prompt has a rating."""


def _free(rater: str, index_range: QuerySet[Decision]) -> list[_Free]:
    """The first decisions of an index range that may be shown to this rater, unordered; [] if none may.

    Reads windows and checks each. One statement would be slower: PostgreSQL expects few free decisions
    and sorts the whole queue.
    """
    siblings = Decision.objects.filter(
        agent=OuterRef("agent"), prompt_hash=OuterRef("prompt_hash"), ratings_human__gt=0
    ).order_by()
    for window in windows(index_range):
        rows = Decision.objects.filter(pk__in=window.ids).order_by()
        rows = rows.annotate(others=_lease_count(rater), mine=_mine(rater), known=Exists(siblings))
        order = ("ratings_human", "annotation_priority", "created_at")
        facts = rows.values_list("pk", *order, "ratings_wanted", "others", "mine", "known")
        free = [
            _Free((ratings, -priority, at), pk, known)
            for pk, ratings, priority, at, wanted, others, mine, known in facts
            if mine is None and ratings + others < wanted
        ]
        if free or len(facts) < window.size:
            return free
    raise AssertionError("an index range has an end")


def decision_take(
    rater: str,
    within: DecisionFilter = EVERYTHING,
    skip: Collection[uuid.UUID | str] = (),
    after: Decision | None = None,
    ahead: Decision | None = None,
) -> Decision | None:
    """The next decision, leased to the rater for LEASE; None if the queue is empty.

    If other raters lease it at the same moment, takes the next one. `ahead` is the decision that the rater's page
    shows already; it is taken first if it is still waiting.
    """
    if ahead is not None and is_waiting(rater, ahead) and lease_take(rater, ahead.pk):
        return ahead
    passed = {str(pk) for pk in skip}
    while (decision := next_decision(rater, within, passed, after)) is not None:
        if lease_take(rater, decision.pk):
            return decision
        passed.add(str(decision.pk))
    return None


def lease_take(rater: str, decision: uuid.UUID) -> bool:
    """Lease a decision to a rater for LEASE. False if enough people have rated or leased it."""
    now = timezone.now()
    with transaction.atomic():
        # Serialises leases per decision: SQLite has one writer, PostgreSQL locks the row.
        row = Decision.objects.select_for_update(no_key=True).filter(pk=decision).order_by()
        standing = row.values_list("ratings_human", "ratings_wanted").first()
        others = Lease.objects.filter(decision=decision, until__gt=now).exclude(rater=rater).count()
        if standing is None or standing[0] + others >= standing[1]:
            return False
        Lease.objects.bulk_create(
            [Lease(decision_id=decision, rater=rater, until=now + LEASE)],
            update_conflicts=True,
            unique_fields=["decision", "rater"],
            update_fields=["until"],
        )
    return True


def lease_release(rater: str, decision: uuid.UUID) -> None:
    """Delete this rater's lease of a decision, and their expired leases."""
    mine = Lease.objects.filter(rater=rater)
    mine.filter(Q(decision=decision) | Q(until__lte=timezone.now())).delete()


def is_waiting(rater: str, decision: Decision) -> bool:
    return decisions_queued(rater).filter(pk=decision.pk).exists()


@dataclass(frozen=True)
class QueueProgress:
    today: int
    """Standing ratings by this rater since midnight (TIME_ZONE)."""
    left: int
    """Decisions in this rater's queue, including leased ones, counted up to COUNT_LIMIT."""
    any_decision: bool
    """True if the filtered agent (or any) has a decision."""

    @property
    def left_text(self) -> str:
        return f"{COUNT_LIMIT:,}+" if self.left >= COUNT_LIMIT else f"{self.left:,}"

    @property
    def total(self) -> int:
        return max(1, self.today + self.left)


def queue_progress(rater: str, within: DecisionFilter = EVERYTHING) -> QueueProgress:
    """Figures of the progress bar. Counts stop at COUNT_LIMIT to keep the page fast."""
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    left = 0
    for segment in queue_segments(within):
        for index_range in segment.ranges:
            wanted = COUNT_LIMIT - left
            # Sorted even for a count, so that the database reads along the index.
            if wanted:
                left += (
                    _unrated_count(rater, index_range, wanted)
                    if segment.rated
                    else queue_sort(index_range)[:wanted].count()
                )
    return QueueProgress(
        today=ratings_standing(within.agent or None)
        .filter(rater=rater, created_at__gte=midnight)
        .order_by()
        .count(),
        left=left,
        any_decision=left > 0 or DecisionFilter(agent=within.agent).decisions().exists(),
    )


def _unrated_count(rater: str, index_range: QuerySet[Decision], limit: int) -> int:
    """Decisions of an index range that this rater did not rate, counted up to `limit`."""
    left = 0
    for window in windows(index_range, limit):
        rows = Decision.objects.filter(pk__in=window.ids).order_by()
        looked = rows.aggregate(n=Count("pk"), left=Count("pk", filter=Q(IsNull(_mine(rater), True))))
        left += looked["left"]
        if left >= limit or looked["n"] < window.size:
            break
    return min(left, limit)


def rating_last(rater: str, decision: Decision) -> Rating | None:
    """A rater's newest rating of a decision, which may be a withdrawal."""
    return (
        Rating.objects.filter(rater=rater, decision=decision, superseded_by__isnull=True)
        .select_related("supersedes")
        .first()
    )
