"""How often the gate is right, in worlds whose truth is known. Prints JSON; `--seeds` says how many of each."""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates.rules import alpha_of_attempt, gate_judge
from rl.statistics import paired_difference, wilson_interval
from tests.support import gate_worlds
from tests.support.gate_worlds import (
    BOUNDS,
    EQUAL,
    Outcomes,
    World,
    evidence_from,
    outcomes_of,
    promoted_in_a_row,
    refused_by,
    sheets,
)

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

BOUNDED = 40
"""Worlds of which the bound is looked at, for each that is judged by the whole gate."""


def bound_above_zero(found: Outcomes, alpha: float) -> bool:
    """True where the lower bound of the accuracy difference is above 0, computed as in `rl.gates.effects`; the gate
    passes nothing else."""
    differences = found.differences
    if len(found.pairs) == 1:
        own, other = found.pairs[0]
        table = ((own & other).sum(), (own & ~other).sum(), (other & ~own).sum(), (~own & ~other).sum())
        return paired_difference(*map(int, table), 1 - 2 * alpha).low > 0
    error = differences.std(ddof=1) / len(differences) ** 0.5
    return bool(differences.mean() > student_quantile(alpha, len(differences)) * error)


@functools.cache
def student_quantile(alpha: float, n: int) -> float:
    return float(scipy.stats.t.isf(alpha, n - 1))


def promoted_first(world: World, seeds: int) -> dict[str, object]:
    """Share of first candidates that get through: of BOUNDED times as many worlds those whose bound lies above 0, times
    those of `seeds` such worlds that the whole gate lets through. The interval is of the product (delta method)."""
    alpha = alpha_of_attempt(BOUNDS.alpha, 1)
    worlds, above, judged, passed = BOUNDED * seeds, 0, 0, 0
    for seed in range(worlds):
        random = rng(seed)
        found = outcomes_of(world, random)
        if bound_above_zero(found, alpha):
            above += 1
            if judged < seeds:
                judged += 1
                passed += gate_judge(evidence_from(world, found, random), BOUNDS).passed
    first, then = wilson_interval(above, worlds), wilson_interval(passed, judged)
    assert first.value is not None
    assert then.value is not None
    share = first.value * then.value
    error = math.hypot(
        then.value * math.sqrt(first.value * (1 - first.value) / worlds),
        first.value * math.sqrt(then.value * (1 - then.value) / judged),
    )
    return {"value": share, "low": share - 1.96 * error, "high": share + 1.96 * error, "n": [worlds, judged]}


def promoted_in_twenty(world: World, random: np.random.Generator) -> bool:
    """True where the gate passes any of twenty candidates with independent outcomes."""
    for attempt in range(1, 21):
        found = outcomes_of(world, random)
        if (
            bound_above_zero(found, alpha_of_attempt(BOUNDS.alpha, attempt))
            and gate_judge(evidence_from(world, found, random, attempt), BOUNDS).passed
        ):
            return True
    return False


def heterogeneity(seeds: int) -> dict[str, object]:
    """Worlds in which prompts differ and raters are noisy."""
    report: dict[str, object] = {}
    for prompts, pairs, repeats in PAIRS_A_PROMPT:
        of = World(prompts=prompts, uneven=True, pairs=pairs, repeats=repeats)
        name = f"prompts that differ, noisy raters, {prompts} prompts with {pairs} pairs (repeated {repeats:.0%})"
        # of a true gain g raters who flip 15 % on average show 0.7 g
        for gain, words in ((0.1 / 0.7, "10 points better as raters see it"), (0.0, "no better")):
            report[f"{name}, {words}: promoted at the first attempt"] = promoted_first(
                replace(of, gain=gain), seeds
            )
        through = sum(promoted_in_twenty(of, rng(seed)) for seed in range(4 * seeds))
        report[f"{name}, no better: promoted in any of 20 attempts"] = wilson_interval(
            through, 4 * seeds
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
    report |= heterogeneity(max(seeds // 4, 25))
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
        ("FLIPPED", "accuracy"),
        ("HOSTILE", "raters"),
        ("LENGTHY", "length"),
        ("BROKEN", "slices"),
    ):
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
