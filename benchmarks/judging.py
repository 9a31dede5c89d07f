"""How often a judging round is wrong and how many judgements it takes, where the truth is known. Prints JSON.

Every round is looked at after each judgement and stopped at the first verdict "better" or "worse"; "not worse" counts
as given where it held at any look. `python benchmarks/judging.py --rounds 1000`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from rl.statistics.sequential import BETTER, NOT_WORSE, WORSE
from tests.support.judging_worlds import JudgingWorld, SimulatedRound, round_simulated

TIES = (0.0, 0.2, 0.4)
SHARES = (0.55, 0.6, 0.7, 0.8)


def simulated(world: JudgingWorld, rounds: int) -> list[SimulatedRound]:
    return [round_simulated(world, np.random.default_rng(seed)) for seed in range(rounds)]


def false_verdicts(world: JudgingWorld, wrong: set[str], rounds: int) -> dict[str, Any]:
    """Share of rounds in which a wrong verdict held at any look."""
    count = sum(bool(found.ever & wrong) for found in simulated(world, rounds))
    return wilson_interval(count, rounds).as_dict()


def power(world: JudgingWorld, rounds: int) -> dict[str, Any]:
    """Median judgements until "better", and the verdicts after at most 200 prompts."""
    found = simulated(world, rounds)
    taken = sorted(one.judgements if one.judgements is not None else 10**9 for one in found)
    median = taken[len(taken) // 2]
    within = Counter(one.verdict for one in found if (one.judgements or 10**9) <= 200 * world.raters)
    return {
        "median_judgements": None if median == 10**9 else median,
        "better_within_200_prompts": within[BETTER] / rounds,
        "worse": sum(one.verdict == WORSE for one in found) / rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="Rounds of each setting (default 1000)")
    rounds = parser.parse_args().rounds
    report: dict[str, Any] = {"rounds": rounds, "false": {}, "power": {}}
    for ties in TIES:
        said = f"{ties:.0%} ties"
        report["false"] |= {
            f"share 50 %, {said}: better or worse": false_verdicts(
                JudgingWorld(0.5, ties), {BETTER, WORSE}, rounds
            ),
            f"share 40 %, {said}: not worse or better": false_verdicts(
                JudgingWorld(0.4, ties), {BETTER, NOT_WORSE}, rounds
            ),
            f"share 45 %, {said}: better": false_verdicts(JudgingWorld(0.45, ties), {BETTER}, rounds),
        }
        for share in SHARES:
            world = JudgingWorld(share, ties, prompts=4_000)
            report["power"][f"share {share:.0%}, {said}"] = power(world, rounds)
    three = {"raters": 3, "noise": 0.2}
    report["false"]["share 50 %, three raters who err in 20 %"] = false_verdicts(
        JudgingWorld(0.5, **three), {BETTER, WORSE}, rounds
    )
    report["power"]["share 70 %, three raters who err in 20 %"] = power(
        JudgingWorld(0.7, prompts=4_000, **three), rounds
    )
    report["power"]["share 70 %, one rater who errs in 20 %"] = power(
        JudgingWorld(0.7, prompts=4_000, noise=0.2), rounds
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
