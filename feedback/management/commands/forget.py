"""Remove what is known of one unit."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandParser
from rich.table import Table

from backend.command import RatchetCommand
from feedback.forgetting import unit_forget


class Command(RatchetCommand):
    help = (
        "Remove the decisions of one unit (a user, a session) with their ratings, comparisons, outcomes and traces, "
        "and list the training snapshots that hold its prompts. Example: manage.py forget --unit user-17"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--unit", required=True, help="The unit, exactly as the app sent it. Example: --unit user-17"
        )
        parser.add_argument(
            "--dry-run", action="store_true", help="Count and list; remove nothing (default: remove)."
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        return asdict(unit_forget(options["unit"], dry_run=options["dry_run"]))

    def show(self, result: dict[str, Any]) -> None:
        self.stdout.write(f"{'Would remove' if result['dry_run'] else 'Removed'} of {result['unit']}:")
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
        for name in ("decisions", "ratings", "comparisons", "outcomes", "traces", "traces_emptied"):
            table.add_row(name.replace("_", " "), f"{result[name]:,}")
        self.console.print(table)
        if not result["snapshots"]:
            self.stdout.write("No training snapshot holds its prompts.")
            return
        self.stdout.write("Training snapshots that hold its prompts, and what was trained on them:")
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("snapshot", "agent", "rows", "file", "policies"):
            table.add_column(column)
        for found in result["snapshots"]:
            rows = found["fault"] if found["rows"] is None else str(found["rows"])
            table.add_row(
                str(found["snapshot"]), found["agent"], rows, found["path"], ", ".join(found["policies"])
            )
        self.console.print(table)
