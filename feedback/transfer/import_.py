"""Import of a file: its rows become decisions, ratings and comparisons, whole or not at all, and never twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from django.db import IntegrityError, transaction

from backend import limits
from feedback.models import ImportBatch, RaterKind
from feedback.transfer import formats
from feedback.transfer.formats.base import columns_watched
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.files import Tally, rows_bounded, too_many_rows
from feedback.transfer.formats.readers import Reading
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedReference,
    Record,
    RowRefused,
)
from feedback.transfer.import_batch import Batch
from feedback.transfer.import_plans import DEFAULT_AGENT as DEFAULT_AGENT
from feedback.transfer.import_plans import Origin, Raters
from feedback.transfer.import_report import EarlierImport, ImportReport, left_out_note, refused_row_summary

BATCH = 1000
"""Records written together."""

ATTEMPTS = 5
"""Tries of a transaction, where others write the same rows meanwhile."""

MAX_LICENCE = limits.LICENCE_CHARACTERS
"""Longest licence, in characters."""

Progress = Callable[[int, int], None]
"""Function called with records done and records in all."""


class ImportRefused(ValueError):
    """A file with rows that cannot be read; nothing of it was kept. `report` lists the rows."""

    def __init__(self, message: str, report: ImportReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass(frozen=True)
class ImportOrder:
    """A file to be imported, and how."""

    path: Path
    name: str = ""
    """Name of the file in the record of the import; empty: its own name."""
    format: str = "auto"
    agent: str | None = None
    """Agent that the decisions are stored for; None: the one named in the file, else DEFAULT_AGENT."""
    ratings_path: Path | None = None
    ratings_name: str = ""
    columns: ColumnMap | None = None
    """Column map, of tables and plain rows."""
    simulated: bool = False
    """The verdicts were given by a model or a script, and are marked so whatever the file says."""
    skip_bad: bool = False
    """Leave out rows that cannot be read instead of refusing the file."""
    licence: str = ""
    actor: str = "import_feedback"
    """Author of the import: a person, a key, or the command."""
    max_rows: int | None = None
    """Refuse a file of more rows; None: any number."""

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from the defaults, for the record."""
        changes = {
            "format": None if self.format == "auto" else self.format,
            "agent": self.agent,
            "columns": self.columns.columns_by_field() if self.columns else None,
            "simulated": self.simulated,
            "skip_bad": self.skip_bad,
        }
        return {name: value for name, value in changes.items() if value}


def order_import(
    order: ImportOrder, *, dry_run: bool = False, progress: Progress | None = None
) -> ImportReport:
    """Read a file of any known format into the database, in one transaction, as one ImportBatch.

    dry_run: do it all and roll back. Reading a file again adds nothing, and makes no batch. Raises FormatRefused for
    a file that cannot be read, ImportRefused for rows that cannot.
    """
    if len(order.licence) > MAX_LICENCE:
        raise FormatRefused(
            f"licence: expected at most {MAX_LICENCE} characters, found {len(order.licence)}; give its name"
        )
    opened = formats.readings(order.path, order.format, order.ratings_path, order.columns)
    with rows_bounded(order.max_rows), opened as files:
        work = _ImportJob(order, files, _report_new(order, files), progress, dry_run)
        work.look_through()
        return work.write()


def _report_new(order: ImportOrder, files: tuple[Reading, ...]) -> ImportReport:
    kinds = {file.format.name for file in files}
    name = kinds.pop() if len(kinds) == 1 else "several"
    notes = tuple(dict.fromkeys(note for file in files for note in file.notes))
    return ImportReport(order.name or str(order.path), name, notes=notes)


