"""How often the gate is right, in worlds whose truth is known. Prints JSON; `--seeds` says how many of each."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates import CHAMPION, PASSED, gate_judge, rule_accuracy
from rl.statistics import wilson_interval
from tests import gate_worlds
from tests.gate_worlds import BOUNDS, EQUAL, World, evidence_of, promoted_in_a_row, refused_by, sheets

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


PAIRS_A_PROMPT = (
    (300, 1, 0.0),
    (400, 1, 0.0),
    (600, 1, 0.0),
    (300, 2, 0.3),
    (300, 2, 0.6),
    (300, 3, 0.3),
    (300, 3, 0.6),
)
"""Held-out prompts, rated pairs of each, and the chance that a further pair says what the first says."""


def promoted_first(world: World, seed: int) -> bool:
    """Whether the first candidate of a world gets through; the other rules are asked where accuracy passes."""
    found = evidence_of(world, rng(seed))
    accurate = rule_accuracy(found, BOUNDS, CHAMPION).outcome == PASSED
    return accurate and gate_judge(found, BOUNDS).passed


def heterogeneity(seeds: int) -> dict[str, object]:
    """Worlds in which prompts differ and raters are noisy."""
    report: dict[str, object] = {}
    for prompts, pairs, repeats in PAIRS_A_PROMPT:
        of = World(prompts=prompts, uneven=True, pairs=pairs, repeats=repeats)
        # of a true gain g raters who flip 15 % on average show 0.7 g
        for gain, words in ((0.1 / 0.7, "10 points better as raters see it"), (0.0, "no better")):
            passed = sum(promoted_first(replace(of, gain=gain), seed) for seed in range(seeds))
            name = f"prompts that differ, noisy raters, {prompts} prompts with {pairs} pairs (repeated {repeats:.0%}), "
            report[f"{name}{words}: promoted at the first attempt"] = wilson_interval(passed, seeds).as_dict()
    for pairs, repeats in ((1, 0.0), (3, 0.3), (3, 0.6)):
        of = World(prompts=200, uneven=True, pairs=pairs, repeats=repeats)
        through = sum(promoted_in_a_row(of, [200] * 20, rng(seed)) is not None for seed in range(seeds // 2))
        name = f"prompts that differ, noisy raters, 200 prompts with {pairs} pairs (repeated {repeats:.0%}), "
        report[f"{name}no better: promoted in any of 20 attempts"] = wilson_interval(
            through, seeds // 2
        ).as_dict()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="Worlds of each kind (default 500)")
    parser.add_argument(
        "--only-heterogeneity",
        action="store_true",
        help="Only worlds in which prompts differ and raters are noisy",
    )
    options = parser.parse_args()
    seeds = options.seeds
    report: dict[str, object] = {"seeds": seeds}
    report |= heterogeneity(seeds)
    if options.only_heterogeneity:
        print(json.dumps(report, indent=2))
        return
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
