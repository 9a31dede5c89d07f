"""Read files of other programs: decisions, ratings, comparisons, corrections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from feedback.transfer import formats, import_
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.import_report import ImportReport, next_steps, total_of


class Command(RatchetCommand):
    help = (
        "Read decisions and what people thought of them from files of other programs. A file is imported whole or not "
        "at all; importing it again adds nothing; undo_import takes it back. An import that stores nothing, or leaves "
        "out more than it stores, exits with 1. Example: manage.py import_feedback export.json --agent support-bot"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "files",
            nargs="+",
            metavar="FILE",
            help="JSON, JSON lines, CSV, TSV or Parquet; as it is, or compressed as gzip, zstd or zip.",
        )
        parser.add_argument(
            "--format",
            default="auto",
            choices=["auto", *dict.fromkeys([*formats.FORMATS, *formats.SHAPES])],
            metavar="F",
            help=(
                "Which format the files are of (default auto: recognised by their rows): "
                f"{', '.join(formats.FORMATS)}, or a name that export_training_data writes. Example: --format trl"
            ),
        )
        parser.add_argument(
            "--agent",
            metavar="SLUG",
            help=(
                "Whose decisions they become (default: what the file says, else "
                f"{import_.DEFAULT_AGENT}). Example: --agent support-bot"
            ),
        )
        parser.add_argument(
            "--map",
            default="",
            metavar="FIELD=COLUMN,...",
            help=(
                "Which column holds what (default: told by the columns' names); a name with dots is a path into a "
                "row. Example: --map prompt=question,response=answer,rating=stars"
            ),
        )
        parser.add_argument(
            "--rater",
            metavar="COLUMN",
            help="The column that names the rater (default: told by its name). Example: --rater annotator",
        )
        parser.add_argument(
            "--ratings-file",
            metavar="F",
            help="The ratings, where the format keeps them in a second file. Example: --ratings-file ratings.json",
        )
        parser.add_argument(
            "--licence",
            default="",
            metavar="NAME",
            help="Licence of the data, kept with the import (default: none stated). Example: --licence CC-BY-4.0",
        )
        parser.add_argument(
            "--simulated",
            action="store_true",
            help="The verdicts were given by a model or a script: mark them so (default: by people).",
        )
        parser.add_argument(
            "--skip-bad",
            action="store_true",
            help="Leave out rows that cannot be read, instead of refusing their file (default: refuse).",
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Say what would be imported and change nothing."
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["ratings_file"] and len(options["files"]) > 1:
            raise CommandError("--ratings-file belongs to one FILE, found several; import them one by one")
        columns = ColumnMap.parse(options["map"], options["rater"])
        reports: list[ImportReport] = []
        for file in formats.decisions_before_feedback(options["files"]):
            order = import_.ImportOrder(
                Path(file),
                format=options["format"],
                agent=options["agent"],
                ratings_path=Path(options["ratings_file"]) if options["ratings_file"] else None,
                columns=columns or None,
                simulated=options["simulated"],
                skip_bad=options["skip_bad"],
                licence=options["licence"],
            )
            with self.bar(f"import {file}") as bar:
                try:
                    report = import_.order_import(order, dry_run=options["dry_run"], progress=bar.update)
                except import_.ImportRefused as refusal:
                    self._report([*reports, refusal.report], options)
                    raise
            reports.append(report)
        if problems := [report for report in reports if report.problem]:
            self._report(reports, options)
            raise CommandError(_refusal(problems))
        return self._result(reports, options)

    def _result(self, reports: list[ImportReport], options: dict[str, Any]) -> dict[str, Any]:
        steps = dict.fromkeys(step for report in reports for step in next_steps(report))
        headlines = {report.file: report.headline for report in reports}
        return {
            **total_of(reports),
            "dry_run": options["dry_run"],
            "next": list(steps),
            "headlines": headlines,
        }

    def _report(self, reports: list[ImportReport], options: dict[str, Any]) -> None:
        """The whole report, before the one line that says what is wrong with it."""
        result = self._result(reports, options)
        if options["json"]:
            self.stdout.write(json.dumps(result, ensure_ascii=False))
        else:
            self.show(result)

    def show(self, result: dict[str, Any]) -> None:
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
