"""Rows of feedback as plain tuples of texts, read piece by piece, and decisions with everything said of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from django.db import connection
from django.db.models import F, Func, QuerySet, TextField
from django.db.models.functions import Cast

from feedback.models import Decision, Outcome, Rating
from feedback.storage.sql import rows_in
from feedback.transfer.formats.writers import (
    JSON_COLUMNS,
    TIME_COLUMNS,
    ComparisonRow,
    DecisionExport,
    DecisionRow,
    OutcomeRow,
    RatingRow,
)

CHUNK = {"postgresql": 2000, "sqlite": 450}
"""Decisions held in memory at once, each with all that was said of it; SQLite takes 999 ids in one statement, two of
each pair."""


FETCH = 2000
"""Rows fetched from the database at once."""


Row = TypeVar("Row", bound=NamedTuple)


def rows_of(queryset: QuerySet[Any], kind: type[Row], *, stream: bool = True) -> Iterator[Row]:
    """The columns as plain tuples: JSON, ids and times as texts. stream: through a cursor of the server's."""
    columns = [_column(name) for name in kind._fields]
    found = queryset.values_list(*columns)
    rows: Iterable[tuple[Any, ...]] = found.iterator(chunk_size=FETCH) if stream else found
    if connection.vendor != "postgresql":
        rows = (tuple(map(_text, values)) for values in rows)
    return map(kind._make, rows)


def _column(name: str) -> Any:
    """A column as its text where it is JSON, and where PostgreSQL writes one in less time than Python makes a value."""
    if name in JSON_COLUMNS:
        return Cast(name, TextField())
    if connection.vendor == "postgresql" and name in TIME_COLUMNS:
        return Func(F(name), template=_ISO, output_field=TextField())
    if connection.vendor == "postgresql" and (name == "id" or name.endswith("_id")):
        return Cast(name, TextField())
    return name


_ISO = "to_char(%(expressions)s AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"')"


def _text(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="microseconds")
    return str(value) if isinstance(value, uuid.UUID) else value


T = TypeVar("T")


def pieces(items: Iterable[T]) -> Iterator[list[T]]:
    iterator, size = iter(items), CHUNK[connection.vendor]
    while piece := list(islice(iterator, size)):
        yield piece


FeedbackRow = TypeVar("FeedbackRow", RatingRow, ComparisonRow)


def in_chains(rows: Sequence[FeedbackRow], begun: Callable[[FeedbackRow], bool]) -> Iterator[FeedbackRow]:
    """Rows in their order, but each after the one it supersedes: their times are what clients say."""
    successors = {row.supersedes_id: row for row in rows if row.supersedes_id}
    for row in rows:
        if begun(row):
            following: FeedbackRow | None = row
            while following is not None:
                yield following
                following = successors.get(following.id)


def with_feedback(rows: Sequence[DecisionRow]) -> list[DecisionExport]:
    """Decisions with everything said of them."""
    ids = [row.id for row in rows]
    ratings: dict[str, list[RatingRow]] = {}
    rating_rows = rows_in(Rating.objects.order_by("created_at", "id"), "decision_id", ids)
    for rating in rows_of(rating_rows, RatingRow, stream=False):
        ratings.setdefault(rating.decision_id, []).append(rating)
    outcomes: dict[str, list[OutcomeRow]] = {}
    measured = rows_in(Outcome.objects.order_by("created_at", "id"), "decision_id", ids)
    for outcome in rows_of(measured, OutcomeRow, stream=False):
        outcomes.setdefault(outcome.decision_id, []).append(outcome)
    return [
        DecisionExport(
            row, _chain_order(ratings[row.id]) if row.id in ratings else (), outcomes.get(row.id, ())
        )
        for row in rows
    ]


def _chain_order(ratings: list[RatingRow]) -> Sequence[RatingRow]:
    if len(ratings) == 1:
        return ratings
    return list(in_chains(ratings, lambda rating: rating.supersedes_id is None))


def only_standing(ratings: Sequence[RatingRow]) -> list[RatingRow]:
    superseded = {rating.supersedes_id for rating in ratings}
    return [rating for rating in ratings if not rating.withdrawn and rating.id not in superseded]


def decision_exports(ids: Iterable[str], *, said: bool) -> list[DecisionExport]:
    """Decisions with these ids; with what was said of them where that is asked for."""
    wanted = rows_in(Decision.objects.order_by(), "id", list(dict.fromkeys(ids)))
    rows = list(rows_of(wanted, DecisionRow, stream=False))
    return with_feedback(rows) if said else [DecisionExport(row, (), ()) for row in rows]
