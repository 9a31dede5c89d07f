"""Decisions and traces as apps send them: sampled by the agent's collection rate, alone or by the thousand."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from backend import limits
from feedback.models import Decision, Rating, Trace
from feedback.services import WriteResult, is_unrecorded, rating_submit, row_write
from feedback.storage.factories import body_hash, decision_build, identity_of
from feedback.storage.facts import DECISION, TRACE
from feedback.storage.fields import MaybeTime, Notes, SaidText, Share
from feedback.storage.masking import TRACE_TEXTS, facts_masked
from feedback.storage.sampling import is_collected
from feedback.storage.sql import rows_in, rows_insert
from feedback.storage.tombstones import decisions_erased, erased_refusal
from feedback.storage.validation import Check, FeedbackConflict, FeedbackRefused

MAX_BULK = limits.BULK_DECISIONS
"""Decisions taken in one request."""


@dataclass(frozen=True)
class IngestResult:
    """A decision that was accepted."""

    row: Decision
    created: bool
    """False: the same write had arrived before, or it is left out."""
    stored: bool
    """False: the agent's collection rate leaves it out, now and whenever it is sent again."""


def decision_ingest(**facts: Any) -> IngestResult:
    """Record one decision, if the agent's sampling keeps it; facts and refusals as of `decision_record`."""
    row = decision_build(**facts)
    if not is_collected(row.agent, row.pk):
        return _unsampled_result(row, _body_hashes([row.pk]).get(row.pk))
    written = row_write(row)
    return IngestResult(written.row, written.created, stored=True)


def decisions_ingest(
    items: Sequence[Mapping[str, Any]], *, likely_new: bool = False, reserved: bool = False
) -> list[IngestResult | FeedbackRefused]:
    """Record many decisions, each on its own: a result or a refusal per item, in their order.

    Of one id sent twice in a list the first stands, as if they had come one after the other. likely_new: the ids were
    made just now, so they are looked up only where the database refuses one. reserved: Ratchet served these decisions,
    so their metadata may hold the keys that only Ratchet writes.
    """
    results: list[Decision | FeedbackRefused] = []
    for item in items:
        try:
            results.append(decision_build(**item, reserved=reserved))
        except FeedbackRefused as refusal:
            results.append(refusal)
    rows = [row for row in results if isinstance(row, Decision)]
    # an id of ours is new; one that was sent may have been sent before
    sent = [
        row.pk
        for row, item in zip(results, items, strict=True)
        if isinstance(row, Decision) and item.get("id") and not likely_new
    ]
    hashes = _body_hashes(sent)
    sample = {row.pk for row in rows if is_collected(row.agent, row.pk)}
    first: dict[uuid.UUID, Decision] = {}
    for row in rows:
        first.setdefault(row.pk, row)
    erasures = decisions_erased([row for pk, row in first.items() if pk in sample and pk not in hashes])
    new = [row for pk, row in first.items() if pk in sample and pk not in hashes and pk not in erasures]
    try:
        with transaction.atomic():
            rows_insert(new)
        new_ids = {row.pk for row in new}
    except IntegrityError:
        # somebody sent one of these ids at the same moment: each on its own, then
        new_ids = set()
        for row in new:
            try:
                if row_write(row).created:
                    new_ids.add(row.pk)
            except FeedbackConflict:
                pass  # found again below, as a hash that differs
        hashes |= _body_hashes([pk for pk in first if pk not in new_ids and pk in sample])
    return [
        row
        if isinstance(row, FeedbackRefused)
        else erased_refusal("decision", row.pk)
        if row.pk in erasures
        else _result(row, first, hashes, new_ids, sample)
        for row in results
    ]


def _result(
    row: Decision,
    first: Mapping[uuid.UUID, Decision],
    before: Mapping[uuid.UUID, str],
    created: set[uuid.UUID],
    kept: set[uuid.UUID],
) -> IngestResult | FeedbackRefused:
    try:
        if row.pk not in kept:
            return _unsampled_result(row, before.get(row.pk))
        is_unrecorded(row, before.get(row.pk) or first[row.pk].body_hash)
    except FeedbackConflict as clash:
        return clash
    return IngestResult(row, row is first[row.pk] and row.pk in created, stored=True)


def _unsampled_result(row: Decision, before: str | None) -> IngestResult:
    """Result for a decision that sampling leaves out; it may be stored from a time with a higher rate."""
    return IngestResult(row, created=False, stored=not is_unrecorded(row, before))


def _body_hashes(ids: Sequence[uuid.UUID]) -> dict[uuid.UUID, str]:
    """The body hashes of the decisions that are stored under these ids."""
    if not ids:
        return {}
    return dict(rows_in(Decision.objects.order_by(), "id", ids).values_list("pk", "body_hash"))


def scored_response_record(
    *,
    agent: str,
    prompt: str,
    response: str,
    score: float,
    rater: str,
    id: uuid.UUID | str | None = None,
    run_id: str = "",
    notes: str = "",
) -> WriteResult[Rating]:
    """Record a response together with a score in [0, 1], for an app that has both at once. Returns the rating.

    A decision that was recorded with the same prompt, response and run_id is the one that is rated; otherwise one is
    made, with source `feedback`. The collection rate does not apply: somebody rated it. id: that of the rating.
    Raises FeedbackRefused with a fault per field, FeedbackConflict.
    """
    check = Check()
    for name, kind, value in (("prompt", SaidText, prompt), ("score", Share, score), ("notes", Notes, notes)):
        check.value(name, kind, value)
    check.raise_faults("feedback")
    key = identity_of(id)
    row = decision_build(
        id=uuid.uuid5(key, "decision"),
        agent=agent,
        messages=prompt,
        response=response,
        run_id=run_id,
        source="feedback",
    )
    recorded = Decision.objects.filter(
        agent=row.agent, prompt_hash=row.prompt_hash, run_id=row.run_id, response=row.response
    ).exclude(source="feedback")
    with transaction.atomic():
        found = recorded.first() if run_id else None
        subject = found or row_write(row).row
        return rating_submit(decision=subject, rater=rater, id=key, score=score, notes=notes)


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


def _validate_trace(check: Check, *, id: uuid.UUID | str | None = None, **facts: object) -> Trace:
    key = identity_of(id)
    values = TRACE.validate(check, facts_masked(facts, *TRACE_TEXTS))
    trace = Trace(id=key, **values)
    if values:
        trace.body_hash = body_hash(TRACE.hash_values(values))
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
