"""Undo an import."""

from __future__ import annotations

import json

from backend.command import CommandOptions, RatchetCommand, Result
from feedback.erasure.withdrawals import trained_text
from feedback.transfer.import_report import count_text
from feedback.transfer.import_undo import Undone, UndoRefused, import_undo

COUNTS = ("decisions", "ratings", "comparisons", "outcomes", "traces", "withdrawals")


class Options(CommandOptions):
    number: int
    """N: Number of the import, as `imports` lists it."""
    dry_run: bool = False
    """Count and list; remove nothing (default: remove)."""
    force: bool = False
    """Undo it although something was trained on it (default: refuse). Trained policies are not
    changed."""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Undo an import: remove its decisions, ratings, comparisons, outcomes and traces. Decisions that "
        "were rated here since, or that another import added to, stay. If something was trained on the "
        "import, --force is needed. Example: manage.py undo_import 7 --dry-run"
    )

    def work(self, options: Options) -> Result:
        try:
            done = import_undo(
                options.number, actor="undo_import", dry_run=options.dry_run, force=options.force
            )
        except UndoRefused as refusal:
            if self.as_json:
                found = Undone.of(refusal.undone) if refusal.undone else {}
                self.stdout.write(json.dumps({**found, "undone": False, "reason": str(refusal)}))
            raise
        return {**Undone.of(done), "undone": not done.dry_run}

    def show(self, result: Result) -> None:
        what = "Would undo" if result["dry_run"] else "Undid"
        counts = ", ".join(count_text(result[name], name) for name in COUNTS if result[name]) or "nothing"
        self.stdout.write(f"{what} import {result['batch']} ({result['file']}): {counts}")
        if result["decisions_kept"]:
            self.stdout.write(
                f"  {result['decisions_kept']:,} of its decisions stay: people rated them here, or another import "
                "added to them"
            )
        if result["trained_on"]:
            self.stdout.write(f"  {trained_text(result['trained_on'])}")
        if result["imports_since"]:
            numbers = ", ".join(map(str, result["imports_since"]))
            self.stdout.write(
                f"  import {numbers} may have skipped rows as already present that are now gone: import it again"
            )

    def next_step(self, result: Result) -> str:
        if not result["dry_run"]:
            return "python manage.py imports"
        trained = result["trained_on"].get("runs") or result["trained_on"].get("labels")
        return f"python manage.py undo_import {result['batch']}{' --force' if trained else ''}"
