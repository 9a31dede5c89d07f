"""Rows of everything that was ever said, as the database holds them: what our own format is written from."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

JSON_COLUMNS = frozenset({"messages", "state", "candidates", "tags", "metadata", "steps"})
"""Columns that come as the JSON text they are stored as: it is written on without being understood."""


class DecisionRow(NamedTuple):
    """A decision, its JSON columns as text."""

    id: uuid.UUID
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
    trace_id: uuid.UUID | None
    created_at: datetime


class RatingRow(NamedTuple):
    """A rating, superseded or not; its tags as text."""

    id: uuid.UUID
    rater: str
    rater_kind: str
    thumb: str
    stars: int | None
    score: float | None
    correction: str | None
    tags: str
    notes: str
    withdrawn: bool
    created_at: datetime
    decision_id: uuid.UUID
    supersedes_id: uuid.UUID | None


class OutcomeRow(NamedTuple):
    id: uuid.UUID
    name: str
    value: float
    at: datetime
    created_at: datetime
    decision_id: uuid.UUID


class ComparisonRow(NamedTuple):
    """A comparison, superseded or not; its tags as text."""

    id: uuid.UUID
    left_id: uuid.UUID
    right_id: uuid.UUID
    preference: str
    rater: str
    rater_kind: str
    tags: str
    notes: str
    withdrawn: bool
    created_at: datetime
    supersedes_id: uuid.UUID | None


class TraceRow(NamedTuple):
    """A trace, its JSON columns as text."""

    id: uuid.UUID
    agent: str
    run_id: str
    steps: str
    metadata: str
    started_at: datetime | None
    finished_at: datetime | None
    created_at: datetime


class DecisionTold(NamedTuple):
    """A decision with every rating ever given, each after the one it supersedes, and its outcomes."""

    decision: DecisionRow
    ratings: Sequence[RatingRow]
    outcomes: Sequence[OutcomeRow]
