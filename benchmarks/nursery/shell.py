"""The newcomer's way in a shell, by the README's commands."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.nursery.agent import AGENT, data_lines
from benchmarks.nursery.server import ROOT


def command_time(name: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """Run a command as a log would see it: seconds, the longest silence and the line before it, the last line."""
    began = spoke = time.monotonic()
    silence, before, line = 0.0, "(start)", "(start)"
    process = subprocess.Popen(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    assert process.stdout is not None
    for text in itertools.chain(process.stdout, [""]):
        now = time.monotonic()
        if now - spoke > silence:
            silence, before = now - spoke, line
        spoke, line = now, text.strip() or line
        if text:
            sys.stderr.write(f"{now - began:7.1f}  {text.rstrip()[:150]}\n")
    code = process.wait()
    return {
        "step": name,
        "seconds": round(time.monotonic() - began, 1),
        "silence_s": round(silence, 1),
        "silent_after": before,
        "last": line,
        "code": code,
    }


def shell(home: Path) -> list[dict[str, Any]]:
    """The README's commands on the nursery's file."""
    lines = home / "waterings.jsonl"
    lines.write_text(data_lines(), "utf-8")
    environment = os.environ | {"RATCHET_HOME": str(home / "var"), "PYTHONUNBUFFERED": "1"}
    steps = [command_time("migrate", ["migrate", "--verbosity", "0"], environment)]

    def step(name: str, *arguments: str) -> dict[str, Any]:
        steps.append(command_time(name, list(arguments), environment))
        return steps[-1]

    step("import", "import_feedback", str(lines), "--agent", AGENT)
    step("dry run", "train_sft", "--agent", AGENT, "--dry-run")
    policy = re.search(rf"{AGENT}-v\d+", step("train", "train_sft", "--agent", AGENT)["last"])
    name = policy[0] if policy else f"{AGENT}-v1"
    step("judge", "evaluate_model", "--policy", name, "--compare-base")
    step("promote", "policy", "promote", name)
    step("export", "export_model", "--policy", name, "--format", "gguf", "--quantization", "q4_k_m")
    return steps
