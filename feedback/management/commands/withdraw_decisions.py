"""Withdraw decisions, list the withdrawals, restore one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from django.core.management.base import CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result
from feedback.erasure.withdrawals import (
    Withdrawn,
    decisions_withdraw,
    selection_read,
    trained_text,
    withdrawal_restore,
    withdrawals,
)
from feedback.transfer.import_report import count_text

SELECTION = ("ids", "batch", "agent", "unit", "source", "since", "until")
LIST_LENGTH = 50
"""Most withdrawals that --list prints."""


class Options(CommandOptions):
    ids: Annotated[Sequence[str], BY_HAND]
    batch: int | None = None
    """N: Decisions of the import with this number. Example: --batch 7"""
    agent: str = ""
    """SLUG: Decisions of this agent (default: of all). Example: --agent filer"""
    unit: str = ""
    """Decisions for this unit (user or session), exactly as the app sent it. Example: --unit user-17"""
    source: str = ""
    """Decisions of this source: app, gateway, ... Example: --source simulation"""
    since: str = ""
    """TIME: Recorded at this time or later, ISO 8601. Example: --since 2026-11-01"""
    until: str = ""
    """TIME: Recorded before this time, ISO 8601. Example: --until 2026-11-02T10:00:00Z"""
    reason: str = ""
    """Reason, kept on record. Example: --reason 'load test'"""
    dry_run: bool = False
    """Count and list; withdraw nothing (default: withdraw)."""
    restore: int | None = None
    """N: Undo withdrawal N. Example: --restore 3"""
    list: bool = False
    """List the withdrawals, newest first."""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Exclude decisions from datasets, queues, counts and exports: those that match all options given. "
        "They stay on record; --restore includes them again. Lists what was trained on them. Example: "
        "manage.py withdraw_decisions --unit load-test --dry-run"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        add = parser.add_argument
        add(
            "--id",
            dest="ids",
            action="append",
            default=[],
            metavar="UUID",
            help="Id of a decision; repeatable. Example: --id 6f1c... ",
        )

    def work(self, options: Options) -> Result:
        if options.list:
            columns = ("pk", "decisions_count", "selection", "reason", "actor", "created_at", "restored_at")
            return {"withdrawals": list(withdrawals().values(*columns)[:LIST_LENGTH])}
        if options.restore is not None:
            count = withdrawal_restore(options.restore, actor="withdraw_decisions", dry_run=options.dry_run)
            return {"restored": options.restore, "decisions": count, "dry_run": options.dry_run}
        selection = selection_read({name: getattr(options, name) for name in SELECTION})
        done = decisions_withdraw(
            selection, actor="withdraw_decisions", reason=options.reason, dry_run=options.dry_run
        )
        return Withdrawn.of(done)

    def show(self, result: Result) -> None:
        if "withdrawals" in result:
            self._show_list(result["withdrawals"])
        elif "restored" in result:
            done = "Would restore" if result["dry_run"] else "Restored"
            self.stdout.write(f"{done} {count_text(result['decisions'], 'decisions')}.")
        else:
            done = "Would withdraw" if result["dry_run"] else "Withdrew"
            agents = ", ".join(f"{count:,} of {agent}" for agent, count in result["agents"].items())
            self.stdout.write(
                f"{done} {count_text(result['decisions'], 'decisions')}{f': {agents}' if agents else ''}."
            )
            if result["trained_on"]:
                self.stdout.write(f"  {trained_text(result['trained_on'])}; trained policies are not changed")

    def next_step(self, result: Result) -> str:
        if result.get("withdrawal"):
            return f"python manage.py withdraw_decisions --restore {result['withdrawal']} includes them again"
        if result.get("dry_run") and result.get("decisions"):
            return "to withdraw them: the same command without --dry-run"
        return "python manage.py withdraw_decisions --list" if "withdrawals" not in result else ""

    def _show_list(self, rows: list[Result]) -> None:
        if not rows:
            self.stdout.write("No withdrawals yet.")
            return
        found = [
            (
                str(row["pk"]),
                f"{row['decisions_count']:,}",
                ", ".join(f"{name} {len(v) if name == 'ids' else v}" for name, v in row["selection"].items()),
                row["reason"],
                row["actor"],
                f"{row['created_at']:%Y-%m-%d %H:%M}",
                "restored" if row["restored_at"] else "",
            )
            for row in rows
        ]
        self.table(found, ("withdrawal", "decisions", "selected by", "reason", "by", "at", ""))
