"""Erasure of one unit (a user or a session): its rows and every copy of their text.

Rows are deleted in one transaction, with tombstones that keep a replay or an import from recording them again.
`feedback.erasure.places` erases copies outside the feedback tables.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.module_loading import import_string

from feedback.cache import forget_all
from feedback.erasure.marks import Marks, marks_of
from feedback.erasure.places import (
    database_compact,
    files_and_spool_erase,
    places_erase,
    secure_delete,
    spool_erase,
)
from feedback.models import (
    Comparison,
    Decision,
    ImportBatch,
    Lease,
    Outcome,
    Rating,
    RatingRequest,
    Suggestion,
    Trace,
)
from feedback.storage.sql import chunks
from feedback.storage.tombstones import tombstones_announce, tombstones_make

KEPT_OF_STEP = ("kind", "name", "at", "n", "parent", "duration_ms")
"""Keys that an erased step keeps."""

SnapshotFinder = Callable[[Mapping[str, set[str]]], list[dict[str, Any]]]
"""{agent: prompt hashes} -> facts about each snapshot with one of these prompts."""


class UnitUnknown(ValueError):
    """Nothing is recorded of the unit."""


@dataclass
class ErasureReport:
    """What was removed of a unit, or with dry_run would be."""

    unit: str
    dry_run: bool
    decisions: int = 0
    ratings: int = 0
    comparisons: int = 0
    outcomes: int = 0
    traces: int = 0
    traces_emptied: int = 0
    """Traces with decisions of other units too: they stay, and the unit's steps lose their content."""
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    """Training snapshots with the unit's prompts, and what was trained on them. Weights are not erased."""
    places: dict[str, int] = field(default_factory=dict)
    """Place of a copy -> number of rows, records or files."""
    not_compacted: str = ""
    """Why the database's files may still hold removed rows; empty if they do not."""


def unit_forget(unit: str, *, dry_run: bool = False) -> ErasureReport:
    """Erase a unit's decisions, their feedback and every copy of their text; report what was trained on them.

    Files are erased at the end of the transaction. If that is interrupted the rows stay: run it again.
    Raises UnitUnknown if nothing is recorded of the unit.
    """
    if not unit:
        # Decisions without a unit have the empty one.
        raise UnitUnknown("expected a unit, found an empty text")
    report = ErasureReport(unit, dry_run)
    if not dry_run:
        tombstones_announce()
        secure_delete()
    with transaction.atomic():
        rows = list(Decision.objects.filter(unit=unit).values_list("pk", "agent", "prompt_hash"))
        ids = [pk for pk, _, _ in rows]
        traces = _traces(unit, ids)
        marks = marks_of(unit, ids, Trace.objects.filter(pk__in=traces))
        spooled = spool_erase(marks, dry_run=True)
        if not rows and not traces and not spooled:
            raise UnitUnknown(
                f"nothing is recorded for the unit {unit!r}; spell it exactly as the app sends it"
            )
        report.decisions = len(ids)
        report.snapshots = _snapshots(marks)
        if not dry_run:
            tombstones_make(ids, traces, unit)
        report.places = places_erase(marks, dry_run)
        _rows_erase(report, traces, set(ids))
        if refused := _refused_erase(marks, dry_run):
            report.places["refused rows of imports"] = refused
        # Before the commit: after a kill, the rows are still there to find the remaining files by.
        report.places |= files_and_spool_erase(marks, dry_run)
    if not dry_run:
        forget_all()
        report.not_compacted = database_compact()
    return report


def _snapshots(marks: Marks) -> list[dict[str, Any]]:
    if not settings.FEEDBACK_SNAPSHOTS_CONTAINING:
        return []
    find: SnapshotFinder = import_string(settings.FEEDBACK_SNAPSHOTS_CONTAINING)
    return find({agent: set(prompts) for agent, prompts in marks.prompts.items()})


