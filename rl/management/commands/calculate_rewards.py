"""Calculate what decisions earned, where that is missing or feedback has come since."""

from __future__ import annotations

import dataclasses
from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.reward_records import RewardsRefused, rewards_calculate


class Command(RatchetCommand):
    help = (
        "Calculate the rewards of decisions that have none yet, or on which something was said or measured since. "
        "What was calculated before stays as history. Example: manage.py calculate_rewards --agent-type filer"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--agent-type",
            "--agent",
            dest="agent",
            metavar="SLUG",
            help="Whose decisions (default: all agents'). Example: --agent-type filer",
        )
        parser.add_argument(
            "--all",
            action="store_true",
            dest="everything",
            help="Also those already calculated, after a change of weights or functions (default: pending alone).",
        )
        parser.add_argument(
            "--limit", type=int, metavar="N", help="At most so many (default: all). Example: --limit 1000"
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        if options["limit"] is not None and options["limit"] < 1:
            raise RewardsRefused(f"--limit takes a number of at least 1, found {options['limit']}")
        with self.bar("rewards") as bar:
            found = rewards_calculate(
                options["agent"],
                everything=options["everything"],
                limit=options["limit"],
                progress=bar.update,
            )
        return dataclasses.asdict(found)

    def show(self, result: dict[str, Any]) -> None:
        self.stdout.write(
            f"{result['calculated']:,} decisions rewarded, {result['written']:,} of them anew; "
            f"{result['pending']:,} still pending."
        )
        for agent, why in result["refused"].items():
            self.stdout.write(f"Not for {agent}: {why}")
