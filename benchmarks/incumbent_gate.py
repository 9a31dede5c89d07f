"""How the gate decides between an app's model and a candidate by known answers, in made-up worlds.

Prints JSON: power of the first comparison and of a second one after people rated what the two answer differently, error
over 20 attempts, candidates that are worse, and how many ratings the queue's order saves.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates.effects import TableEffect
from rl.gates.report import GateBounds
from rl.gates.rules import CHALLENGER, alpha_of_attempt, gate_judge
from rl.statistics import wilson_interval
from tests.support.incumbent_worlds import (
    ATTEMPTS,
    IncumbentWorld,
    candidate_of,
    incumbent_of,
    judged,
    opens,
    opens_in_a_row,
    ratings_until_verdict,
)

CORRELATIONS = (0.3, 0.5, 0.6, 0.7)
"""Phi coefficients of being right: 0 for independent models; hard prompts are hard for both, which raises it."""


def share(hits: int, n: int) -> dict[str, Any]:
    return wilson_interval(hits, n).as_dict()


def opens_after_asking(world: IncumbentWorld, seed: int) -> bool:
    """True if the gate opens at the first look, or at a second one after people rated where the two differ."""
    random = np.random.default_rng(seed)
    found = candidate_of(world, incumbent_of(world, random), random)
    return judged(found).passed or judged(found.asked(found.differ & ~found.settled), 2).passed


def power(seeds: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for gain, prompts in ((0.10, 150), (0.15, 60)):
        for incumbent in (0.55, 0.7, 0.8):
            for correlation in CORRELATIONS:
                for corrected in (0.5, 0.8, 1.0):
                    world = IncumbentWorld(prompts, incumbent, gain, correlation, corrected=corrected)
                    name = f"{100 * gain:.0f} points, {prompts} rated, incumbent {incumbent:.0%}, phi {correlation}, "
                    name += f"{corrected:.0%} of thumbs down corrected"
                    report[name] = {
                        "first look": share(sum(opens(world, seed) for seed in range(seeds)), seeds),
                        "after asking": share(
                            sum(opens_after_asking(world, seed) for seed in range(seeds)), seeds
                        ),
                    }
    return report


def errors(seeds: int) -> dict[str, Any]:
    """Share of series of 20 candidates that are no better of which any is promoted."""
    ratings = {
        "all rated and corrected": IncumbentWorld(corrected=1.0),
        "all rated, half corrected": IncumbentWorld(corrected=0.5),
        "three in ten rated by chance": IncumbentWorld(200, rated_right=0.3, rated_wrong=0.3, corrected=1.0),
        "wrong answers rated twice as often": IncumbentWorld(rated_right=0.5, corrected=1.0),
        "wrong answers rated three times as often": IncumbentWorld(
            200, rated_right=0.3, rated_wrong=0.9, corrected=1.0
        ),
    }
    report = {}
    for incumbent in (0.55, 0.80, 0.95):
        for name, world in ratings.items():
            found = IncumbentWorld(**{**vars(world), "incumbent": incumbent})
            hits = sum(opens_in_a_row(found, seed) for seed in range(seeds))
            report[f"incumbent {incumbent:.0%}, {name}"] = share(hits, seeds)
    return report


def worse(seeds: int) -> dict[str, Any]:
    """Candidates 10 points worse than the incumbent and 30 better than the base: series of 20, and whether the base as
    opponent would let the first one through."""
    ratings: dict[str, dict[str, float]] = {
        "all rated": {},
        "half of the ratings at random": {"noise": 0.5},
        "half of the prompts not rated": {"rated_right": 0.5, "rated_wrong": 0.5},
    }
    report = {}
    for incumbent in (0.55, 0.7, 0.8, 0.95):
        for name, fields in ratings.items():
            world = IncumbentWorld(incumbent=incumbent, gain=-0.10, corrected=1.0, **fields)
            base = replace(world, incumbent=incumbent - 0.4, gain=0.3)
            report[f"incumbent {incumbent:.0%}, {name}"] = {
                "any of 20 promoted": share(sum(opens_in_a_row(world, seed) for seed in range(seeds)), seeds),
                "first against the base": share(sum(opens(base, seed) for seed in range(seeds)), seeds),
            }
    return report


def order(seeds: int) -> dict[str, Any]:
    """Median ratings until the gate opens to a candidate 15 points better that nobody's ratings settle yet."""
    report: dict[str, Any] = {}
    for correlation in (0.5, 0.7):
        world = IncumbentWorld(200, 0.7, 0.15, correlation, rated_right=0.15, rated_wrong=0.15, corrected=1.0)
        found = [ratings_until_verdict(world, seed) for seed in range(seeds)]
        counts = [one for one in found if one is not None]
        first, chance = (np.array(column) for column in zip(*counts, strict=True))
        report[f"phi {correlation}"] = {
            "what would change the verdict first": float(np.median(first)),
            "by chance": float(np.median(chance)),
            "share of ratings": float(np.median(first / chance)),
            "at most half the ratings": share(int((first <= chance / 2).sum()), len(counts)),
            "opened": len(counts),
        }
    return report


