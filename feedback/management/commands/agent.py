"""Rename or delete an agent."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from feedback.agents.changes import agent_delete, agent_rename
from feedback.erasure.artifacts import trained_text


class Command(RatchetCommand):
    help = (
        "Rename an agent with all that is recorded, set and trained of it, or delete it. Deleting is refused where "
        "something was trained for it, unless forced. Example: manage.py agent rename support-bot helpdesk"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        commands = parser.add_subparsers(dest="action", required=True, metavar="rename|delete")
        rename = commands.add_parser(
            "rename", help="Give an agent another name. Example: agent rename filer sorter"
        )
        rename.add_argument("agent", metavar="AGENT", help="The agent's slug now.")
        rename.add_argument("new", metavar="NEW", help="The slug it gets: one that no agent has.")
        rename.add_argument("--dry-run", action="store_true", help="Say what would move; change nothing.")
        delete = commands.add_parser(
            "delete", help="Remove all of an agent. Example: agent delete filer --dry-run"
        )
        for sub in (rename, delete):
            sub.add_argument(
                "--json", action="store_true", default=argparse.SUPPRESS, help="As before the action."
            )
        delete.add_argument("agent", metavar="AGENT", help="The agent's slug.")
        delete.add_argument("--dry-run", action="store_true", help="Say what would go; remove nothing.")
        delete.add_argument(
            "--force",
            action="store_true",
            help="Delete it although something was trained for it: its runs and policies go, too (default: refuse).",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["action"] == "rename":
            done = agent_rename(options["agent"], options["new"], dry_run=options["dry_run"])
            return {"action": "rename", **done.as_dict()}
        gone = agent_delete(
            options["agent"], actor="agent delete", dry_run=options["dry_run"], force=options["force"]
        )
        return {"action": "delete", **gone.as_dict()}

    def show(self, result: dict[str, Any]) -> None:
        dry = result["dry_run"]
        if result["action"] == "rename":
            self.stdout.write(f"{result['agent']} {'would be' if dry else 'is'} called {result['new']}:")
        else:
            self.stdout.write(f"{'Would delete' if dry else 'Deleted'} {result['agent']}:")
        for name, count in result["rows"].items():
            self.stdout.write(f"  {count:,} {name}")
        for path in result["files"]:
            self.stdout.write(f"  {path}")
        if result["action"] == "rename":
            self.stdout.write(
                "Policies keep their names. An app that still sends the old name makes a new agent of that name"
            )
            return
        if result.get("trained"):
            self.stdout.write(f"  {trained_text(result['trained']).replace(' on it', ' for it')}")

    def next_step(self, result: dict[str, Any]) -> str:
        if result["action"] == "rename":
            again = f"python manage.py agent rename {result['agent']} {result['new']}"
            return again if result["dry_run"] else f"let your app send {result['new']}"
        if result["dry_run"]:
            return f"python manage.py agent delete {result['agent']}{' --force' if result['trained'] else ''}"
        return "import or record what the next agent does: python manage.py import_feedback FILE --agent SLUG"
