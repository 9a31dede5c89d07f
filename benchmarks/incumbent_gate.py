"""How the gate decides between an app's model and a candidate by known answers, in made-up worlds.

Prints JSON: power of the first comparison and of a second one after people rated what the two answer differently, error
over 20 attempts, and how many ratings the queue's order saves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from tests.support.incumbent_worlds import (
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
    worse = IncumbentWorld(incumbent=0.7, gain=-0.10, corrected=1.0)
    report["10 points worse"] = share(sum(opens_in_a_row(worse, seed) for seed in range(seeds)), seeds)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="Worlds of each kind (default 200)")
    parser.add_argument("--only", choices=["power", "errors", "order"], help="One part alone")
    options = parser.parse_args()
    parts = {"power": power, "errors": errors, "order": order}
    print(
        json.dumps(
            {name: part(options.seeds) for name, part in parts.items() if options.only in (None, name)},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
