"""How often the gate is right on each kind of held-out evidence, in worlds whose truth is known. Prints JSON lines.

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

from rl.evidence_kinds import CORRECTIONS, LABELS, PAIRS, TESTS
from rl.gates import gate_judge
from rl.statistics import wilson_interval
from tests.evidence_worlds import KindWorld, evidence_of, promoted_in, shuffled_promoted_in
from tests.gate_worlds import BOUNDS

FORMS = (LABELS, CORRECTIONS, TESTS)
"""One kind of each form of evidence: outcomes are judged as labels are, rewards as what people wrote, pairs as
tests."""

HARD = {
    "log-ratios with heavy tails (t, 2 degrees)": KindWorld(LABELS, tails=2),
    "90 % liked": KindWorld(LABELS, liked=0.9),
    "three answers a prompt that move together": KindWorld(LABELS, answers=3),
    "log-ratios of liked answers spread four times as far": KindWorld(LABELS, spread=4),
    "the same, 90 % disliked": KindWorld(LABELS, spread=4, liked=0.1),
    "stars": KindWorld(LABELS, levels=5),
    "written, differences with heavy tails (t, 2 degrees)": KindWorld(CORRECTIONS, tails=2),
}
"""Worlds in which a test that trusts its model would err."""


def share(seeds: int, promoted: Callable[[np.random.Generator], Any]) -> dict[str, Any]:
    through = sum(bool(promoted(np.random.default_rng(seed))) for seed in range(seeds))
    return wilson_interval(through, seeds).as_dict()


def worlds(seeds: int) -> Iterator[tuple[str, int, Callable[[np.random.Generator], Any]]]:
    """Name, number of worlds, and whether a candidate of one gets through."""
    for kind in FORMS:
        for prompts in (50, 200, 400):
            world = KindWorld(kind, prompts=prompts)
            name = f"{kind}, no better, {prompts} prompts: promoted in any of 20 attempts"
            yield name, seeds, functools.partial(promoted_in, world)
    for said, world in HARD.items():
        name = f"{said}, no better, 200 prompts: promoted in any of 20 attempts"
        yield name, seeds, functools.partial(promoted_in, world)
    for kind in (PAIRS, *FORMS):
        world = KindWorld(kind, prompts=200, gain=0.2)
        name = f"{kind}, 20 points better, feedback shuffled, 200 prompts: promoted in any of 20 attempts"
        yield name, seeds, functools.partial(shuffled_promoted_in, world)
    for kind in FORMS:
        for gain in (0.1, 0.2, 0.3):
            for prompts in (30, 50, 100, 200, 300, 400):
                world = KindWorld(kind, prompts=prompts, gain=gain)
                name = f"{kind}, {100 * gain:.0f} points better, {prompts} prompts: promoted at the first attempt"
                yield name, max(seeds // 3, 50), functools.partial(first, world)


def first(world: KindWorld, random: np.random.Generator) -> bool:
    """Whether the first candidate of a world gets through."""
    return gate_judge(evidence_of(world, random), BOUNDS).passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=300, help="Worlds of each kind (default 300)")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only worlds whose name holds this text")
    options = parser.parse_args()
    for name, seeds, promoted in worlds(options.seeds):
        if options.only in name:
            print(json.dumps({"world": name, **share(seeds, promoted)}), flush=True)


if __name__ == "__main__":
    main()
