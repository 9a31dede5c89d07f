"""Which decision a rater sees next, and how far the queue has come."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass

from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.utils import timezone

from feedback.models import Decision, Rating
from feedback.selectors import ratings_standing

COUNT_LIMIT = 10_000
"""The queue is counted up to here; beyond it a page says "more than"."""

SAME_PROMPT_RUN = 12
"""Responses to one prompt shown in a row, before another prompt gets its turn."""

SAME_PROMPT_LOOK = 500
"""Waiting responses to one prompt among which the next is chosen."""


def decisions_queued(rater: str, agent: str | None = None) -> QuerySet[Decision]:
    """Decisions this rater has no standing rating on, and which people have not rated as often as wanted.

    Simulated ratings do not count: they stand in for people who have not rated yet, and take no work off them.
    """
    mine = ratings_standing().filter(decision=OuterRef("pk"), rater=rater).order_by()
    # nobody rated it, so this rater did not either: the look at the ratings is saved for most of a long queue
    not_by_me = Q(ratings_human=0) | ~Exists(mine)
    queued = Decision.objects.filter(not_by_me, ratings_human__lt=F("ratings_wanted"))
    return queued if agent is None else queued.filter(agent=agent)


def next_decision(
    rater: str, agent: str | None = None, skip: Collection[uuid.UUID | str] = ()
) -> Decision | None:
    """The decision to show next, or None when the queue is empty. The same state of the data gives the same answer.

    First the other responses to the prompt rated last: a policy learns from which of two responses to one prompt
    was liked better, so a rater who sees them one after another makes pairs at once, reads each prompt once, and
    judges with the same eyes. After SAME_PROMPT_RUN in a row, or when there are none left: the decision with the
    fewest ratings, of those the oldest.

    skip: ids put aside in this session, passed over.
    """
    queued = decisions_queued(rater, agent).exclude(pk__in=list(skip))
    # in the order of the indexes `decision_queue` and `decision_queue_by_agent`
    ordered = queued.order_by("ratings_human", "created_at", "id")
    latest = list(
        ratings_standing()
        .filter(rater=rater)
        .order_by("-created_at", "-id")
        .values_list("decision__agent", "decision__prompt_hash")[:SAME_PROMPT_RUN]
    )
    if latest and agent in (None, latest[0][0]):
        slug, prompt = latest[0]
        if latest == [(slug, prompt)] * SAME_PROMPT_RUN:
            return ordered.exclude(agent=slug, prompt_hash=prompt).first() or ordered.first()
        # sorted here: asked to sort, SQLite walks the whole queue in the order of its index to find one prompt
        same = queued.filter(agent=slug, prompt_hash=prompt).order_by()
        found = same.values_list("ratings_human", "created_at", "pk")[:SAME_PROMPT_LOOK]
        if waiting := sorted(found):
            return Decision.objects.get(pk=waiting[0][2])
    return ordered.first()


@dataclass(frozen=True)
class QueueProgress:
    """How far one rater has come."""

    today: int
    """Decisions this rater rated since midnight (TIME_ZONE), withdrawn ones not counted."""
    left: int
    """Decisions in this rater's queue, counted up to COUNT_LIMIT."""
    any_decision: bool
    """Whether anything was ever recorded (of the agent asked for)."""

    @property
    def left_text(self) -> str:
        return f"{COUNT_LIMIT:,}+" if self.left >= COUNT_LIMIT else f"{self.left:,}"

    @property
    def total(self) -> int:
        return max(1, self.today + self.left)


def queue_progress(rater: str, agent: str | None = None) -> QueueProgress:
    """Figures of the progress bar; the counts are bounded, so that the page stays quick with a long queue."""
    midnight = timezone.localtime().replace(hour=0, minute=0, second=0, microsecond=0)
    known = Decision.objects.all() if agent is None else Decision.objects.filter(agent=agent)
    return QueueProgress(
        today=ratings_standing(agent).filter(rater=rater, created_at__gte=midnight).order_by().count(),
        left=decisions_queued(rater, agent)[:COUNT_LIMIT].count(),
        any_decision=known.exists(),
    )


def rating_last(rater: str, decision: Decision) -> Rating | None:
    """The newest word of a rater on a decision, also where it was a withdrawal."""
    return (
        Rating.objects.filter(rater=rater, decision=decision, superseded_by__isnull=True)
        .select_related("supersedes")
        .first()
    )
