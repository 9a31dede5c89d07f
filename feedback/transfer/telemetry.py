"""Spans and log records that apps export to `/v1/traces` and `/v1/logs`: stored as decisions, ratings and outcomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from uuid import UUID, uuid5

from django.db import DataError, transaction
from django.utils import timezone

from feedback.models import CallSpan, Decision, Trace
from feedback.recording.ingest import MAX_BULK, IngestResult, decisions_ingest, trace_build
from feedback.services import row_write
from feedback.storage.factories import body_hash
from feedback.storage.facts import DECISION, TRACE
from feedback.storage.masking import masker_of
from feedback.storage.responses import completion_stored
from feedback.storage.sampling import is_collected
from feedback.storage.sql import rows_in
from feedback.storage.validation import FeedbackConflict, FeedbackRefused
from feedback.transfer.formats.base import refers
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import slug
from feedback.transfer.formats.files import Tally
from feedback.transfer.formats.otlp import NAMESPACE, OTLP, call_events, otlp_records, silent_calls
from feedback.transfer.formats.records import ImportedDecision, ImportedTrace, Record, RowRefused
from feedback.transfer.import_ import records_write
from feedback.transfer.import_plans import DEFAULT_AGENT, Origin

REASONS = 5
"""Reasons named in an answer; the other refusals are counted."""


WAIT = timedelta(hours=1)
"""Time that a part of a model call waits for the others: a span without messages, log events of a prompt."""


@dataclass
class Exported:
    """Result of an export request."""

    decisions: int = 0
    """New ones."""
    rejected: int = 0
    reasons: list[str] = field(default_factory=list)

    def reject(self, key: str, reason: str) -> None:
        self.rejected += 1
        if len(self.reasons) < REASONS:
            self.reasons.append(f"{key or 'without an id'}: {reason}")

    @property
    def message(self) -> str:
        more = self.rejected - len(self.reasons)
        return "; ".join([*self.reasons, *([f"and {more} more"] if more else [])])


def export_store(row: JsonObject) -> Exported:
    """Store the decisions and traces of one export request and what it says of decisions; what cannot be stored is
    rejected.

    Spans of neither a model call nor an agent's run are accepted and kept nowhere.
    Raises RowError for what is no export request.
    """
    done = Exported()
    row, whole = _events_joined(row, done)
    records = list(otlp_records(row, 1))
    for record in records:
        if isinstance(record, RowRefused):
            done.reject(record.key, record.reason)
    decisions = [one for one in records if isinstance(one, ImportedDecision)]
    traces = [
        replace(one, agent=one.agent or DEFAULT_AGENT) for one in records if isinstance(one, ImportedTrace)
    ]
    _traces_store(traces, decisions, done)
    _decisions_store(decisions, done)
    _decisions_link(decisions, traces)
    _calls_complete(silent_calls(row, {(one.run_id, one.key) for one in decisions}), decisions)
    CallSpan.objects.filter(pk__in=whole).update(events=[])
    _feedback_store(list(filter(refers, records)), done)
    return done


def _traces_store(
    traces: Sequence[ImportedTrace], decisions: Sequence[ImportedDecision], done: Exported
) -> None:
    for one in traces:
        ids = [row.id for row in decisions if row.trace == one.id and row.id]
        # without a decision here the whole run is in the sample or not: its other pieces come to the same result
        if not any(is_collected(one.agent, pk) for pk in ids or [uuid5(NAMESPACE, one.run_id)]):
            continue
        try:
            row_write(trace_build(id=one.id, created_at=one.started_at, **TRACE.read(one)))
        except FeedbackConflict:
            continue  # erased, or sent again by an older version
        except FeedbackRefused as refusal:
            done.reject(one.key, str(refusal))


def _decisions_link(decisions: Sequence[ImportedDecision], traces: Sequence[ImportedTrace]) -> None:
    """Attach decisions to a piece of their trace, whichever came first."""
    runs = {one.run_id for one in decisions} | {one.run_id for one in traces}
    stored = Trace.objects.filter(run_id__in=runs - {""}).order_by("-created_at", "-id")
    pieces = {(trace.agent, trace.run_id): trace for trace in stored}
    for (agent, run_id), trace in pieces.items():
        Decision.objects.filter(agent=agent, run_id=run_id, trace=None).update(trace=trace)


def _calls_complete(
    spans: Mapping[UUID, Mapping[str, object]], decisions: Sequence[ImportedDecision]
) -> None:
    """Give decisions made from log events the model, tokens and latency of their spans, whichever came first."""
    kept = [CallSpan(pk=pk, facts=facts) for pk, facts in spans.items() if facts]
    CallSpan.objects.bulk_create(kept, update_conflicts=True, unique_fields=["id"], update_fields=["facts"])
    # both are written before either is read: of two requests at once, the later one finds the other's
    unnamed = [one.id for one in decisions if one.id and not one.policy]
    ids = {row.pk for row in kept} | set(unnamed)
    found = CallSpan.objects.in_bulk(ids) if ids else {}
    for row in rows_in(Decision.objects.filter(policy="", source=OTLP.name), "id", found) if found else ():
        told = found[row.pk].facts
        new = {name: value for name, value in told.items() if getattr(row, name) in (None, "")}
        if "policy" in new:
            values = DECISION.hash_values(DECISION.read(row) | new) | {"messages": row.prompt_hash}
            Decision.objects.filter(pk=row.pk, policy="").update(**new, body_hash=body_hash(values))


def _events_joined(row: JsonObject, done: Exported) -> tuple[JsonObject, list[UUID]]:
    """The request with the log events of its calls that came in earlier ones, and the calls that these made whole.

    An app exports each second, and an answer may take longer: its event comes in another request than the prompt's.
    Events that are no whole call yet wait for the others.
    """
    calls = call_events(row)
    waiting = CallSpan.objects.in_bulk(calls) if calls else {}
    earlier: list[object] = []
    whole: list[UUID] = []
    for pk, call in calls.items():
        known = waiting[pk].events if pk in waiting else []
        before = [event for part in known for event in part["scopeLogs"][0]["logRecords"]]
        if not before and call.is_whole:
            continue
        agent = slug(call.agent) or DEFAULT_AGENT
        if not is_collected(agent, pk):
            continue
        masker = masker_of(agent)
        fresh = [{**event, **masker.masked(_said_in(event))} for event in call.events]
        joined = replace(call, events=[*before, *(event for event in fresh if event not in before)])
        if joined.is_whole:
            earlier += known
            whole.append(pk)
            continue
        try:
            with transaction.atomic():
                CallSpan.objects.update_or_create(pk=pk, defaults={"events": [joined.as_resource()]})
        except DataError as error:
            done.reject(str(pk), f"its log events cannot be kept until the others come: {error}")
    joined_row = {**row, "resourceLogs": [*earlier, *row["resourceLogs"]]} if whole else row
    return joined_row, whole


def _said_in(event: JsonObject) -> dict[str, object]:
    """The parts of a log event that hold texts of people and models."""
    return {name: event[name] for name in ("body", "attributes") if name in event}


def spans_expire() -> None:
    """Forget parts of calls whose others did not come."""
    CallSpan.objects.filter(at__lt=timezone.now() - WAIT).delete()


def _decisions_store(decisions: Sequence[ImportedDecision], done: Exported) -> None:
    for at in range(0, len(decisions), MAX_BULK):
        chunk = decisions[at : at + MAX_BULK]
        for decision, found in zip(chunk, decisions_ingest(_facts(chunk), reserved=True), strict=True):
            if isinstance(found, IngestResult):
                done.decisions += found.created
            elif (
                found.code != "conflict"
            ):  # a conflict: its log events told it already, or the span came again
                done.reject(decision.key, str(found))


def _facts(decisions: Iterable[ImportedDecision]) -> list[dict[str, object]]:
    """The decisions as `decisions_ingest` takes them."""
    found = []
    for one in decisions:
        response, metadata = completion_stored(one.response, one.metadata)
        found.append(
            DECISION.read(one)
            | {"id": one.id, "created_at": one.created_at, "agent": one.agent or DEFAULT_AGENT}
            | {"response": response, "metadata": metadata, "source": OTLP.name}
        )
    return found


def _feedback_store(records: list[Record], done: Exported) -> None:
    if not records:
        return
    report = records_write(records, Origin(OTLP.name, None, None), Tally()).report
    for refused in report.refused:
        done.reject(refused.key, refused.reason)
