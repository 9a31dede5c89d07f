"""Error rates and power of the gate on each kind of held-out evidence, in worlds whose truth is known. JSON lines.

Candidates are judged by the gate's own rules on simulated log-probabilities, figures and verdicts; `--seeds` says how
many worlds of each. `benchmarks/gates.py` does the same for pairs and for what only looks better.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rl.gates.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.statistics import wilson_interval
from tests.support.evidence_worlds import KindWorld, drawn_of, opens, promoted_in

WORLDS = {
    PAIRS: KindWorld(PAIRS),
    LABELS: KindWorld(LABELS),
    CORRECTIONS: KindWorld(CORRECTIONS),
    TESTS: KindWorld(TESTS),
    OUTCOMES: KindWorld(OUTCOMES, levels=0),
    REWARDS: KindWorld(REWARDS),
}
"""Kind of evidence -> its plain world: thumbs for labels, any number in [0, 1] for outcomes."""

HARD = {
    "pairs, three a prompt": KindWorld(PAIRS, answers=3),
    "pairs, one to ten a prompt (Pareto, index 1.1)": KindWorld(PAIRS, answers=0),
    "labels, log-ratios with heavy tails (t, 2 degrees)": KindWorld(LABELS, tails=2),
    "labels, 90 % liked": KindWorld(LABELS, liked=0.9),
    "labels, three answers a prompt that move together": KindWorld(LABELS, answers=3),
    "labels, liked answers spread four times as far": KindWorld(LABELS, spread=4),
    "labels, the same, 90 % disliked": KindWorld(LABELS, spread=4, liked=0.1),
    "labels, five stars": KindWorld(LABELS, levels=5),
    "labels, scores of eleven steps": KindWorld(LABELS, levels=11),
    "outcomes, one in ten succeeds": KindWorld(OUTCOMES, liked=0.1),
    "corrections, heavy tails (t, 2 degrees)": KindWorld(CORRECTIONS, tails=2),
    "corrections, a little better on nine in ten, much worse on one": KindWorld(CORRECTIONS, skew=0.1),
    "rewards, a little better on nine in ten, nothing on one": KindWorld(REWARDS, skew=0.1),
    "rewards, a little better on 98 %, nothing on 2 %": KindWorld(REWARDS, skew=0.02),
}
"""Worlds in which a test that trusts its model would err."""

Promoted = Callable[[np.random.Generator], Any]


def share(seeds: int, promoted: Promoted) -> dict[str, Any]:
    through = sum(bool(promoted(np.random.default_rng(seed))) for seed in range(seeds))
    return wilson_interval(through, seeds).as_dict()


def worlds(seeds: int) -> Iterator[tuple[str, int, Promoted]]:
    """Names of worlds, how many of each, and whether a candidate of one gets through."""
    for kind, world in WORLDS.items():
        for prompts in (50, 200, 400):
            of = KindWorld(**{**vars(world), "prompts": prompts})
            name = f"{kind}, no better, {prompts} prompts: promoted in any of 20 attempts"
            yield name, seeds, functools.partial(promoted_in, of)
    for name, world in HARD.items():
        yield (
            f"{name}, no better, 200 prompts: promoted in any of 20 attempts",
            seeds,
            functools.partial(promoted_in, world),
        )
    yield from grouped(seeds)
    for kind, world in WORLDS.items():
        of = KindWorld(**{**vars(world), "gain": 0.2})
        name = f"{kind}, 20 points better, feedback shuffled, 200 prompts: promoted in any of 20 attempts"
        yield name, seeds, functools.partial(promoted_in, of, shuffle=True)
    for kind, world in WORLDS.items():
        for gain in (0.1, 0.2):
            for prompts in (50, 100, 200, 400):
                of = KindWorld(**{**vars(world), "gain": gain, "prompts": prompts})
                name = f"{kind}, {100 * gain:.0f} points better, {prompts} prompts: promoted at the first attempt"
                yield name, max(seeds // 2, 50), functools.partial(first, of)


def grouped(seeds: int) -> Iterator[tuple[str, int, Promoted]]:
    """Worlds in which prompts come in groups that are near-identical, 600 prompts each; power beside."""
    kinds = {kind: WORLDS[kind] for kind in (PAIRS, LABELS, CORRECTIONS)}
    kinds["pairs, one to ten a prompt"] = KindWorld(PAIRS, answers=0)
    for kind, plain in kinds.items():
        for groups in ("1", "3", "10", "heavy"):
            world = KindWorld(**{**vars(plain), "prompts": 600, "groups": groups})
            name = f"{kind}, 600 prompts in groups of {groups}"
            yield (
                f"{name}, no better: promoted in any of 20 attempts",
                seeds,
                functools.partial(promoted_in, world),
            )
            better = KindWorld(**{**vars(world), "gain": 0.1})
            yield (
                f"{name}, 10 points better: at the first attempt",
                max(seeds // 2, 50),
                functools.partial(first, better),
            )
            if groups != "1":
                blind = KindWorld(**{**vars(world), "told": False})
                name = (
                    f"{name}, not known to the gate (the mistake), no better: promoted in any of 20 attempts"
                )
                yield name, max(seeds // 4, 50), functools.partial(promoted_in, blind)


def first(world: KindWorld, random: np.random.Generator) -> bool:
    """Whether the first candidate of a world gets through."""
    return opens(world.kind, drawn_of(world, random), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="Worlds of each kind (default 1000)")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only worlds whose name holds this text")
    options = parser.parse_args()
    for name, seeds, promoted in worlds(options.seeds):
        if options.only in name:
            print(json.dumps({"world": name, **share(seeds, promoted)}), flush=True)


if __name__ == "__main__":
    main()
