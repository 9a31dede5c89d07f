"""Whether error rates stay as promised while prompts come and the share held out falls. Prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")

import django

django.setup()

from rl.gates.rules import gate_judge  # noqa: E402
from rl.statistics import wilson_interval  # noqa: E402
from tests.support.split_worlds import BOUNDS, Growth, forgetful, looks_at, promoted_at  # noqa: E402

ARRIVALS = {
    "20 looks, 20 rated prompts before each": [20] * 20,
    "20 looks, 60 before each": [60] * 20,
    "100, then 10 before each of 19 looks": [100] + [10] * 19,
    "in bursts: 15, 200, 10, 10, 400, ...": [15, 200, 10, 10, 400] * 4,
    "doubling: 25, 25, 50, 100, ... 1,600": [25, 25, 50, 100, 200, 400, 800, 1600],
}
"""Rated prompts that come before each look at the holdout."""


GROUPS = {1: "groups of 1", 3: "groups of 3", 10: "groups of 10", 0: "groups of heavy-tailed sizes"}
"""Sizes of groups of near-identical prompts."""


def grouped(seeds: int) -> dict[str, object]:
    """Near-identical prompts, from the draw of the sides to the verdict: votes left, power, false promotions."""
    report: dict[str, object] = {}
    for group, words in GROUPS.items():
        for one_by_one in (False, True) if group != 1 else (False,):
            name = (
                f"{words}, {'sides drawn one by one (the mistake)' if one_by_one else 'sides drawn by group'}"
            )
            for prompts in (600, 3000):
                better = Growth([prompts], gain=0.1, memory=False, group=group, one_by_one=one_by_one)
                looks = [next(looks_at(better, seed)) for seed in range(seeds // 2)]
                report[f"{name}, {prompts} rated prompts: votes held out"] = {
                    "mean": sum(len(look.cases) for look in looks) / len(looks),
                    "n": len(looks),
                }
                passed = sum(gate_judge(look, BOUNDS).passed for look in looks)
                report[f"{name}, {prompts} rated prompts, 10 points better: promoted at the first look"] = (
                    wilson_interval(passed, len(looks)).as_dict()
                )
            for alike in (False, True):
                equal = Growth([60] * 20, alike, group=group, one_by_one=one_by_one)
                through = sum(promoted_at(equal, seed) is not None for seed in range(seeds))
                label = (
                    f"{name}, 20 looks, 60 before each, policies {'alike' if alike else 'unlike'}: promoted"
                )
                report[label] = wilson_interval(through, seeds).as_dict()
    return report


def worded(seeds: int) -> dict[str, object]:
    """Groups of three short prompts that differ in a number: looked for by words, and the same unseen."""
    report: dict[str, object] = {}
    for overlooked, words in ((False, "looked for"), (True, "overlooked (the mistake)")):
        equal = Growth([60] * 20, group=3, worded=not overlooked, overlooked=overlooked)
        through = sum(promoted_at(equal, seed) is not None for seed in range(seeds))
        better = Growth([600], gain=0.1, memory=False, group=3, worded=not overlooked, overlooked=overlooked)
        looks = [next(looks_at(better, seed)) for seed in range(seeds)]
        report[f"short groups of 3, {words}, 20 looks, 60 before each: promoted"] = wilson_interval(
            through, seeds
        ).as_dict()
        report[f"short groups of 3, {words}, 600 rated prompts: votes held out"] = {
            "mean": sum(len(look.cases) for look in looks) / len(looks),
            "n": seeds,
        }
        passed = sum(gate_judge(look, BOUNDS).passed for look in looks)
        report[
            f"short groups of 3, {words}, 600 rated prompts, 10 points better: promoted at the first look"
        ] = wilson_interval(passed, seeds).as_dict()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Series of each kind (default 1000)")
    parser.add_argument("--only-groups", action="store_true", help="Only worlds with near-identical prompts")
    parser.add_argument(
        "--only-worded", action="store_true", help="Only groups that are looked for in short prompts"
    )
    options = parser.parse_args()
    seeds = options.seeds
    report: dict[str, object] = {"seeds": seeds}
    if options.only_worded:
        print(json.dumps(report | worded(seeds), indent=2))
        return
    if options.only_groups:
        print(json.dumps(report | grouped(seeds), indent=2))
        return
    for said, arrivals in ARRIVALS.items():
        for alike in (False, True):
            growth = Growth(arrivals, alike)
            through = sum(promoted_at(growth, seed) is not None for seed in range(seeds))
            name = f"{said}, policies {'alike' if alike else 'unlike'}"
            report[name] = wilson_interval(through, seeds).as_dict()
    report |= grouped(seeds) | worded(min(seeds, 100))
    few, (said, arrivals) = min(seeds, 100), next(iter(ARRIVALS.items()))
    through = sum(promoted_at(Growth(arrivals), seed, forgetful) is not None for seed in range(few))
    report[f"{said}, sides drawn anew each time (the mistake)"] = wilson_interval(through, few).as_dict()
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
