"""Draw random decisions for the rating queue, as a sample that represents all of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.core.management.base import CommandError, CommandParser

from backend.command import CommandOptions, RatchetCommand
from feedback.rating.requests import SampleRefused, sample_draw


class Command(RatchetCommand):
    help = (
        "Draw random decisions of an agent, which the rating queue shows first; replaces the earlier sample. Their "
        "ratings represent all decisions; ratings that people chose to give do not. "
        "Example: manage.py sample_decisions --agent support-bot"
    )

    class Options(CommandOptions):
        count: int = 50
        """Decisions to draw (default 50). Example: --count 100"""
        days: int = 7
        """Draw from the last so many days (default 7). Example: --days 30"""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--agent", required=True, help="Agent to draw from. Example: --agent support-bot")

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        try:
            return asdict(sample_draw(options["agent"], options["count"], options["days"]))
        except SampleRefused as refusal:
            raise CommandError(str(refusal)) from refusal

    def show(self, result: dict[str, Any]) -> None:
        self.stdout.write(
            f"{result['drawn']:,} random decisions, of {result['among']:,}, come first in the rating queue."
        )

    def next_step(self, result: dict[str, Any]) -> str:
        return f"rate them at /rate/?agent={result['agent']}"
