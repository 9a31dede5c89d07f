"""Do dry runs foresee what then happens? Steps, minutes and peak memory of each method, foreseen and found.

    python benchmarks/estimates.py [--methods dpo,kto,sft,reward_model,grpo,ppo] [--scenarios 200] [--steps 30]
                                   [--repeats 3] [--home DIR]

For each method: `train_<method> --dry-run`, the same command without it, and the dry run again, on the bundled model
with simulated feedback; foreseen is the mean of the two, as a busy machine is not as busy all the time. `seconds` are
those of training as the run's record has them, `peak_gb` is the largest resident memory of the command's process,
weights, Python and Django included. `off` is foreseen over found, less one. Each figure is the median of the repeats,
`each` has the times of all. With --home, what was measured before is kept and not measured again. Prints one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

METHODS = ("dpo", "kto", "sft", "reward_model", "grpo", "ppo")


def manage(home: Path, *arguments: str) -> tuple[dict[str, Any], float]:
    """What a command printed, and the largest resident memory of its process, GB."""
    unwanted = ("DATABASE_URL", "RATCHET_CONFIG")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | {
        "RATCHET_HOME": str(home),
        "RATCHET_BASE_MODEL": "bundled",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "manage.py"), *arguments],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(arguments)} ended with status {status}")
    return json.loads(said) if said.strip() else {}, usage.ru_maxrss / 1e6


def once(method: str, home: Path, steps: int) -> dict[str, dict[str, float]]:
    """One run between two dry runs."""
    command = [
        f"train_{method}",
        "--agent",
        "widgets",
        "--config",
        "cpu",
        "--max-steps",
        str(steps),
        "--json",
    ]
    for file in (home / "cache").glob("reference*"):
        file.unlink()  # what an earlier run computed would be found again
    before, _ = manage(home, *command, "--dry-run")
    run, peak = manage(home, *command)
    after, _ = manage(home, *command, "--dry-run")
    foreseen = {
        "steps": before["estimated_steps"],
        "seconds": round(30 * (before["estimated_minutes"] + after["estimated_minutes"]), 1),
        "peak_gb": round(before["estimated_memory_gb"], 2),
    }
    found = {"steps": run["steps"], "seconds": run["seconds"], "peak_gb": round(peak, 2)}
    off = {name: round(foreseen[name] / found[name] - 1, 3) for name in found}
    return {"foreseen": foreseen, "found": found, "off": off}


def measured(method: str, home: Path, options: argparse.Namespace) -> dict[str, Any]:
    rounds = [once(method, home, options.steps) for _ in range(options.repeats)]
    middle = {
        what: {name: statistics.median(one[what][name] for one in rounds) for name in rounds[0][what]}
        for what in rounds[0]
    }
    return {**middle, "each": [one["off"]["seconds"] for one in rounds]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(METHODS), help=f"of {', '.join(METHODS)} (default all)")
    parser.add_argument("--scenarios", type=int, default=200, help="scenarios with feedback (default 200)")
    parser.add_argument("--steps", type=int, default=30, help="optimiser steps of each run (default 30)")
    parser.add_argument("--repeats", type=int, default=3, help="times each is measured (default 3)")
    parser.add_argument("--home", type=Path, help="folder to keep, and to go on in (default: temporary)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.home or Path(temporary)).absolute()
        kept = home / "estimates.json"
        if not (home / "db.sqlite3").exists():
            home.mkdir(parents=True, exist_ok=True)
            manage(home, "migrate", "--verbosity", "0")
            scenarios = str(options.scenarios)
            manage(home, "simulate", "widgets", "--scenarios", scenarios, "--rate", "simulated", "--json")
        results: dict[str, Any] = json.loads(kept.read_text("utf-8")) if kept.exists() else {}
        for method in options.methods.split(","):
            if method not in results:
                results[method] = measured(method, home, options)
                kept.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
                print(json.dumps({method: results[method]}), file=sys.stderr, flush=True)
        from rl.training.hardware import detect

        facts = {
            "benchmark": "estimates",
            "machine": detect().as_dict(),
            "python": platform.python_version(),
            "versions": {name: version(name) for name in ("torch", "transformers", "peft", "trl")},
            "scenarios": options.scenarios,
            "steps": options.steps,
            "repeats": options.repeats,
            "methods": results,
        }
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
