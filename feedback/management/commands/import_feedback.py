"""Import decisions, ratings, comparisons and corrections from files of other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from django.core.management.base import CommandError, CommandParser
from pydantic import Field

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from feedback.transfer import formats, import_
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.import_report import ImportReport, next_steps, total_of


class Options(CommandOptions):
    files: Annotated[list[str], BY_HAND]
    format: Annotated[str, BY_HAND]
    agent: str | None = Field(
        None,
        description="SLUG: Agent that the decisions are stored for (default: the file's, else "
        f"{import_.DEFAULT_AGENT}). Example: --agent support-bot",
    )
    map: str = ""
    """FIELD=COLUMN,...: Map fields to columns (default: recognised by the columns' names); dots in a name
    are a path into nested rows. Example: --map prompt=question,response=answer,rating=stars"""
    rater: str | None = None
    """COLUMN: Column with the rater's name (default: recognised by its name). Example: --rater
    annotator"""
    ratings_file: str | None = None
    """F: File of the ratings, for formats with two files. Example: --ratings-file ratings.json"""
    licence: str = ""
    """NAME: Licence of the data, stored with the import (default: none). Example: --licence CC-BY-4.0"""
    simulated: bool = False
    """Mark the ratings as simulated: given by a model or a script (default: by people)."""
    skip_bad: bool = False
    """Leave out rows that cannot be read (default: refuse the file)."""
    dry_run: bool = False
    """Print what would be imported; change nothing."""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Import decisions and feedback from files of other programs. A file is imported whole or not "
        "at all; importing it again adds nothing; undo_import removes it. Exits with 1 if nothing was "
        "stored, or less than was left out. Example: manage.py import_feedback export.json --agent "
        "support-bot"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--format",
            default="auto",
            choices=list(dict.fromkeys(["auto", *formats.FORMATS, *formats.SHAPES])),
            metavar="F",
            help="Format of the files, by the names in docs/formats.md (default auto: recognised by their rows). "
            "Example: --format trl",
        )
        parser.add_argument(
            "files",
            nargs="+",
            metavar="FILE",
            help="JSON, JSON lines, CSV, TSV or Parquet; plain, or compressed as gzip, zstd or zip. "
            "Example: ratings.csv",
        )

    def work(self, options: Options) -> Result:
        if options.ratings_file and len(options.files) > 1:
            raise CommandError("expected one FILE with --ratings-file, found several; import them one by one")
        columns = ColumnMap.parse(options.map, options.rater)
        reports: list[ImportReport] = []
        for file in formats.decisions_before_feedback(options.files):
            order = import_.ImportOrder(
                Path(file),
                format=options.format,
                agent=options.agent,
                ratings_path=Path(options.ratings_file) if options.ratings_file else None,
                columns=columns or None,
                simulated=options.simulated,
                skip_bad=options.skip_bad,
                licence=options.licence,
            )
            with self.bar(f"import {file}") as bar:
                try:
                    report = import_.order_import(order, dry_run=options.dry_run, progress=bar.update)
                except import_.ImportRefused as refusal:
                    self._report([*reports, refusal.report], options)
                    raise
            reports.append(report)
        if problems := [report for report in reports if report.problem]:
            self._report(reports, options)
            raise CommandError(_refusal(problems))
        return self._result(reports, options)

    def _result(self, reports: list[ImportReport], options: Options) -> dict[str, object]:
        steps = dict.fromkeys(step for report in reports for step in next_steps(report))
        headlines = {report.file: report.headline for report in reports}
        return {
            **total_of(reports),
            "dry_run": options.dry_run,
            "next": list(steps),
            "headlines": headlines,
        }

    def _report(self, reports: list[ImportReport], options: Options) -> None:
        """Print the whole report before the error."""
        result = self._result(reports, options)
        if self.as_json:
            self.stdout.write(json.dumps(result, ensure_ascii=False))
        else:
            self.show(result)

    def show(self, result: Result) -> None:
        for file in result["files"]:
            self.stdout.write(f"{file['file']} ({file['format']}): {result['headlines'][file['file']]}")
            for note in file["notes"]:
                self.stdout.write(f"  {note}")
            for reason, count in file["skipped_because"].items():
                self.stdout.write(f"  skipped {count}: {reason}")
            for row in file["refused"]:
                self.stdout.write(f"  refused line {row['line']} {row['key']}: {row['reason']}")
            if (more := file["refused_count"] - len(file["refused"])) > 0:
                self.stdout.write(f"  and {more:,} more refused rows")
        for step in result["next"]:
            self.stdout.write(f"Next: {step}")


def _refusal(reports: list[ImportReport]) -> str:
    """One line over the files that brought nothing, or less than was left out."""
    lines = []
    for report in reports:
        why = "; ".join(f"{count} {reason}" for reason, count in report.skipped_because.most_common(3))
        lines.append(f"{report.file}: {report.problem}{f' ({why})' if why else ''}")
    return ". ".join(lines)
