"""Check this installation: what is wrong, and what to do."""

from __future__ import annotations

from typing import Any

from backend.command import CommandOptions, RatchetCommand
from rl.doctor import WRONG, diagnosis


class Command(RatchetCommand):
    help = (
        "Check settings, plugins, data folder, disk, database, migrations, workers, clocks, port, "
        "llama.cpp and the files of policies; report each problem with its remedy. Exits with 1 if "
        "anything is wrong. Example: manage.py doctor --port 8000"
    )

    class Options(CommandOptions):
        host: str = "127.0.0.1"
        """Address where the server listens (default 127.0.0.1). Example: 10.0.0.4"""
        port: int = 8000
        """Port of the server (default 8000). Example: --port 8001"""

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
