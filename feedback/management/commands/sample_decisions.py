"""Draw random decisions for the rating queue, as a sample that represents all of them."""

from __future__ import annotations

from typing import Annotated

from django.core.management.base import CommandError

from backend.command import NEEDED, CommandOptions, RatchetCommand
from feedback.rating.requests import SampleDrawn, SampleRefused, sample_draw


class Options(CommandOptions):
    agent: Annotated[str, NEEDED]
    """Agent to draw from. Example: --agent support-bot"""
    count: int = 50
    """Decisions to draw (default 50). Example: --count 100"""
    days: int = 7
    """Draw from the last so many days (default 7). Example: --days 30"""


class Command(RatchetCommand[Options, SampleDrawn]):
    help = (
        "Draw random decisions of an agent, which the rating queue shows first; replaces the earlier sample. Their "
        "ratings represent all decisions; ratings that people chose to give do not. "
        "Example: manage.py sample_decisions --agent support-bot"
    )

    def work(self, options: Options) -> SampleDrawn:
        try:
            return sample_draw(options.agent, options.count, options.days)
        except SampleRefused as refusal:
            raise CommandError(str(refusal)) from refusal

    def show(self, result: SampleDrawn) -> None:
        self.stdout.write(
            f"{result.drawn:,} random decisions, of {result.among:,}, come first in the rating queue."
        )

    def next_step(self, result: SampleDrawn) -> str:
        return f"rate them at /rate/?agent={result.agent}"
