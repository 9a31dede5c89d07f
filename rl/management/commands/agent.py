"""Delete an agent, or set its base model."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from typing import Annotated

from django.core.management.base import CommandError, CommandParser

from backend.command import BY_HAND, CommandOptions, RatchetCommand, Result, options_add
from feedback.agents import agent_delete
from feedback.erasure.withdrawals import trained_text
from feedback.selectors import SLUG_PATTERN
from rl.base_models.service import agent_base_model, base_model_set
from rl.base_models.sources import SourceRefused
from rl.management.options import base_model_field, base_model_given


class SetOptions(CommandOptions):
    agent: str
    """AGENT: The agent's slug."""
    base_model: str | None = base_model_field(
        "--base-model",
        "Base model that is trained, evaluated against, and answers before there is a champion; none removes the "
        "setting",
        "print the present one",
    )


class DeleteOptions(CommandOptions):
    agent: str
    """AGENT: The agent's slug."""
    dry_run: bool = False
    """Print what would be deleted; delete nothing."""
    force: bool = False
    """Delete its runs and policies too (default: refuse if there are any)."""


ACTIONS: dict[str, tuple[str, type[CommandOptions]]] = {
    "delete": ("Delete an agent and all its data. Example: agent delete filer --dry-run", DeleteOptions),
    "set": (
        "Set or show an agent's base model. Example: agent set support-bot --base-model smollm2",
        SetOptions,
    ),
}
"""Action -> help and options."""


class Options(CommandOptions):
    """Those of every action."""

    action: Annotated[str, BY_HAND]
    agent: Annotated[str, BY_HAND]
    base_model: Annotated[str | None, BY_HAND] = None
    dry_run: Annotated[bool, BY_HAND] = False
    force: Annotated[bool, BY_HAND] = False


class Command(RatchetCommand[Options, Result]):
    help = (
        "Set the base model of an agent, or delete it with its decisions, settings and policies. "
        "Deleting an agent that has runs or policies needs --force. Example: manage.py agent set support-bot "
        "--base-model smollm2"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        actions = parser.add_subparsers(dest="action", required=True, metavar="set|delete")
        for action, (text, options) in ACTIONS.items():
            sub = actions.add_parser(action, help=text)
            options_add(sub, options)
            again = "The same as --json before the action."
            sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=again)

    def work(self, options: Options) -> Result:
        if options.action == "set":
            return {"action": "set", **self._base(options.agent, options.base_model)}
        gone = agent_delete(options.agent, actor="agent delete", dry_run=options.dry_run, force=options.force)
        return {"action": "delete", **asdict(gone)}

    def _base(self, agent: str, text: str | None) -> Result:
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

    def show(self, result: Result) -> None:
        if result["action"] == "set":
            self.stdout.write(
                f"{result['agent']} uses the base model {result['base_model']} ({result['origin']})"
            )
            return
        dry = result["dry_run"]
        self.stdout.write(f"{'Would delete' if dry else 'Deleted'} {result['agent']}:")
        for name, count in result["rows"].items():
            self.stdout.write(f"  {count:,} {name}")
        for path in result["files"]:
            self.stdout.write(f"  {path}")
        if result.get("trained"):
            self.stdout.write(f"  {trained_text(result['trained'], 'for it')}")

    def next_step(self, result: Result) -> str:
        if result["action"] == "set":
            return f"python manage.py run_pipeline --agent {result['agent']}"
        if result["dry_run"]:
            return f"python manage.py agent delete {result['agent']}{' --force' if result['trained'] else ''}"
        return (
            "record or import decisions of another agent: python manage.py import_feedback FILE --agent SLUG"
        )
