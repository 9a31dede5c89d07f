"""How often the gate is right, in worlds whose truth is known. Prints JSON; `--seeds` says how many of each."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from tests import gate_worlds
from tests.gate_worlds import World, promoted_in_a_row, refused_by, sheets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500, help="Worlds of each kind (default 500)")
    seeds = parser.parse_args().seeds
    report: dict[str, object] = {"seeds": seeds}
    for prompts in (50, 200, 400):
        world = replace(gate_worlds.EQUAL, prompts=prompts)
        through = sum(promoted_in_a_row(world, 20, np.random.default_rng(seed)) for seed in range(seeds))
        report[f"equal, {prompts} prompts: promoted in any of 20 attempts"] = wilson_interval(
            through, seeds
        ).as_dict()
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
