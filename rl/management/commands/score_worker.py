"""Score answers with reward models for the web processes, which start this command themselves."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.evaluation.scorer_process import scorer_run


class Command(RatchetCommand):
    help = (
        "Keep reward models in memory and answer POST /api/score/ for the web processes of this "
        "RATCHET_HOME; they start it when needed. Example: manage.py score_worker --idle 3600"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--idle",
            type=float,
            default=300.0,
            metavar="S",
            help="Seconds without a call after which it stops (default %(default)s). Example: --idle 3600",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        return {"ran": scorer_run(options["idle"])}

    def show(self, result: dict[str, Any]) -> None:
        self.stdout.write(
            "stopped: no call for a while"
            if result["ran"]
            else "another score worker runs for this RATCHET_HOME already"
        )
