"""Rows as the API shows them: their declared fields (`feedback.storage.facts`) and what the database adds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from feedback.models import Comparison, Decision, Outcome, Rating, Trace
from feedback.storage.factories import decision_build
from feedback.storage.facts import COMPARISON, OUTCOME, RATING

Shown = dict[str, Any]


def _time(value: datetime | None) -> str | None:
    return None if value is None else value.isoformat()


def decision_shown(row: Decision) -> Shown:
    return {
        "id": str(row.pk),
        "agent": row.agent,
        "messages": row.messages,
        "response": row.response,
        "state": row.state,
        "candidates": row.candidates,
        "policy": row.policy,
        "unit": row.unit,
        "arm": row.arm,
        "propensity": row.propensity,
        "run_id": row.run_id,
        "latency_ms": row.latency_ms,
        "tokens_in": row.tokens_in,
        "tokens_out": row.tokens_out,
        "tags": row.tags,
        "metadata": row.metadata,
        "source": row.source,
        "prompt_hash": row.prompt_hash,
        "trace": str(row.trace_id) if row.trace_id else None,
        "ratings_human": row.ratings_human,
        "withdrawal": row.withdrawal_id,
        "created_at": _time(row.created_at),
    }


def decision_as_shown(facts: Mapping[str, Any]) -> Shown:
    """A decision that is on its way into the database, as it will be shown."""
    return decision_shown(decision_build(**facts, reserved=True))


def rating_shown(row: Rating) -> Shown:
    return {
        "id": str(row.pk),
        "decision": str(row.decision_id),
        **RATING.shown(row),
        "supersedes": str(row.supersedes_id) if row.supersedes_id else None,
        "created_at": _time(row.created_at),
    }


def comparison_shown(row: Comparison) -> Shown:
    return {
        "id": str(row.pk),
        "left": str(row.left_id),
        "right": str(row.right_id),
        **COMPARISON.shown(row),
        "supersedes": str(row.supersedes_id) if row.supersedes_id else None,
        "created_at": _time(row.created_at),
    }


def outcome_shown(row: Outcome) -> Shown:
    return {
        "id": str(row.pk),
        "decision": str(row.decision_id),
        **OUTCOME.shown(row),
        "created_at": _time(row.created_at),
    }


def trace_shown(row: Trace) -> Shown:
    return {
        "id": str(row.pk),
        "agent": row.agent,
        "run_id": row.run_id,
        "steps": len(row.steps),
        "started_at": _time(row.started_at),
        "finished_at": _time(row.finished_at),
        "created_at": _time(row.created_at),
    }
