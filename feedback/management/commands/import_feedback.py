"""Read files of other programs: decisions, ratings, comparisons, corrections."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from feedback import formats, importing
from feedback.import_report import ImportReport

COUNTS = ("decisions", "ratings", "comparisons", "corrections", "outcomes", "traces")


class Command(RatchetCommand):
    help = (
        "Read decisions and what people thought of them from files of other programs. A file is imported whole or not "
        "at all; importing it again adds nothing. Example: manage.py import_feedback export.json --agent support-bot"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("files", nargs="+", metavar="FILE", help="JSON or JSON lines, gzipped or not.")
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
                f"{importing.DEFAULT_AGENT}). Example: --agent support-bot"
            ),
        )
        parser.add_argument(
            "--ratings-file",
            metavar="F",
            help="The ratings, where the format keeps them in a second file. Example: --ratings-file ratings.json",
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
        reports: list[ImportReport] = []
        for file in options["files"]:
            with self.bar(f"import {file}") as bar:
                try:
                    report = importing.file_import(
                        file,
                        format=options["format"],
                        agent=options["agent"],
                        ratings_path=options["ratings_file"],
                        simulated=options["simulated"],
                        skip_bad=options["skip_bad"],
                        dry_run=options["dry_run"],
                        progress=bar.update,
                    )
                except importing.ImportRefused as refusal:
                    self._report_refusal([*reports, refusal.report], options)
                    raise
            reports.append(report)
        return {**_total(reports), "dry_run": options["dry_run"]}

    def _report_refusal(self, reports: list[ImportReport], options: dict[str, Any]) -> None:
        """Every refused row, before the one line that says the file was refused."""
        result = {**_total(reports), "dry_run": options["dry_run"]}
        if options["json"]:
            self.stdout.write(json.dumps(result, ensure_ascii=False))
        else:
            self.show(result)

    def show(self, result: dict[str, Any]) -> None:
        done = "would be imported" if result["dry_run"] else "imported"
        for file in result["files"]:
            counts = ", ".join(f"{file[name]} {name}" for name in COUNTS if file[name]) or "nothing"
            self.stdout.write(f"{file['file']} ({file['format']}): {counts} {done}")
            for reason, count in file["skipped_because"].items():
                self.stdout.write(f"  skipped {count}: {reason}")
            for row in file["refused"]:
                self.stdout.write(f"  refused line {row['line']} {row['key']}: {row['reason']}")


def _total(reports: list[ImportReport]) -> dict[str, Any]:
    """One object over all files: counts added up, and each file on its own."""
    files = [report.as_dict() for report in reports]
    kinds = {report.format for report in reports}
    return {
        "format": kinds.pop() if len(kinds) == 1 else "several",
        **{name: sum(file[name] for file in files) for name in (*COUNTS, "skipped")},
        "refused": [row for file in files for row in file["refused"]],
        "files": files,
    }
