"""Order of the rating queue, and the index ranges it is read from: each of them is sorted by one index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from django.db import connection
from django.db.models import F, Q, QuerySet
from django.db.models.fields.json import KT
from django.db.models.lookups import Exact, IsNull

from feedback.explorer.search import DecisionFilter
from feedback.models import Decision
from feedback.selectors import tag_condition

WINDOW = 100
"""Decisions of an index range read at first; later windows are larger."""
WINDOW_GROWS, WINDOW_MOST = 8, 5_000

TAG_RANGES = 3
"""Tags of a decision, the first ones, for which the queue has an index each (migration 0008_queue_lanes)."""
FURTHER_MOST = 100_000
"""Decisions in which a further tag is looked for."""


class QueueSegment(NamedTuple):
    """A segment of the queue; earlier segments come before later ones."""

    rated: bool
    """True if somebody rated its decisions already."""
    ranges: list[QuerySet[Decision]]
    """Index ranges that are disjoint and together hold the segment."""


def awaiting_ratings(decisions: QuerySet[Decision]) -> QuerySet[Decision]:
    """Decisions that people have not rated as often as wanted; the condition is that of the queue's
    indexes."""
    return decisions.filter(ratings_human__lt=F("ratings_wanted"))


def queue_sort(queued: QuerySet[Decision]) -> QuerySet[Decision]:
    """In the order of the queue's indexes."""
    return queued.order_by("ratings_human", "-annotation_priority", "created_at", "id")


def queue_segments(within: DecisionFilter) -> Iterator[QueueSegment]:
    """Segments of the queue that all raters share.

    With a filter by days, decisions without annotation priority, often most of a queue, are a segment of their own: it
    is in the order of time, so that the index finds the days at once.
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
    """`tagged` as conditions of which each is met along an index of the queue, no two of them by one decision."""
    if connection.vendor != "postgresql":
        return [tag_condition(tag)]
    places = [KT(f"tags__{place}") for place in range(TAG_RANGES + 1)]
    first = [Q(Exact(place, tag)) for place in places[:TAG_RANGES]]
    many = awaiting_ratings(Decision.objects.order_by()).filter(
        tag_condition(tag), IsNull(places[TAG_RANGES], False)
    )
    # with a limit, and so found on its own: PostgreSQL would walk the whole queue for it
    further = Q(pk__in=many.values("pk")[:FURTHER_MOST])
    for condition in first:
        further &= ~condition
    return [*first, further]


class Window(NamedTuple):
    """Part of an index range."""

    ids: QuerySet[Decision, Any]
    size: int
    """Number of rows at most."""


def windows(index_range: QuerySet[Decision], first: int = WINDOW) -> Iterator[Window]:
    """An index range from its beginning on, some ids at a time; it does not end by itself."""
    ids = queue_sort(index_range).values("pk")
    at, size = 0, first
    while True:
        yield Window(ids[at : at + size], size)
        at, size = at + size, min(size * WINDOW_GROWS, WINDOW_MOST)
