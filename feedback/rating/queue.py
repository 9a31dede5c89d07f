"""Queue of decisions to be rated: the next one, its lease, and the progress of the queue."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from django.db import transaction
from django.db.models import Count, Exists, F, IntegerField, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.db.models.lookups import IsNull
from django.utils import timezone

from feedback.explorer.search import DecisionFilter, one_of
from feedback.models import Decision, Lease, Rating
from feedback.rating.queue_order import awaiting_ratings, queue_segments, queue_sort, windows
from feedback.rating.requests import decision_requested
from feedback.selectors import ratings_standing

COUNT_LIMIT = 2_000
"""The queue is counted up to here; beyond it a page says "more than"."""

SAME_PROMPT_RUN = 12
"""Responses to one prompt shown in a row, before another prompt gets its turn."""

SAME_PROMPT_LOOK = 500
"""Waiting responses to one prompt among which the next is chosen."""

NEW_PROMPT_LOOK = 50
"""Decisions of equal rank among which one on a prompt nobody rated is preferred."""

LEASE = timedelta(minutes=10)
"""Time for which a decision shown to a rater is reserved."""

EVERYTHING = DecisionFilter()


def decisions_queued(rater: str, within: DecisionFilter = EVERYTHING) -> QuerySet[Decision]:
    """Decisions this rater has no standing rating on, and which people have not rated as often as wanted.

    Simulated ratings do not count: they stand in for people who have not rated yet, and take no work off them.
    """
    # nobody rated it, so this rater did not either: the look at the ratings is saved for most of a long queue
    return awaiting_ratings(within.decisions()).filter(Q(ratings_human=0) | Q(IsNull(_mine(rater), True)))


def _mine(rater: str) -> Subquery:
    """This rater's earlier rating of a decision, or NULL."""
    return one_of(ratings_standing(of_withdrawn=True).filter(decision=OuterRef("pk"), rater=rater).order_by())


def _lease_count(rater: str) -> Coalesce:
    """Number of other raters who hold a lease on a decision."""
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
    """The decision to show next, or None when there is none. The same state of the data gives the same answer.

    First what somebody asked for (`feedback.rating.requests`). Then the other responses to the prompt rated last: a
    policy learns from which of two responses to one prompt was liked better, so a rater who sees them one after another
    makes pairs at once, reads each prompt once, and judges with the same eyes. After SAME_PROMPT_RUN in a row, or when
    there are none left: the decision with the fewest ratings; of those the one of highest annotation priority
    (`feedback.storage.annotation_priority`); of those one on a prompt that nobody rated; of those the oldest.

    skip: ids skipped in this session. after: the decision leased to the rater, as if it were rated.
    """
    skip_ids = [*skip, after.pk] if after is not None else list(skip)
    if (asked := decision_requested(rater, within.decisions(), skip_ids)) is not None:
        return Decision.objects.get(pk=asked)
    # straight from the index: whether each of them still stands would cost a look at its successor
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
        # sorted here: asked to sort, SQLite walks the whole queue in the order of its index to find one prompt
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
    """The first in order; among equals in ratings and priority, one on a prompt nobody rated."""
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
    """A decision that may be shown to a rater."""

    place: tuple[int, float, datetime]
    """Sort key in the queue: ratings, priority with the sign changed, time."""
    pk: uuid.UUID
    known: bool
    """True if anybody rated a response to its prompt."""


def _free(rater: str, index_range: QuerySet[Decision]) -> list[_Free]:
    """The first decisions of an index range that may be shown to this rater, in no particular order; may be none.

    Read some at a time and checked then: in one statement PostgreSQL guesses that hardly any is free and
    reads the whole queue, to sort it.
    """
    siblings = Decision.objects.filter(
        agent=OuterRef("agent"), prompt_hash=OuterRef("prompt_hash"), ratings_human__gt=0
    ).order_by()
    for window in windows(index_range):
        rows = Decision.objects.filter(pk__in=window.ids).order_by()
        rows = rows.annotate(others=_lease_count(rater), mine=_mine(rater), known=Exists(siblings))
        facts = rows.values_list(
            "pk",
            "ratings_human",
            "annotation_priority",
            "created_at",
            "ratings_wanted",
            "others",
            "mine",
            "known",
        )
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
    """The next decision, leased to the rater: nobody else is shown it for LEASE, unless more ratings are wanted.

    Where another rater takes the same one at the same moment, the next after it. ahead: the decision that the rater
    sees already, which comes first if it still waits.
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
    """Lease a decision to a rater for LEASE from now. False where as many as are wanted have rated or leased it."""
    now = timezone.now()
    with transaction.atomic():
        # one at a time per decision: SQLite has one writer anyhow, PostgreSQL waits for this row
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
    """Release a decision that was rated or skipped, and this rater's expired leases."""
    mine = Lease.objects.filter(rater=rater)
    mine.filter(Q(decision=decision) | Q(until__lte=timezone.now())).delete()


def is_waiting(rater: str, decision: Decision) -> bool:
    """True if a decision is still in this rater's queue."""
    return decisions_queued(rater).filter(pk=decision.pk).exists()


@dataclass(frozen=True)
class QueueProgress:
    """Progress of one rater."""

    today: int
    """Decisions this rater rated since midnight (TIME_ZONE), withdrawn ones not counted."""
    left: int
    """Decisions in this rater's queue, counted up to COUNT_LIMIT; those leased to others too."""
    any_decision: bool
    """True if anything was ever recorded (of the agent asked for)."""

    @property
    def left_text(self) -> str:
        return f"{COUNT_LIMIT:,}+" if self.left >= COUNT_LIMIT else f"{self.left:,}"

    @property
    def total(self) -> int:
        return max(1, self.today + self.left)


def queue_progress(rater: str, within: DecisionFilter = EVERYTHING) -> QueueProgress:
    """Figures of the progress bar; the counts are bounded, so that the page stays quick with a long queue."""
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    left = 0
    for segment in queue_segments(within):
        for index_range in segment.ranges:
            wanted = COUNT_LIMIT - left
            # in order, though it is only counted: along the index
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
    """Rated decisions of an index range that this rater did not rate, counted up to a limit."""
    left = 0
    for window in windows(index_range, limit):
        rows = Decision.objects.filter(pk__in=window.ids).order_by()
        looked = rows.aggregate(n=Count("pk"), left=Count("pk", filter=Q(IsNull(_mine(rater), True))))
        left += looked["left"]
        if left >= limit or looked["n"] < window.size:
            break
    return min(left, limit)


def rating_last(rater: str, decision: Decision) -> Rating | None:
    """The newest rating of a decision by a rater, also where it is a withdrawal."""
    return (
        Rating.objects.filter(rater=rater, decision=decision, superseded_by__isnull=True)
        .select_related("supersedes")
        .first()
    )