@dataclass
class _ImportJob:
    """One import under way."""

    order: ImportOrder
    files: tuple[Reading, ...]
    report: ImportReport
    progress: Progress | None
    dry_run: bool
    total: int = 0
    attachments: list[str] = field(default_factory=list)

    def _records(self, file: Reading) -> Iterator[Record]:
        found = file.records()
        return map(_by_a_machine, found) if self.order.simulated else found

    def look_through(self) -> None:
        """Read all of it once without the database, so that a bad file holds no lock that others wait for."""
        most = self.order.max_rows
        with columns_watched() as unread:
            for file in self.files:
                for record in self._records(file):
                    self.total += 1
                    if most is not None and self.total > most:
                        raise FormatRefused(too_many_rows(str(self.order.path), most))
                    if isinstance(record, RowRefused):
                        self.report.refuse(record)
        if unread:
            self.report.left_out_columns = dict(unread.most_common())
            self.report.notes = (*self.report.notes, left_out_note(self.report.left_out_columns))
        if not self.total:
            raise FormatRefused(f"{self.order.path}: expected rows, found none")
        self._check()
        self.report.refused.clear()
        self.report.refused_count = 0

    def _check(self) -> None:
        """Raises ImportRefused where rows were refused and are not to be left out."""
        report = self.report
        if self.order.skip_bad or not report.refused_count:
            return
        report.refused.sort(key=lambda row: row.line)
        first = report.refused[0]
        raise ImportRefused(
            f"{report.file}: {report.refused_count} of {self.total} rows refused, nothing was imported; "
            f"line {first.line}{f' ({first.key})' if first.key else ''}: {first.reason}. "
            "Correct them, or leave them out with --skip-bad",
            # what had been counted until then was taken back
            ImportReport(
                report.file,
                report.format,
                rows=self.total,
                refused=report.refused,
                refused_count=report.refused_count,
                notes=report.notes,
                left_out_columns=report.left_out_columns,
            ),
        )

    def write(self) -> ImportReport:
        """Write the records and the batch they are of: all of it or nothing."""
        digest = _sha256(self.order.path)
        report = self.report
        report.dry_run = self.dry_run
        with transaction.atomic():
            earlier_batch = ImportBatch.objects.filter(sha256=digest, undone_at=None).order_by("pk").first()
            batch = ImportBatch.objects.create(
                file=(self.order.name or self.order.path.name)[-255:],
                sha256=digest,
                bytes=self.order.path.stat().st_size,
                ratings_file=self._ratings_name()[-255:],
                format=report.format,
                licence=self.order.licence,
                options=self.order.options,
                actor=self.order.actor[:200],
            )
            for file in self.files:
                self._write_file(file, batch)
            report.refused.sort(key=lambda row: row.line)
            self._check()
            if earlier_batch is not None:
                report.earlier = EarlierImport(earlier_batch.pk, earlier_batch.created_at)
            if report.stored_rows or report.rows_stored or self.attachments:
                self._record(batch)
            else:
                batch.delete()  # a file that was here already is no import of its own
            if self.dry_run:
                report.batch = None
                transaction.set_rollback(True)
        return report

    def _ratings_name(self) -> str:
        if self.order.ratings_name or self.order.ratings_path is None:
            return self.order.ratings_name
        return self.order.ratings_path.name

    def _write_file(self, file: Reading, batch: ImportBatch) -> None:
        origin = Origin(file.format.name, self.order.agent, batch.pk)
        raters: Raters = Tally()
        records = self._records(file)
        while some := list(islice(records, BATCH)):
            part = records_write(some, origin, raters)
            raters.update(part.raters)
            self.report.add(part.report)
            self.attachments += map(str, part.attached)
            if self.progress is not None:
                self.progress(self.report.rows, self.total)

    def _record(self, batch: ImportBatch) -> None:
        """Note on the batch what it brought."""
        report = self.report
        report.batch = batch.pk
        batch.agent = report.agent
        batch.counts = report.counts
        batch.skipped_because = dict(report.skipped_because)
        batch.refused = [refused_row_summary(row) for row in report.refused]
        batch.notes = list(report.notes)
        batch.attached = self.attachments
        batch.save()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _by_a_machine(record: Record) -> Record:
    """The record with its verdicts marked as simulated."""
    if isinstance(record, ImportedDecision):
        ratings = tuple(replace(rating, rater_kind=RaterKind.SIMULATED) for rating in record.ratings)
        return replace(record, ratings=ratings)
    if isinstance(record, ImportedComparison):
        return replace(record, rater_kind=RaterKind.SIMULATED)
    if isinstance(record, ImportedReference):
        return replace(record, rating=replace(record.rating, rater_kind=RaterKind.SIMULATED))
    return record


def records_write(records: list[Record], origin: Origin, raters: Raters) -> Batch:
    """Write some records; again where somebody else wrote one of their rows at the same moment."""
    for attempt in range(ATTEMPTS):
        batch = Batch(origin, raters)
        try:
            with transaction.atomic():
                batch.write(records)
        except IntegrityError:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return batch
    raise AssertionError("every attempt returns or raises")
