"""Check this installation: what is wrong, and what to do."""

from __future__ import annotations

from dataclasses import dataclass

from backend.command import CommandOptions, RatchetCommand
from rl.doctor import WRONG, Diagnosis, diagnosis


class Options(CommandOptions):
    host: str = "127.0.0.1"
    """Address where the server listens (default 127.0.0.1). Example: 10.0.0.4"""
    port: int = 8000
    """Port of the server (default 8000). Example: --port 8001"""


@dataclass(frozen=True)
class Checkup:
    wrong: int
    findings: list[Diagnosis]


class Command(RatchetCommand[Options, Checkup]):
    writes = False
    help = (
        "Check settings, plugins, data folder, disk, database, migrations, workers, clocks, port, "
        "llama.cpp and the files of policies; report each problem with its remedy. Exits with 1 if "
        "anything is wrong. Example: manage.py doctor --port 8000"
    )

    def work(self, options: Options) -> Checkup:
        findings = diagnosis(options.host, options.port)
        wrong = [finding for finding in findings if finding.level == WRONG]
        self.failed = bool(wrong)
        return Checkup(len(wrong), findings)

    def show(self, result: Checkup) -> None:
        for finding in result.findings:
            self.stdout.write(f"{finding.level:<7} {finding.part}: {finding.found}")
            self.stdout.write(f"        -> {finding.next_step}")
        if not result.wrong:
            self.stdout.write("nothing is wrong")

    def next_step(self, result: Checkup) -> str:
        return next((f.next_step for f in result.findings), "")
