"""Rename or delete an agent, or set its base model."""

from __future__ import annotations

import argparse
import re
from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import RatchetCommand
from feedback.agents.changes import agent_delete, agent_rename
from feedback.erasure.withdrawals import trained_text
from feedback.selectors import SLUG_PATTERN
from rl.base_models.service import agent_base_model, base_model_set
from rl.base_models.sources import SourceRefused
from rl.management.options import base_model_given, base_model_option


class Command(RatchetCommand):
    help = (
        "Set the base model of an agent, or rename or delete it with its decisions, settings and policies. "
        "Deleting an agent that has runs or policies needs --force. Example: manage.py agent set support-bot "
        "--base-model smollm2"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        commands = parser.add_subparsers(dest="action", required=True, metavar="set|rename|delete")
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
        settle = commands.add_parser(
            "set",
            help="Set or show an agent's base model. Example: agent set support-bot --base-model smollm2",
        )
        settle.add_argument("agent", metavar="AGENT", help="The agent's slug.")
        base_model_option(
            settle,
            "--base-model",
            "Base model that is trained, evaluated against, and answers before there is a champion; none removes the "
            "setting",
            "print the present one",
        )
        for sub in (settle, rename, delete):
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
        if options["action"] == "set":
            return {"action": "set", **self._base(options["agent"], options["base_model"])}
        if options["action"] == "rename":
            done = agent_rename(options["agent"], options["new"], dry_run=options["dry_run"])
            return {"action": "rename", **done.as_dict()}
        gone = agent_delete(
            options["agent"], actor="agent delete", dry_run=options["dry_run"], force=options["force"]
        )
        return {"action": "delete", **gone.as_dict()}

    def _base(self, agent: str, text: str | None) -> dict[str, Any]:
        """Set the agent's base model if one is given; returns the present one."""
        if not re.fullmatch(SLUG_PATTERN, agent):
            raise CommandError(f"expected a slug such as support-bot, found {agent!r}")
        if text == "none":
            base_model_set(agent, "")
        elif text is not None:
            try:
                base_model_set(agent, base_model_given(text, self) or "")
            except SourceRefused as refusal:
                raise CommandError(str(refusal)) from refusal
        found = agent_base_model(agent)
        return {"agent": agent, "base_model": found.name, "path": found.path, "origin": found.origin}

    def show(self, result: dict[str, Any]) -> None:
        if result["action"] == "set":
            self.stdout.write(
                f"{result['agent']} uses the base model {result['base_model']} ({result['origin']})"
            )
            return
        dry = result["dry_run"]
        if result["action"] == "rename":
            self.stdout.write(f"{result['agent']} {'would be' if dry else 'was'} renamed to {result['new']}:")
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
            self.stdout.write(f"  {trained_text(result['trained'], 'for it')}")

    def next_step(self, result: dict[str, Any]) -> str:
        if result["action"] == "set":
            return f"python manage.py run_pipeline --agent {result['agent']}"
        if result["action"] == "rename":
            again = f"python manage.py agent rename {result['agent']} {result['new']}"
            return again if result["dry_run"] else f"make your app send {result['new']}"
        if result["dry_run"]:
            return f"python manage.py agent delete {result['agent']}{' --force' if result['trained'] else ''}"
        return (
            "record or import decisions of another agent: python manage.py import_feedback FILE --agent SLUG"
        )
