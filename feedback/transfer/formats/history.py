"""Rows of everything that was ever said, as our own format writes them: ids and times as texts, JSON as its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

JSON_COLUMNS = frozenset({"messages", "state", "candidates", "tags", "metadata", "steps"})
"""Columns that come as the JSON text they are stored as: it is written on without being understood."""

TIME_COLUMNS = frozenset({"created_at", "at", "started_at", "finished_at"})
"""Columns of times: ISO 8601 in UTC with microseconds."""


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


class RatingRow(NamedTuple):
    """A rating, superseded or not; its tags as text."""

    id: str
    rater: str
    rater_kind: str
    thumb: str
    stars: int | None
    score: float | None
    correction: str | None
    tags: str
    notes: str
    withdrawn: bool
    created_at: str
    decision_id: str
    supersedes_id: str | None


class OutcomeRow(NamedTuple):
    id: str
    name: str
    value: float
    at: str
    created_at: str
    decision_id: str


class ComparisonRow(NamedTuple):
    """A comparison, superseded or not; its tags as text."""

    id: str
    left_id: str
    right_id: str
    preference: str
    rater: str
    rater_kind: str
    tags: str
    notes: str
    withdrawn: bool
    created_at: str
    supersedes_id: str | None


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
