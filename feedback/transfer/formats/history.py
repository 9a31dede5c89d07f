"""Rows of everything that was ever said, as our own format writes them: ids and times as texts, JSON as its text."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

from feedback.storage.bodies import Body
from feedback.storage.facts import BODIES, COMPARISON, DECISION, OUTCOME, RATING, TRACE
from feedback.storage.field_types import Time

JSON_COLUMNS = frozenset(field.name for body in BODIES for field in body if field.type.is_json)
"""Columns that come as the JSON text they are stored as: it is written on without being understood."""

TIME_COLUMNS = frozenset(
    {"created_at", *(field.name for body in BODIES for field in body if isinstance(field.type, Time))}
)
"""Columns of times: ISO 8601 in UTC with microseconds."""


def row_of(body: Body, *before: str, after: Sequence[str]) -> Any:
    """A tuple of the columns of a declared body, between other columns."""
    return namedtuple("row_of", (*before, *body.names, *after))  # its names are data


class DecisionRow(row_of(DECISION, "id", after=("trace_id", "created_at"))):  # type: ignore[misc]
    """A decision, its JSON columns as text."""

    __slots__ = ()


class RatingRow(
    row_of(RATING, "id", after=("withdrawn", "created_at", "decision_id", "supersedes_id"))  # type: ignore[misc]
):
    """A rating, superseded or not; its tags as text."""

    __slots__ = ()


class OutcomeRow(row_of(OUTCOME, "id", after=("created_at", "decision_id"))):  # type: ignore[misc]
    """A measured fact about a decision."""

    __slots__ = ()


class ComparisonRow(
    row_of(COMPARISON, "id", "left_id", "right_id", after=("withdrawn", "created_at", "supersedes_id"))  # type: ignore[misc]
):
    """A comparison, superseded or not; its tags as text."""

    __slots__ = ()


class TraceRow(row_of(TRACE, "id", after=("created_at",))):  # type: ignore[misc]
    """A trace, its JSON columns as text."""

    __slots__ = ()


class DecisionText(NamedTuple):
    """A decision with all that was said of it, as the text of a line of our own format."""

    text: bytes


class DecisionExport(NamedTuple):
    """A decision with every rating ever given, each after the one it supersedes, and its outcomes."""

    decision: DecisionRow
    ratings: Sequence[RatingRow]
    outcomes: Sequence[OutcomeRow]
