"""Off-policy estimates in simulation: coverage and width of 95 % intervals, wrong propensities found. JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from rl.statistics.offpolicy import propensity_fault
from tests.support.experiment_worlds import LOG_WORLDS, coverage, draws

FAULTS = ("", "1.15", "1.3", "shuffled", "uniform", "sharper")
"""Faults of recorded propensities, as `tests.support.experiment_worlds.draws` takes them; none first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=int, default=500, help="Logs of each world and size (default 500)")
    options = parser.parse_args()
    for name, world in LOG_WORLDS.items():
        for decisions in (200, 400, 1000, 5000):
            logs = options.logs if decisions < 5000 else max(options.logs // 5, 50)
            found = coverage(world, logs, decisions)
            row = {
                method: {**wilson_interval(one.held, one.logs).as_dict(), "width": round(one.width, 3)}
                for method, one in found.items()
            }
            answered = max((one.logs for one in found.values()), default=0)
            print(
                json.dumps(
                    {"world": name, "decisions": decisions, "logs": logs, "answered": answered, **row}
                ),
                flush=True,
            )
    for known in (True, False):
        for fault in FAULTS:
            if known and fault[:1].isdigit():
                continue  # such a distribution does not sum to 1 and is refused when it is recorded
            for decisions in (200, 400, 1000, 5000):
                logs = options.logs if decisions < 5000 else max(options.logs // 5, 50)
                found = sum(
                    bool(propensity_fault(draws(seed, decisions, fault, known))) for seed in range(logs)
                )
                what = {"propensities": fault or "right", "all_known": known, "decisions": decisions}
                print(
                    json.dumps({**what, "found_at_fault": wilson_interval(found, logs).as_dict()}), flush=True
                )


if __name__ == "__main__":
    main()
