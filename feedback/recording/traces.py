"""An agent's execution trace, as its collector sends it, becomes a trace and the decisions taken on the way."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from feedback.models import Decision, Trace
from feedback.services import row_write
from feedback.storage.agent_names import name_hashed
from feedback.storage.factories import body_hash, decision_build, identity_of
from feedback.storage.facts import DECISION, TRACE
from feedback.storage.fields import MaybeTime
from feedback.storage.sampling import is_collected
from feedback.storage.validation import Check, FeedbackRefused

DECISION_FACTS = (
    "id",
    *(field.name for field in DECISION if field.is_sent and not field.is_required),
)
"""Of a step of kind decision: what it may say beside messages and response, as a decision sent on its own."""


@dataclass(frozen=True)
class TraceWritten:
    """A trace that was accepted, and the decisions in it."""

    trace: Trace
    created: bool
    stored: bool
    """False: the collection rate leaves out every decision in it (or, without any, the trace itself)."""
    decisions: list[uuid.UUID]
    """Ids of the collected decisions, in the order of their steps."""


def trace_record(**facts: Any) -> TraceWritten:
    """Store a trace and its decisions, all or none.

    facts: fields of `TraceFacts`, of which agent and steps must be there; optionally id (UUID, makes a retry safe).
    steps: [{kind, name, at, duration_ms, ...}, ...], kind one of STEP_KINDS, anything else free JSON. A step of kind
    decision has messages and response, and may have the facts of a decision; without an id of its own it gets
    UUIDv5(trace, index), so that a retry makes the same one. A decision that was sent on its own before, with the same
    facts, is attached to the trace.

    Raises FeedbackRefused with a fault per field (of steps: steps[3].messages), FeedbackConflict.
    """
    check = Check()
    trace = _validate_trace(check, **facts)
    rows = _decisions(check, trace) if not check.fields else []
    check.raise_faults("trace")
    sampled_rows = [row for row in rows if is_collected(row.agent, row.pk)]
    if not sampled_rows and (rows or not is_collected(trace.agent, trace.pk)):
        return TraceWritten(trace, created=False, stored=False, decisions=[])
    with transaction.atomic():
        written = row_write(trace)
        if written.created:
            for row in sampled_rows:
                if not row_write(row).created:
                    Decision.objects.filter(pk=row.pk, trace=None).update(trace=trace)
    return TraceWritten(written.row, written.created, stored=True, decisions=[row.pk for row in sampled_rows])


def trace_build(*, created_at: datetime | None = None, **facts: Any) -> Trace:
    """A trace alone, as `trace_record` takes it, not yet stored: for a file whose decisions are rows of their own.

    Raises FeedbackRefused.
    """
    check = Check()
    trace = _validate_trace(check, **facts)
    at = check.value("created_at", MaybeTime, created_at)
    check.raise_faults("trace")
    trace.created_at = at or trace.created_at
    return trace


def _validate_trace(check: Check, *, id: uuid.UUID | str | None = None, **facts: Any) -> Trace:
    key = identity_of(id)
    values = TRACE.validate(check, facts)
    trace = Trace(id=key, **values)
    if values:
        trace.body_hash = body_hash({**TRACE.hash_values(values), "agent": name_hashed(trace.agent)})
    return trace


def _decisions(check: Check, trace: Trace) -> list[Decision]:
    rows: list[Decision] = []
    for index, step in enumerate(trace.steps):
        if step["kind"] != "decision":
            continue
        facts = {name: step[name] for name in DECISION_FACTS if step.get(name) is not None}
        facts.setdefault("id", uuid.uuid5(trace.pk, str(index)))
        facts.setdefault("run_id", trace.run_id)
        if step.get("duration_ms") is not None:
            facts.setdefault("latency_ms", step["duration_ms"])
        try:
            row = decision_build(
                agent=trace.agent,
                messages=step.get("messages"),
                response=step.get("response"),  # a missing one is refused, with its field
                trace=trace,
                created_at=step.get("at") or trace.started_at or timezone.now(),
                **facts,
            )
        except FeedbackRefused as refusal:
            check.fields |= {f"steps[{index}].{name}": fault for name, fault in refusal.fields.items()}
        else:
            rows.append(row)
    return rows
