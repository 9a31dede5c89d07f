"""Rows as the API shows them: their declared fields (`feedback.storage.facts`) and what the database adds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.storage.factories import decision_build
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, TRACE

Representation = dict[str, Any]


def _time(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat()


def decision_represent(row: Decision) -> Representation:
    return {
        "id": str(row.pk),
        **DECISION.represent(row),
        "prompt_hash": row.prompt_hash,
        "trace": str(row.trace_id) if row.trace_id else None,
        "ratings_human": row.ratings_human,
        "withdrawal": row.withdrawal_id,
        "created_at": _time(row.created_at),
    }


def pending_decision_represent(facts: Mapping[str, Any]) -> Representation:
    """A decision that is on its way into the database, as it will be shown."""
    return decision_represent(decision_build(**facts, reserved=True))


def rating_represent(row: Rating) -> Representation:
    return {
        "id": str(row.pk),
        "decision": str(row.decision_id),
        **RATING.represent(row),
        "supersedes": str(row.supersedes_id) if row.supersedes_id else None,
        "created_at": _time(row.created_at),
    }


def comparison_represent(row: Comparison) -> Representation:
    return {
        "id": str(row.pk),
        "left": str(row.left_id),
        "right": str(row.right_id),
        **COMPARISON.represent(row),
        "supersedes": str(row.supersedes_id) if row.supersedes_id else None,
        "created_at": _time(row.created_at),
    }


def outcome_represent(row: Outcome) -> Representation:
    return {
        "id": str(row.pk),
        "decision": str(row.decision_id),
        **OUTCOME.represent(row),
        "created_at": _time(row.created_at),
    }


def trace_represent(row: Trace) -> Representation:
    facts = TRACE.represent(row)
    del facts["metadata"]
    return {"id": str(row.pk), **facts, "steps": len(row.steps), "created_at": _time(row.created_at)}
