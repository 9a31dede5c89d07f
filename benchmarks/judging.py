"""How often a judging round is wrong and how many judgements it takes, where the truth is known. Prints JSON.

Every round is looked at after each judgement and stopped at the first verdict "better" or "worse"; "not worse" counts
as given where it held at any look. `python benchmarks/judging.py --rounds 1000`.

With --route: worlds of routing by confidence, how often the loss of quality exceeds the bound, and which share
is answered locally. `python benchmarks/judging.py --route --rounds 500`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit, logit
from scipy.stats import norm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.statistics import wilson_interval
from rl.statistics.routing import route_threshold
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


LOSS, ALPHA = 0.02, 0.05
WORSE_SHARES = {
    "right in 92 %, knows well what it does not know": (0.08, 3.0),
    "right in 90 %, knows it": (0.10, 2.5),
    "right in 90 %, hardly knows it": (0.10, 1.0),
    "right in 90 %, sure of anything": (0.10, 0.0),
    "right in 60 %, knows it": (0.40, 2.5),
}
"""World -> share of its answers that are worse, and by how many standard deviations their confidence is lower."""


def routed(share: float, distance: float, judged: int, rounds: int) -> dict[str, Any]:
    """Thresholds from `judged` prompts each, against the true loss and the true share answered locally."""
    broken, local = 0, []
    for seed in range(rounds):
        draw = np.random.default_rng(seed)
        worse = draw.random(judged) < share
        point = route_threshold(
            expit(draw.normal(size=judged) - distance * worse), worse.tolist(), loss=LOSS, alpha=ALPHA
        )
        if point is None:
            local.append(0.0)
            continue
        right, wrong = (norm.sf(logit(point.threshold) + shift) for shift in (0.0, distance))
        broken += share * wrong > LOSS
        local.append((1 - share) * right + share * wrong)
    return {
        "held": wilson_interval(rounds - broken, rounds).as_dict(),
        "answered_locally": float(np.mean(local)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000, help="Rounds of each setting (default 1000)")
    parser.add_argument("--route", action="store_true", help="Routing by confidence instead")
    options = parser.parse_args()
    rounds = options.rounds
    if options.route:
        found = {
            f"{name}; {judged} judged": routed(*world, judged, rounds)
            for name, world in WORSE_SHARES.items()
            for judged in (300, 600, 1200)
        }
        print(json.dumps({"worlds": rounds, "loss": LOSS, "alpha": ALPHA, "found": found}, indent=2))
        return
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
