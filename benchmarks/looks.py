"""False promotions over looks at a holdout that doubles each time, by the accuracy rule's exact test. Prints JSON.

Policies are no better than the champion and differ from it on `--discordant` of the prompts. `alike`: each says of the
prompts there were what the one before it said, the hardest case for a bound on a union.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates.rules import alpha_of_attempt
from rl.statistics import mcnemar_unconditional, wilson_interval

LOOKS, FIRST = 10, 40
ALPHA = 0.05


def promoted(random: np.random.Generator, discordant: float, *, alike: bool) -> bool:
    """True where any of ten looks, at 40, 80, ... 20,480 prompts, takes a policy that is no better for better."""
    wins = losses = size = 0
    for look in range(1, LOOKS + 1):
        if not alike:
            wins = losses = size = 0
        more = FIRST * 2 ** (look - 1) - size
        size += more
        new_wins, new_losses, _ = random.multinomial(more, [discordant / 2, discordant / 2, 1 - discordant])
        wins, losses = wins + int(new_wins), losses + int(new_losses)
        alpha = alpha_of_attempt(ALPHA, look)
        # 0.3 standard errors short of a normal test's level the exact one does not pass: it is not computed there
        far = wins - losses < (scipy.stats.norm.isf(alpha) - 0.3) * (wins + losses) ** 0.5
        if not far and mcnemar_unconditional(wins, losses, size) <= alpha:
            return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Series of each kind (default 1000)")
    parser.add_argument("--discordant", type=float, default=0.3, help="Share of prompts that differ (0.3)")
    options = parser.parse_args()
    report: dict[str, object] = {"spent": sum(alpha_of_attempt(ALPHA, k) for k in range(1, LOOKS + 1))}
    for alike in (False, True):
        through = sum(
            promoted(np.random.default_rng(seed), options.discordant, alike=alike)
            for seed in range(options.seeds)
        )
        report["alike" if alike else "unlike"] = wilson_interval(through, options.seeds).as_dict()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
