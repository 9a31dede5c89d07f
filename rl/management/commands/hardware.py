"""What machine is this, which profile was chosen, and why."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser
from rich.table import Table

from backend.command import RatchetCommand
from rl import runs

SAID = {True: "yes", False: "no", None: "none"}


class Command(RatchetCommand):
    help = (
        "Show the hardware found, the profile and preset chosen for it, and the reason of each setting. "
        "Example: manage.py hardware --profile cpu_only"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--profile",
            metavar="P",
            help="auto, cpu_only, desktop_cpu or gpu: what it would come to (default: RATCHET_PROFILE). "
            "Example: --profile cpu_only",
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        return runs.hardware_detect(options["profile"]).as_dict()

    def show(self, result: dict[str, Any]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("setting", "value", "why"):
            table.add_column(column)
        for name, value in result.items():
            if name not in ("reasons", "measured", "gpus"):
                said = ", ".join(value) if isinstance(value, list) else SAID.get(value, str(value))
                table.add_row(name.replace("_", " "), said, result["reasons"].get(name, ""))
        for gpu in result["gpus"]:
            table.add_row("gpu", f"{gpu['name']}, {gpu['memory_gb']} GB", gpu["kind"])
        for name, value in result["measured"].items():
            unit = "" if "error" in name else " GFLOP/s"
            table.add_row(name.replace("_", " "), f"{value:.3g}{unit}", "matrix products, measured now")
        self.console.print(table)
