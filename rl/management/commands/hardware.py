"""What machine is this, which profile was chosen, and why."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from backend.command import RatchetCommand
from rl import runs


class Command(RatchetCommand):
    help = "Show the hardware found, the preset chosen for it, and the reason of each setting."

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        return runs.hardware_detect().as_dict()

    def show(self, result: dict[str, Any]) -> None:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("setting", "value", "why"):
            table.add_column(column)
        for name, value in result.items():
            if name not in ("reasons", "measured"):
                table.add_row(name, str(value), result["reasons"].get(name, ""))
        for name, value in result["measured"].items():
            table.add_row(name, f"{value:.4g}", "measured")
        self.console.print(table)
