"""How often the gate is right, in worlds whose truth is known. Prints JSON; `--seeds` says how many of each."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from tests import gate_worlds
from tests.gate_worlds import EQUAL, World, promoted_in_a_row, refused_by, sheets

HOLDOUTS = {
    "50 prompts": [50] * 20,
    "200 prompts": [200] * 20,
    "400 prompts": [400] * 20,
    "300 prompts and 10 more each time": range(300, 500, 10),
    "40 prompts and 40 more each time": range(40, 840, 40),
}
"""Sizes of the holdout at each of twenty attempts."""


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="Worlds of each kind (default 500)")
    seeds = parser.parse_args().seeds
    report: dict[str, object] = {"seeds": seeds}
    for said, sizes in HOLDOUTS.items():
        through = sum(promoted_in_a_row(EQUAL, sizes, rng(seed)) is not None for seed in range(seeds))
        report[f"equal, {said}: promoted in any of 20 attempts"] = wilson_interval(through, seeds).as_dict()
    sizes = range(300, 350, 10)
    for alike, said in ((True, "alike"), (False, "unlike")):
        at = [promoted_in_a_row(World(gain=0.10), sizes, rng(seed), alike=alike) for seed in range(seeds)]
        for k in (1, 2, 3, 5):
            through = sum(found is not None and found <= k for found in at)
            name = f"10 points better, 300 prompts and 10 more with each retrain, {said}: promoted within {k} attempts"
            report[name] = wilson_interval(through, seeds).as_dict()
    for prompts in (100, 200, 300, 400, 600):
        passed = sum(sheet.passed for sheet in sheets(World(gain=0.10, prompts=prompts), seeds))
        report[f"10 points better, {prompts} prompts: promoted at the first attempt"] = wilson_interval(
            passed, seeds
        ).as_dict()
    for prompts in (300, 400, 600):
        # of a true gain g raters who flip 15 % on average show 0.7 g
        for gain, words in ((0.1 / 0.7, "10 points better as raters see it"), (0.0, "no better")):
            found = sheets(World(gain=gain, prompts=prompts, uneven=True), seeds)
            passed = sum(sheet.passed for sheet in found)
            name = f"prompts that differ, noisy raters, {prompts} prompts, {words}: promoted at the first attempt"
            report[name] = wilson_interval(passed, seeds).as_dict()
    for name, reason in (
        ("FLIPPED", "accuracy"), ("HOSTILE", "raters"), ("LENGTHY", "length"), ("BROKEN", "slices"),
    ):  # fmt: skip
        world = getattr(gate_worlds, name)
        found = sheets(world, seeds)
        report[name.lower()] = {
            "world": asdict(world),
            "refused": sum(not sheet.passed for sheet in found) / seeds,
            f"refused by {reason}": refused_by(found, reason),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