MARGIN = 0.05
"""Loss that `not_inferior` must rule out."""


def shown_not_inferior(world: IncumbentWorld, random: np.random.Generator, attempts: int) -> bool:
    """True if the accuracy rule finds any of `attempts` candidates not inferior, on the answers of one incumbent.

    Counts are drawn in place of answers, with the conditional shares of `candidate_of`: 20 attempts take milliseconds.
    """
    q, p = world.incumbent, world.incumbent + world.gain
    shared = min(world.correlation * (p * (1 - p) * q * (1 - q)) ** 0.5, min(p, q) - p * q)
    right = int(random.binomial(world.prompts, q))
    for attempt in range(1, attempts + 1):
        both = int(random.binomial(right, min(p + shared / q, 1.0)))
        wins = int(random.binomial(world.prompts - right, max(p - shared / (1 - q), 0.0)))
        effect = TableEffect(both, wins, right - both, world.prompts - right - wins)
        alpha = alpha_of_attempt(GateBounds().alpha, attempt)
        if effect.interval(1 - 2 * alpha).low > -MARGIN and effect.not_inferior(MARGIN) <= alpha:
            return True
    return False


def not_inferior(seeds: int) -> dict[str, Any]:
    """Candidates that lose exactly the margin, series of 20; power at the first attempt; and how often the challenger's
    rule lets a candidate 10 points worse through at 30 prompts."""
    report: dict[str, Any] = {}
    for prompts in (200, 500, 1000):
        for incumbent in (0.7, 0.95):
            for correlation in (0.3, 0.5, 0.7):

                def found(gain: float, attempts: int, *facts: float) -> dict[str, Any]:
                    world = IncumbentWorld(int(facts[0]), facts[1], gain, facts[2])
                    draws = (np.random.default_rng(seed) for seed in range(seeds))
                    return share(sum(shown_not_inferior(world, one, attempts) for one in draws), seeds)

                facts = (prompts, incumbent, correlation)
                report[f"{prompts} prompts, incumbent {incumbent:.0%}, phi {correlation}"] = {
                    "any of 20 at a loss of the margin": found(-MARGIN, ATTEMPTS, *facts),
                    **{f"{100 * gain:+.0f} points": found(gain, 1, *facts) for gain in (-0.02, 0.0, 0.02)},
                }
    world, passed = IncumbentWorld(30, 0.7, -0.1, 0.5, corrected=1.0), 0
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        candidate = candidate_of(world, incumbent_of(world, random), random)
        passed += gate_judge(candidate.evidence(), GateBounds(), CHALLENGER).passed
    report["challenger's rule, 10 points worse, 30 prompts"] = share(passed, seeds)
    return report


PARTS = {"power": power, "errors": errors, "worse": worse, "order": order, "not_inferior": not_inferior}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="Worlds of each kind (default 200)")
    parser.add_argument("--only", choices=list(PARTS), help="One part alone")
    options = parser.parse_args()
    print(
        json.dumps(
            {name: part(options.seeds) for name, part in PARTS.items() if options.only in (None, name)},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
