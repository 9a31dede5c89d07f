"""Check this installation: what is wrong, and what to do."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from backend.command import RatchetCommand
from rl.doctor import WRONG, diagnosis


class Command(RatchetCommand):
    help = (
        "Check settings, plugins, data folder, disk, database, migrations, workers, clocks, port, "
        "llama.cpp and the files of policies; report each problem with its remedy. Exits with 1 if "
        "anything is wrong. Example: manage.py doctor --port 8000"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--host",
            default="127.0.0.1",
            help="Address where the server listens (default 127.0.0.1). Example: 10.0.0.4",
        )
        parser.add_argument(
            "--port", type=int, default=8000, help="Port of the server (default 8000). Example: --port 8001"
        )

    def work(self, options: dict[str, Any]) -> dict[str, Any]:
        findings = diagnosis(options["host"], options["port"])
        wrong = [finding for finding in findings if finding.level == WRONG]
        self.failed = bool(wrong)
        return {"wrong": len(wrong), "findings": [finding.as_dict() for finding in findings]}

    def show(self, result: dict[str, Any]) -> None:
        for finding in result["findings"]:
            self.stdout.write(f"{finding['level']:<7} {finding['part']}: {finding['found']}")
            self.stdout.write(f"        -> {finding['next_step']}")
        if not result["wrong"]:
            self.stdout.write("nothing is wrong")

    def next_step(self, result: dict[str, Any]) -> str:
        return next((f["next_step"] for f in result["findings"]), "")
