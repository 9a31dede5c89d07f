"""Copies of an erased decision's text outside the feedback tables: spools, files, task results, other tables."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import OperationalError, connection
from django.utils.module_loading import import_string

from feedback.erasure.marks import Marks
from feedback.models import ProblemRow
from feedback.storage.sql import chunks
from ratchet_client.outbox import SUFFIX, Outbox
from ratchet_client.problem_log import ProblemLog

logger = logging.getLogger("feedback.erasure.places")

COLUMNS: dict[str, tuple[str, ...]] = {
    "feedback.ImportBatch": ("notes", "skipped_because", "options", "undone"),
    "feedback.Withdrawal": ("selection", "reason"),
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
    def json_bytes(value: Any, indent: int | None) -> bytes:
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
