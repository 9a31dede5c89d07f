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
        "Rename or delete an agent with its decisions, settings and policies. Deleting an agent that "
        "has runs or policies needs --force. Example: manage.py agent rename support-bot helpdesk"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        commands = parser.add_subparsers(dest="action", required=True, metavar="rename|delete")
        rename = commands.add_parser(
            "rename", help="Give an agent another name. Example: agent rename filer sorter"
        )
        rename.add_argument("agent", metavar="AGENT", help="Present slug of the agent.")
        rename.add_argument("new", metavar="NEW", help="New slug; no other agent may have it.")
        rename.add_argument(
            "--dry-run", action="store_true", help="Print what would be renamed; change nothing."
        )
        delete = commands.add_parser(
            "delete", help="Delete an agent and all its data. Example: agent delete filer --dry-run"
        )
        for sub in (rename, delete):
            sub.add_argument(
                "--json",
                action="store_true",
                default=argparse.SUPPRESS,
                help="The same as --json before the action.",
            )
        delete.add_argument("agent", metavar="AGENT", help="The agent's slug.")
        delete.add_argument(
            "--dry-run", action="store_true", help="Print what would be deleted; delete nothing."
        )
        delete.add_argument(
            "--force",
            action="store_true",
            help="Delete its runs and policies too (default: refuse if there are any).",
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
                "Policies keep their names. An app that still sends the old name creates a new agent with it"
            )
            return
        if result.get("trained"):
            self.stdout.write(f"  {trained_text(result['trained']).replace(' on it', ' for it')}")

    def next_step(self, result: dict[str, Any]) -> str:
        if result["action"] == "rename":
            again = f"python manage.py agent rename {result['agent']} {result['new']}"
            return again if result["dry_run"] else f"make your app send {result['new']}"
        if result["dry_run"]:
            return f"python manage.py agent delete {result['agent']}{' --force' if result['trained'] else ''}"
        return (
            "record or import decisions of another agent: python manage.py import_feedback FILE --agent SLUG"
        )
