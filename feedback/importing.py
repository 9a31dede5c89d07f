"""Files of other programs become decisions, ratings and comparisons: whole or not at all, and never twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from django.db import IntegrityError, transaction

from feedback import formats
from feedback.formats.kept import Tally
from feedback.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedReference,
    Record,
    RowRefused,
)
from feedback.import_batch import Batch
from feedback.import_plans import DEFAULT_AGENT as DEFAULT_AGENT
from feedback.import_plans import Origin, Raters
from feedback.import_report import ImportReport
from feedback.models import RaterKind

BATCH = 1000
"""Records written together."""

ATTEMPTS = 5
"""How often they are tried, where others write the same rows meanwhile."""

Progress = Callable[[int, int], None]
"""Called with records done and records in all."""


class ImportRefused(ValueError):
    """A file with rows that cannot be read; nothing of it was kept. `report` lists the rows."""

    def __init__(self, message: str, report: ImportReport) -> None:
        super().__init__(message)
        self.report = report


def file_import(
    path: str | Path,
    *,
    format: str = "auto",
    agent: str | None = None,
    ratings_path: str | Path | None = None,
    simulated: bool = False,
    skip_bad: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Read a file of any known format into the database, in one transaction.

    agent: whose decisions they are (default: what the file says, else DEFAULT_AGENT). simulated: the verdicts were
    given by a model or a script, and are marked so whatever the file says. skip_bad: leave out rows that
    cannot be read instead of refusing the file. dry_run: do it all and take it back. Reading a file again adds
    nothing. Raises FormatRefused for a file that cannot be read, ImportRefused for rows that cannot.
    """
    path = Path(path)
    name = formats.named(formats.detect(path) if format == "auto" else format).name
    report = ImportReport(str(path), name)

    def records() -> Iterator[Record]:
        found = formats.read(path, name, ratings_path)
        return map(_by_a_machine, found) if simulated else found

    # Read once without the database, so that a bad file holds no lock that others wait for
    total = 0
    for record in records():
        total += 1
        if isinstance(record, RowRefused):
            report.refused.append(record)
    if not total:
        raise FormatRefused(f"{path}: expected rows, found none")
    if not skip_bad:
        _check(report, total)
    report.refused.clear()
    with transaction.atomic():
        _written(records(), Origin(name, agent), report, lambda done: progress and progress(done, total))
        report.refused.sort(key=lambda row: row.line)
        if not skip_bad:
            _check(report, total)
        if dry_run:
            transaction.set_rollback(True)
    return report


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


def _check(report: ImportReport, total: int) -> None:
    if report.refused:
        first = min(report.refused, key=lambda row: row.line)
        raise ImportRefused(
            f"{report.file}: {len(report.refused)} of {total} rows refused, nothing was imported; line {first.line}"
            f"{f' ({first.key})' if first.key else ''}: {first.reason}. "
            "Correct them, or leave them out with --skip-bad",
            # what had been counted until then was taken back
            ImportReport(report.file, report.format, refused=report.refused),
        )


def _written(
    records: Iterator[Record], origin: Origin, report: ImportReport, progress: Callable[[int], Any]
) -> None:
    raters: Raters = Tally()
    done = 0
    while some := list(islice(records, BATCH)):
        batch = _batch_written(some, origin, raters)
        raters.update(batch.raters)
        report.add(batch.report)
        done += len(some)
        progress(done)


def _batch_written(records: list[Record], origin: Origin, raters: Raters) -> Batch:
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
