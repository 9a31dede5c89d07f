"""Erasure of one unit (a user or a session): its rows and every copy of their text.

Rows are deleted in one transaction, with tombstones that keep a replay or an import from recording them again.
Copies outside the feedback tables (spools, files, task results, other tables) are erased with them.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import OperationalError, connection, transaction
from django.db.models import Q, QuerySet
from django.utils.module_loading import import_string

from feedback.cache import forget_all
from feedback.erasure.marks import Marks, marks_of
from feedback.models import (
    Comparison,
    Decision,
    ImportBatch,
    Outcome,
    ProblemRow,
    Rating,
    Trace,
    shadow_id,
)
from feedback.storage.sql import chunks, decisions_remove, rows_delete
from feedback.storage.tombstones import tombstones_announce, tombstones_make
from ratchet_client.outbox import SUFFIX, Outbox
from ratchet_client.problem_log import ProblemLog

KEPT_OF_STEP = ("kind", "name", "at", "n", "parent", "duration_ms")
"""Keys that an erased step keeps."""

SnapshotFinder = Callable[[Mapping[str, set[str]]], list[dict[str, object]]]
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
            # an answer beside one of these may be under way
            tombstones_make([*ids, *map(shadow_id, ids)], traces, unit)
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


def _snapshots(marks: Marks) -> list[dict[str, object]]:
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
        if not dry_run:
            decisions_remove(chunk)
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
    """Traces with a decision of the unit, or with the unit in their metadata; of a trace in pieces, all of them."""
    found = dict.fromkeys(Trace.objects.filter(metadata__unit=unit).values_list("pk", flat=True))
    for chunk in chunks(ids):
        of = Decision.objects.filter(pk__in=chunk, trace__isnull=False).order_by()
        found |= dict.fromkeys(of.values_list("trace_id", flat=True).distinct())
    for chunk in chunks(list(found)):
        whole = Trace.objects.filter(pk__in=chunk, metadata__trace__isnull=False).exclude(run_id="")
        pieces = Trace.objects.filter(run_id__in=whole.values("run_id"), metadata__trace__isnull=False)
        found |= dict.fromkeys(pieces.order_by().values_list("pk", flat=True))
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
) -> dict[str, object]:
    """A step of a shared trace, without content if it is a decision of the unit."""
    if step["kind"] != "decision":
        return step
    own = uuid.UUID(step["id"]) if step.get("id") else uuid.uuid5(trace, str(index))
    if own not in ids and step.get("unit") != unit:
        return step
    remainder: dict[str, object] = {name: step[name] for name in KEPT_OF_STEP if name in step}
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


def _quotes(marks: Marks, row: Mapping[str, object]) -> bool:
    words = [str(row.get("reason", "")), str(row.get("key", ""))]
    return any(marks.unit in word or marks.in_text(word) for word in words)


def _remove(rows: QuerySet[Any], dry_run: bool) -> int:
    return rows.count() if dry_run else rows_delete(rows)


logger = logging.getLogger("feedback.erasure.service")

COLUMNS: dict[str, tuple[str, ...]] = {
    "feedback.ImportBatch": ("notes", "skipped_because", "options", "undone"),
    "feedback.Withdrawal": ("selection", "reason"),
    "feedback.CallSpan": ("events",),
    "admin.LogEntry": ("object_repr", "change_message"),
}
"""Model -> columns that may quote a decision; FEEDBACK_ERASURE erases further ones."""
TEXT_FILES = {".json", ".jsonl", ".ndjson", ".log", ".txt", ".md", ".csv", ".tsv", ".yaml", ".yml", ".html"}
TEXT_FILES |= {".draft", ".out"}
"""Suffixes of the files that are searched; weights, databases and pictures hold no texts."""
OWN_FOLDERS = ("spool", "snapshots", "metrics")
"""Folders of RATCHET_HOME that are erased record by record or hold no text."""


def spool_erase(marks: Marks, dry_run: bool) -> int:
    """Erase records in every outbox and journal below RATCHET_HOME; returns how many.

    Tombstones keep decisions out of the database that another process still has in memory.
    """
    spool: Path = settings.RATCHET_HOME / "spool"
    files = sorted(spool.rglob(f"*{SUFFIX}"))
    outboxes = [Outbox(file.parent, ProblemLog(logger), name=file.stem) for file in files]
    return sum(outbox.erase(marks.owns, dry_run=dry_run) for outbox in outboxes)


def problems_erase(marks: Marks, dry_run: bool) -> int:
    """Delete rows of `/problems/`, whose reasons may quote a decision."""
    count = 0
    ids = list(marks.decisions)
    for chunk in chunks(ids):
        rows = ProblemRow.objects.filter(decision__in=chunk)
        count += rows.count() if dry_run else rows.delete()[0]
    return count


def columns_erase(marks: Marks, dry_run: bool, columns: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """Redact columns of other tables; returns model -> changed rows."""
    counts: dict[str, int] = {}
    for label, names in columns.items():
        model = apps.get_model(label)
        count = 0
        for row in model._default_manager.order_by().values("pk", *names).iterator(chunk_size=200):
            redacted = {name: marks.redact_json(row[name]) for name in names}
            changed = {name: value for name, value in redacted.items() if value != row[name]}
            if changed:
                count += 1
                if not dry_run:
                    model._default_manager.filter(pk=row["pk"]).update(**changed)
        if count:
            counts[model._meta.verbose_name_plural or label] = count
    return counts


def tasks_erase(marks: Marks, dry_run: bool) -> int:
    """Delete results of finished tasks that quote a decision."""
    tasks = apps.get_model("django_q.Task")._default_manager
    rows = tasks.order_by().values_list("pk", "args", "kwargs", "result").iterator(chunk_size=200)
    gone = [pk for pk, *words in rows if marks.in_text(repr(words))]
    if not dry_run:
        for chunk in chunks(gone):
            tasks.filter(pk__in=chunk).delete()
    return len(gone)


def files_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """Redact text files below RATCHET_HOME; returns folder -> changed files."""
    home: Path = settings.RATCHET_HOME
    counts: dict[str, int] = {}
    for path in _text_files(home):
        try:
            data = path.read_bytes()
        except OSError:
            continue  # Deleted meanwhile, or a pipe.
        redacted = _redact_line(path, data, marks)
        if redacted == data:
            continue
        place = f"files in {path.relative_to(home).parts[0]}/" if path.parent != home else f"file {path.name}"
        counts[place] = counts.get(place, 0) + 1
        if not dry_run:
            _overwrite(path, data, redacted)
    return counts


def further_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """Erase outside this app by FEEDBACK_ERASURE."""
    if not settings.FEEDBACK_ERASURE:
        return {}
    found: dict[str, int] = import_string(settings.FEEDBACK_ERASURE)(marks, dry_run)
    return found


def places_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """Erase (or count) copies in the database outside the feedback tables: place -> number, without zeros."""
    found = {
        "problems": problems_erase(marks, dry_run),
        "task results": tasks_erase(marks, dry_run),
        **columns_erase(marks, dry_run, COLUMNS),
        **further_erase(marks, dry_run),
    }
    return {name: count for name, count in found.items() if count}


def files_and_spool_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """Erase (or count) copies on disk. Call it last in the transaction: a rollback does not restore files."""
    found = {"spool records": spool_erase(marks, dry_run), **files_erase(marks, dry_run)}
    return {name: count for name, count in found.items() if count}


def secure_delete() -> None:
    """Make SQLite overwrite deleted rows with zeros on this connection."""
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA secure_delete=ON")


def database_compact() -> str:
    """Remove deleted rows from the database's files; returns why that failed, or "".

    SQLite rewrites the file and empties the write-ahead log. On PostgreSQL, VACUUM only frees the space: bytes stay
    until they are overwritten, and in WAL archives and backups.
    """
    if connection.in_atomic_block:
        return "inside a transaction"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("VACUUM")
            return ""
        for statement in ("PRAGMA wal_checkpoint(TRUNCATE)", "VACUUM", "PRAGMA wal_checkpoint(TRUNCATE)"):
            try:
                cursor.execute(statement)
                busy = statement.startswith("PRAGMA") and cursor.fetchone()[0]
            except OperationalError as error:
                return f"{statement}: {error}"
        return "another process is reading the write-ahead log; run the command again later" if busy else ""


def _text_files(home: Path) -> Iterator[Path]:
    # Unlike Path.rglob, os.walk tolerates folders that vanish, such as old checkpoints of a running training.
    for place, folders, names in os.walk(home):
        if Path(place) == home:
            folders[:] = [folder for folder in folders if folder not in OWN_FOLDERS]
        folders.sort()
        for path in (Path(place) / name for name in sorted(names)):
            if path.suffix in TEXT_FILES and path.is_file() and not path.is_symlink():
                yield path


def _redact_line(path: Path, data: bytes, marks: Marks) -> bytes:
    if path.suffix in (".json", ".jsonl", ".ndjson"):
        try:
            return _redacted_json(path, data, marks)
        except (ValueError, RecursionError):
            pass  # Not JSON: redact it as text.
    return marks.redacted_bytes(data)


def _redacted_json(path: Path, data: bytes, marks: Marks) -> bytes:
    def json_bytes(value: object, indent: int | None) -> bytes:
        return json.dumps(value, ensure_ascii=False, indent=indent).encode("utf-8", "surrogatepass")

    if path.suffix == ".json":
        value = json.loads(data)
        redacted = marks.redact_json(value)
        return data if redacted == value else json_bytes(redacted, 2)
    lines = []
    for line in data.splitlines(keepends=True):
        value = json.loads(line) if line.strip() else None
        redacted = marks.redact_json(value)
        lines.append(line if redacted == value else json_bytes(redacted, None) + b"\n")
    return b"".join(lines)


def _overwrite(path: Path, data: bytes, redacted: bytes) -> None:
    if len(redacted) == len(data):
        # In place: a process that appends to it keeps its file.
        mode = path.stat().st_mode
        path.chmod(mode | 0o200)
        with path.open("r+b") as file:
            file.write(redacted)
        path.chmod(mode)
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as new:
        new.write(redacted)
    Path(new.name).chmod(path.stat().st_mode)
    Path(new.name).replace(path)
