"""Whether error rates stay as promised while prompts come and the share held out falls. Prints JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from tests.split_worlds import Growth, forgetful, promoted_at

ARRIVALS = {
    "20 looks, 20 rated prompts before each": [20] * 20,
    "20 looks, 60 before each": [60] * 20,
    "100, then 10 before each of 19 looks": [100] + [10] * 19,
    "in bursts: 15, 200, 10, 10, 400, ...": [15, 200, 10, 10, 400] * 4,
    "doubling: 25, 25, 50, 100, ... 1,600": [25, 25, 50, 100, 200, 400, 800, 1600],
}
"""Rated prompts that come before each look at the holdout."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Series of each kind (default 1000)")
    seeds = parser.parse_args().seeds
    report: dict[str, object] = {"seeds": seeds}
    for said, arrivals in ARRIVALS.items():
        for alike in (False, True):
            growth = Growth(arrivals, alike)
            through = sum(promoted_at(growth, seed) is not None for seed in range(seeds))
            name = f"{said}, policies {'alike' if alike else 'unlike'}"
            report[name] = wilson_interval(through, seeds).as_dict()
    few, (said, arrivals) = min(seeds, 100), next(iter(ARRIVALS.items()))
    through = sum(promoted_at(Growth(arrivals), seed, forgetful) is not None for seed in range(few))
    report[f"{said}, sides drawn anew each time (the mistake)"] = wilson_interval(through, few).as_dict()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
