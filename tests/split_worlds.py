"""Made-up worlds in which rated prompts keep coming and no policy is better than its champion: what the split is tried
on, from the draw of the sides to the gate's verdict."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl.gate_sheets import Case, Evidence, GateBounds
from rl.gates import gate_judge
from rl.holdout import splits_drawn
from rl.judgements import Split

BOUNDS = GateBounds()
DISCORDANT = 0.3
"""Share of the prompts on which a policy and the champion differ, where it was not trained on the prompt."""

Draw = Callable[[Mapping[str, Split], list[str]], dict[str, Split]]
"""Sides known, all prompts there are now -> the sides of those that stand on none."""


@dataclass(frozen=True)
class Growth:
    """How rated prompts come: so many before each of the looks."""

    arrivals: Sequence[int]
    alike: bool = False
    """Whether a policy says of a prompt what the one before it said; otherwise nothing binds them."""
    memory: bool = True
    """Whether policies know every prompt by heart that any of them was trained on, and so are always right there."""


def as_ratchet_does(known: Mapping[str, Split], prompts: list[str]) -> dict[str, Split]:
    return splits_drawn(known, prompts, min_evidence=BOUNDS.min_evidence)


def forgetful(known: Mapping[str, Split], prompts: list[str]) -> dict[str, Split]:
    """The mistake: sides drawn anew each time, so that prompts change them."""
    again = {hashlib.sha256(f"{len(prompts)}:{name}".encode()).hexdigest(): name for name in prompts}
    drawn = splits_drawn({}, again.keys(), min_evidence=BOUNDS.min_evidence)
    return {again[name]: split for name, split in drawn.items()}


def promoted_at(growth: Growth, seed: int, draw: Draw = as_ratchet_does) -> int | None:
    """Which look, from 1, takes a policy that is no better for better; None where none does."""
    random = np.random.default_rng(seed)
    known: dict[str, Split] = {}
    trained: set[str] = set()
    prompts: list[str] = []
    total = sum(growth.arrivals)
    fate = random.random(total)
    for look, more in enumerate(growth.arrivals, 1):
        at = len(prompts)
        prompts += [hashlib.sha256(f"{seed}:{at + i}".encode()).hexdigest() for i in range(more)]
        known |= draw(known, prompts)
        trained |= {name for name in prompts if known[name] == "train"}
        said = fate if growth.alike else random.random(total)
        cases = []
        for name, luck in zip(prompts, said, strict=False):
            if known[name] == "holdout":
                by_heart = growth.memory and name in trained
                own = True if by_heart else luck < 0.7 - DISCORDANT / 2 or 1 - luck < DISCORDANT / 2
                cases.append(Case(own, luck < 0.7))
        evidence = Evidence("champion", cases, attempt=look)
        if gate_judge(evidence, BOUNDS).passed:
            return look
    return None
