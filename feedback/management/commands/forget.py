"""Erase everything recorded of one unit."""

from __future__ import annotations

import shlex
from typing import Annotated

from backend.command import NEEDED, CommandOptions, RatchetCommand
from feedback.erasure.service import ErasureReport, unit_forget


class Options(CommandOptions):
    unit: Annotated[str, NEEDED]
    """The unit, exactly as the app sent it. Example: --unit user-17"""
    dry_run: bool = False
    """Count and list; erase nothing (default: erase)."""


class Command(RatchetCommand[Options, ErasureReport]):
    help = (
        "Erase all decisions of one unit (a user, a session) with their feedback and every copy of their "
        "text: outbox, refused rows, snapshots, evaluations, runs, logs. Lists the policies trained on "
        "them. Example: manage.py forget --unit user-17 --dry-run"
    )

    def work(self, options: Options) -> ErasureReport:
        return unit_forget(options.unit, dry_run=options.dry_run)

    def show(self, result: ErasureReport) -> None:
        self.stdout.write(f"{'Would remove' if result.dry_run else 'Removed'} of {result.unit}:")
        names = ("decisions", "ratings", "comparisons", "outcomes", "traces", "traces_emptied")
        self.table((name.replace("_", " "), f"{getattr(result, name):,}") for name in names)
        if result.places:
            self.stdout.write("Copies of its text:" if result.dry_run else "Copies of its text, erased:")
            self.table((name, f"{count:,}") for name, count in result.places.items())
        if result.not_compacted:
            self.stdout.write(
                "The database's own files may still hold removed rows: "
                f"{result.not_compacted}. Run VACUUM in `manage.py dbshell` when no other process uses the database"
            )
        if not result.snapshots:
            self.stdout.write("No training snapshot held its prompts.")
            return
        self.stdout.write(
            "Snapshots with its prompts, and what was trained on them (trained weights are not changed):"
        )
        self.table(
            (
                (
                    str(found["snapshot"]),
                    found["agent"],
                    found["fault"] if found["rows"] is None else str(found["rows"]),
                    found["path"],
                    ", ".join(found["policies"]),
                )
                for found in result.snapshots
            ),
            ("snapshot", "agent", "rows", "file", "policies"),
        )

    def next_step(self, result: ErasureReport) -> str:
        if result.dry_run:
            return f"python manage.py forget --unit {shlex.quote(result.unit)}"
        policies = sorted({name for found in result.snapshots for name in found["policies"]})
        return (
            f"retire the policies trained on it and train new ones: {', '.join(policies)}" if policies else ""
        )
