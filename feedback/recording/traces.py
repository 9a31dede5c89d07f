"""An agent's execution trace, as its collector sends it, becomes a trace and the decisions taken on the way."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from feedback.models import Decision, Trace
from feedback.services import row_write
from feedback.storage.agent_names import name_hashed
from feedback.storage.factories import body_hash, decision_build, identity_of
from feedback.storage.sampling import is_collected
from feedback.storage.validation import Check, FeedbackRefused

STEP_KINDS = ("step", "reasoning", "tool_call", "decision", "task")
DECISION_FACTS = (
    "id", "state", "candidates", "policy", "unit", "arm", "propensity", "run_id", "latency_ms", "tokens_in",
    "tokens_out", "tags", "metadata",
)  # fmt: skip
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


def trace_record(
    *,
    agent: str,
    steps: Sequence[Any],
    id: uuid.UUID | str | None = None,
    run_id: str = "",
    started_at: datetime | str | None = None,
    finished_at: datetime | str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> TraceWritten:
    """Store a trace and its decisions, all or none.

    steps: [{kind, name, at, duration_ms, ...}, ...], kind one of STEP_KINDS, anything else free JSON. A step of kind
    decision has messages and response, and may have the facts of a decision; without an id of its own it gets
    UUIDv5(trace, index), so that a retry makes the same one. A decision that was sent on its own before, with the same
    facts, is attached to the trace.

    Raises FeedbackRefused with a fault per field (of steps: steps[3].messages), FeedbackConflict.
    """
    check = Check()
    trace = _checked(
        check,
        id=id,
        agent=agent,
        run_id=run_id,
        steps=steps,
        metadata=metadata,
        started_at=started_at,
        finished_at=finished_at,
    )
    rows = _decisions(check, trace) if not check.fields else []
    check.done("trace")
    kept = [row for row in rows if is_collected(row.agent, row.pk)]
    if not kept and (rows or not is_collected(trace.agent, trace.pk)):
        return TraceWritten(trace, created=False, stored=False, decisions=[])
    with transaction.atomic():
        written = row_write(trace)
        if written.created:
            for row in kept:
                if not row_write(row).created:
                    Decision.objects.filter(pk=row.pk, trace=None).update(trace=trace)
    return TraceWritten(written.row, written.created, stored=True, decisions=[row.pk for row in kept])


def trace_build(*, created_at: datetime | None = None, **facts: Any) -> Trace:
    """A trace alone, as `trace_record` takes it, not yet stored: for a file whose decisions are rows of their own.

    Raises FeedbackRefused.
    """
    check = Check()
    trace = _checked(check, **facts)
    at = check.time("created_at", created_at)
    check.done("trace")
    trace.created_at = at or trace.created_at
    return trace


def _checked(
    check: Check,
    *,
    agent: str,
    steps: Sequence[Any],
    id: uuid.UUID | str | None = None,
    run_id: str = "",
    started_at: datetime | str | None = None,
    finished_at: datetime | str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Trace:
    trace = Trace(
        id=identity_of(id),
        agent=check.agent(agent),
        run_id=check.text("run_id", run_id, limit=200),
        steps=_steps(check, steps),
        metadata=check.mapping("metadata", metadata),
        started_at=check.time("started_at", started_at),
        finished_at=check.time("finished_at", finished_at),
    )
    names = ("agent", "run_id", "steps", "metadata", "started_at", "finished_at")
    if not check.fields:
        body = {name: getattr(trace, name) for name in names}
        trace.body_hash = body_hash({**body, "agent": name_hashed(trace.agent)})
    return trace


def _steps(check: Check, steps: Any) -> list[dict[str, Any]]:
    if not isinstance(steps, (list, tuple)):
        check.fields["steps"] = f"expected a list of steps, found {type(steps).__name__}"
        return []
    for index, step in enumerate(steps):
        where = f"steps[{index}]"
        if not isinstance(step, Mapping):
            check.fields[where] = f"expected an object, found {type(step).__name__}"
            continue
        check.choice(f"{where}.kind", step.get("kind"), STEP_KINDS)
        if step.get("name") is not None:
            check.text(f"{where}.name", step["name"], limit=1000)
        check.time(f"{where}.at", step.get("at"))
        check.number(f"{where}.duration_ms", step.get("duration_ms"), 0.0, 1e12)
    check.json("steps", list(steps))
    return list(steps)


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