def _rows_erase(done: ErasureReport, traces: Sequence[uuid.UUID], ids: set[uuid.UUID]) -> None:
    dry_run = done.dry_run
    for chunk in chunks(ids):
        done.comparisons += _remove(
            Comparison.objects.filter(Q(left__in=chunk) | Q(right__in=chunk)), dry_run
        )
        done.ratings += _remove(Rating.objects.filter(decision__in=chunk), dry_run)
        done.outcomes += _remove(Outcome.objects.filter(decision__in=chunk), dry_run)
        _remove(Lease.objects.filter(decision__in=chunk), dry_run)
        _remove(RatingRequest.objects.filter(decision__in=chunk), dry_run)
        _remove(Suggestion.objects.filter(decision__in=chunk), dry_run)
        if settings.FEEDBACK_FORGET and not dry_run:
            import_string(settings.FEEDBACK_FORGET)(chunk)
        _remove(Decision.objects.filter(pk__in=chunk), dry_run)
    # After the decisions: traces that still have some are shared with other units.
    shared = _shared_traces(traces, ids)
    for trace in Trace.objects.filter(pk__in=shared):
        if not dry_run:
            trace.steps = [
                _step_without_content(trace.pk, n, step, done.unit, ids) for n, step in enumerate(trace.steps)
            ]
            trace.metadata = {k: v for k, v in trace.metadata.items() if v != done.unit}
            trace.save(update_fields=["steps", "metadata"])
    done.traces_emptied = len(shared)
    for chunk in chunks([pk for pk in traces if pk not in shared]):
        done.traces += _remove(Trace.objects.filter(pk__in=chunk), dry_run)


def _traces(unit: str, ids: Sequence[uuid.UUID]) -> list[uuid.UUID]:
    """Traces with a decision of the unit, or with the unit in their metadata."""
    found = dict.fromkeys(Trace.objects.filter(metadata__unit=unit).values_list("pk", flat=True))
    for chunk in chunks(ids):
        of = Decision.objects.filter(pk__in=chunk, trace__isnull=False).order_by()
        found |= dict.fromkeys(of.values_list("trace_id", flat=True).distinct())
    return list(found)


def _shared_traces(traces: Sequence[uuid.UUID], ids: set[uuid.UUID]) -> set[uuid.UUID]:
    """The traces that also hold decisions of other units."""
    shared: set[uuid.UUID] = set()
    for chunk in chunks(traces):
        of = Decision.objects.filter(trace__in=chunk).order_by().values_list("trace_id", "pk")
        shared |= {trace for trace, pk in of if trace is not None and pk not in ids}
    return shared


def _step_without_content(
    trace: uuid.UUID, index: int, step: dict[str, Any], unit: str, ids: set[uuid.UUID]
) -> dict[str, Any]:
    """A step of a shared trace, without content if it is a decision of the unit."""
    if step["kind"] != "decision":
        return step
    own = uuid.UUID(step["id"]) if step.get("id") else uuid.uuid5(trace, str(index))
    if own not in ids and step.get("unit") != unit:
        return step
    remainder: dict[str, Any] = {name: step[name] for name in KEPT_OF_STEP if name in step}
    return remainder | {"forgotten": True}


def _refused_erase(marks: Marks, dry_run: bool) -> int:
    """Empty the refused rows of imports that quote an erased decision or name the unit; returns how many."""
    count = 0
    for batch in ImportBatch.objects.exclude(refused=[]).only("pk", "refused"):
        rows = [
            {"line": row["line"], "key": "", "reason": "forgotten"} if _quotes(marks, row) else row
            for row in batch.refused
        ]
        changed = sum(row != before for row, before in zip(rows, batch.refused, strict=True))
        count += changed
        if changed and not dry_run:
            batch.refused = rows
            batch.save(update_fields=["refused"])
    return count


def _quotes(marks: Marks, row: Mapping[str, Any]) -> bool:
    words = [str(row.get("reason", "")), str(row.get("key", ""))]
    return any(marks.unit in word or marks.in_text(word) for word in words)


def _remove(rows: QuerySet[Any], dry_run: bool) -> int:
    """Delete (or count) rows in SQL, past the models' protection; the caller deletes everything that points to them."""
    return rows.count() if dry_run else rows._raw_delete(rows.db)
