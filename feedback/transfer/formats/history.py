"""Rows of everything that was ever said, as our own format writes them: ids and times as texts, JSON as its text."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

from feedback.storage.bodies import Body
from feedback.storage.facts import COMPARISON, OUTCOME, RATING

JSON_COLUMNS = frozenset({"messages", "state", "candidates", "tags", "metadata", "steps"})
"""Columns that come as the JSON text they are stored as: it is written on without being understood."""

TIME_COLUMNS = frozenset({"created_at", "at", "started_at", "finished_at"})
"""Columns of times: ISO 8601 in UTC with microseconds."""


def row_of(body: Body, *before: str, after: Sequence[str]) -> Any:
    """A tuple of the columns of a declared body, between other columns."""
    return namedtuple("row_of", (*before, *body.names, *after))  # its names are data


class DecisionRow(NamedTuple):
    """A decision, its JSON columns as text."""

    id: str
    agent: str
    messages: str
    response: str
    state: str | None
    candidates: str | None
    policy: str
    unit: str
    arm: str
    propensity: float | None
    run_id: str
    latency_ms: float | None
    tokens_in: int | None
    tokens_out: int | None
    tags: str
    metadata: str
    source: str
    trace_id: str | None
    created_at: str


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


class TraceRow(NamedTuple):
    """A trace, its JSON columns as text."""

    id: str
    agent: str
    run_id: str
    steps: str
    metadata: str
    started_at: str | None
    finished_at: str | None
    created_at: str


class DecisionText(NamedTuple):
    """A decision with all that was said of it, as the text of a line of our own format."""

    text: bytes


class DecisionTold(NamedTuple):
    """A decision with every rating ever given, each after the one it supersedes, and its outcomes."""

    decision: DecisionRow
    ratings: Sequence[RatingRow]
    outcomes: Sequence[OutcomeRow]
