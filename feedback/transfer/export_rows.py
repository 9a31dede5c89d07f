"""Rows of feedback as plain tuples of texts, read piece by piece, and decisions with everything said of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from django.db import connection, models
from django.db.models import F, Field, Func, Model, QuerySet, TextField
from django.db.models.functions import Cast

from feedback.models import Decision, Outcome, Rating
from feedback.storage.sql import rows_in
from feedback.transfer.formats.writers import (
    JSON_COLUMNS,
    TIME_COLUMNS,
    ComparisonRow,
    DecisionExport,
    DecisionRow,
    DecisionText,
    OutcomeRow,
    RatingRow,
)

CHUNK = {"postgresql": 2000, "sqlite": 450}
"""Decisions held in memory at once, each with all that was said of it; SQLite takes 999 ids in one statement, two of
each pair."""


FETCH = 2000
"""Rows fetched from the database at once."""


Row = TypeVar("Row", bound=NamedTuple)


def rows_of(queryset: QuerySet[Model], kind: type[Row], *, stream: bool = True) -> Iterator[Row]:
    """The columns as plain tuples: JSON, ids and times as texts. stream: through a cursor of the server's."""
    columns = [_column(name) for name in kind._fields]
    found = queryset.values_list(*columns)
    rows: Iterable[tuple[object, ...]] = found.iterator(chunk_size=FETCH) if stream else found
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


def _text(value: object) -> object:
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


# --- Lines that PostgreSQL writes itself -------------------------------------------------------------------

SEPARATOR = "\x1e"
"""Stands between two texts of JSON, in which it is always escaped."""

NAMES = {"trace_id": "trace"}
"""Columns that a line calls otherwise."""


def decision_texts(agent: str | None) -> Iterator[DecisionText]:
    """Every decision, of one agent or of all, oldest first, with what was said of it. Inside a transaction."""
    chained = ("decision_id", "supersedes_id")
    rating = _sql_object(Rating, [name for name in RatingRow._fields if name not in chained], "t", "{", "}")
    outcome = _sql_object(
        Outcome, [name for name in OutcomeRow._fields if name != "decision_id"], "t", "{", "}"
    )
    decision = _sql_object(Decision, DecisionRow._fields, "d", '{"type":"decision",', "")
    # what supersedes what is told beside: a chain has to stand in its own order, whatever its times
    words = f"""SELECT string_agg({rating}, E'{SEPARATOR}' ORDER BY t.created_at, t.id)
        || coalesce(E'{SEPARATOR}{SEPARATOR}' || string_agg(t.id || ' ' || t.supersedes_id, ' '), '')
        FROM feedback_rating t WHERE t.decision_id = d.id"""  # noqa: S608  # our own names
    measured = f"""SELECT string_agg({outcome}, ',' ORDER BY t.created_at, t.id)
        FROM feedback_outcome t WHERE t.decision_id = d.id"""  # noqa: S608
    # with no value at all the driver would leave the doubled % signs as they are
    where, value = ("%s", True) if agent is None else ("d.agent = %s", agent)
    sql = f"""COPY (SELECT {decision}, ({words}), ({measured}) FROM feedback_decision d WHERE {where}
        AND d.withdrawal_id IS NULL ORDER BY d.created_at, d.id) TO STDOUT (FORMAT binary)"""  # noqa: S608
    with connection.cursor() as cursor, cursor.copy(sql, [value]) as copy:
        # as bytes: nobody looks into them
        copy.set_types(["bytea", "bytea", "bytea"])
        for head, ratings, facts in copy.rows():
            ratings_text = _in_order(ratings) if ratings else b""
            yield DecisionText(
                b"".join((head, b',"ratings":[', ratings_text, b'],"outcomes":[', facts or b"", b"]}"))
            )


def _in_order(text: bytes) -> bytes:
    """Ratings in the order of their times, with what supersedes what, as ratings each after the one it supersedes."""
    between = SEPARATOR.encode()
    said, _, superseding = text.partition(between + between)
    if not superseding:
        return said.replace(between, b",")
    rows = {row[7:43]: row for row in said.split(between)}  # {"id":"<36 characters>"
    names = superseding.split(b" ")
    after = dict(zip(names[1::2], names[::2], strict=True))
    later = set(after.values())
    found: list[bytes] = []
    for pk in rows:
        following = None if pk in later else pk
        while following is not None:
            found.append(rows[following])
            following = after.get(following)
    return b",".join(found)


def _sql_object(model: type[Model], names: Sequence[str], alias: str, before: str, after: str) -> str:
    """SQL of a row as the text of a JSON object between two texts: one call of format() for all of it."""
    columns = {field.attname: field for field in model._meta.concrete_fields}
    keys = ",".join(f'"{NAMES.get(name, name)}":%%s' for name in names)
    values = ", ".join(_sql_value(columns[name], f"{alias}.{name}") for name in names)
    return f"format('{before}{keys}{after}', {values})"


def _sql_value(field: Field, column: str) -> str:
    """SQL of a column as the text of a JSON value."""
    if isinstance(field, (models.UUIDField, models.ForeignKey)):
        text = f"'\"' || {column} || '\"'"
    elif isinstance(field, models.DateTimeField):
        text = f"'\"' || to_char({column} AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US') || '+00:00\"'"
    elif isinstance(field, (models.CharField, models.TextField)):
        text = f"to_json({column})::text"
    else:
        text = f"{column}::text"  # JSON, numbers, truth
    return f"coalesce({text}, 'null')" if field.null else text
