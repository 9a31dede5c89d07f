"""Made-up held-out evidence of every kind, whose truth is known: log-probabilities and figures, judged by the real
rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy

from rl.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.gate_sheets import Case, Evidence, Item, Rated
from rl.gates import attempt_number, gate_judge
from tests.gate_worlds import BOUNDS


@dataclass(frozen=True)
class KindWorld:
    """How a candidate differs from its rival on held-out evidence of one kind."""

    kind: str
    prompts: int = 200
    gain: float = 0.0
    """True gain in points / 100: of accuracy, of concordance over a coin, or of the share of prompts on which it does
    better than its rival over one half."""
    liked: float = 0.6
    """Share of thumbs up; of scores, their mean."""
    levels: int = 2
    """Values a rating takes: 2 thumbs, 5 stars."""
    answers: int = 1
    """Rated answers to each prompt, whose log-probabilities move together."""
    tails: float = 0.0
    """Degrees of freedom of Student's t for the log-ratios, 0 for the normal distribution."""
    spread: float = 1.0
    """How many times as far the log-ratios of liked answers spread."""


def noise(world: KindWorld, random: np.random.Generator, size: int | tuple[int, ...]) -> np.ndarray:
    return random.standard_t(world.tails, size) if world.tails else random.standard_normal(size)


def rated(world: KindWorld, random: np.random.Generator) -> list[Item]:
    """Values drawn by taste, shifts of log-probability by how the candidate was trained."""
    shape = (world.prompts, world.answers)
    if world.levels == 2:
        values = (random.random(shape) < world.liked).astype(float)
    else:
        values = random.binomial(world.levels - 1, world.liked, shape) / (world.levels - 1)
    # a normal shift of this size makes P(liked higher) = 1/2 + gain
    size = np.sqrt(2) * scipy.stats.norm.ppf(0.5 + world.gain)
    together = noise(world, random, (world.prompts, 1)) if world.answers > 1 else 0.0
    own = noise(world, random, shape)
    drawn = (own + together) / np.sqrt(2) if world.answers > 1 else own
    drawn = drawn * np.where(values > 0.5, world.spread, 1.0)
    shifts = drawn + size * (values - 0.5)
    return [
        Rated(f"p{i}", float(values[i, j]), float(shifts[i, j]))
        for i in range(world.prompts)
        for j in range(world.answers)
    ]


def right_or_wrong(world: KindWorld, random: np.random.Generator) -> list[Item]:
    """Both sides on the same prompts, differing on three in ten."""
    discordant = max(0.3, world.gain)
    draw, same = random.random(world.prompts), random.random(world.prompts) < 0.6
    wins, losses = draw < (discordant + world.gain) / 2, draw > 1 - (discordant - world.gain) / 2
    return [
        Case(float(w or (not x and s)), float(x or (not w and s)))
        for w, x, s in zip(wins, losses, same, strict=True)
    ]


def figures(world: KindWorld, random: np.random.Generator) -> list[Item]:
    """A figure on both sides whose difference is above 0 on 1/2 + gain of the prompts."""
    size = scipy.stats.norm.ppf(0.5 + world.gain)
    differences = noise(world, random, world.prompts) + size
    theirs = random.standard_normal(world.prompts) - 3
    return [Case(float(a + b), float(a)) for a, b in zip(theirs, differences, strict=True)]


DRAWN = {
    PAIRS: right_or_wrong, TESTS: right_or_wrong, LABELS: rated, OUTCOMES: rated, CORRECTIONS: figures, REWARDS:
    figures,
}  # fmt: skip
"""Kind -> how its evidence is drawn."""


def evidence_of(world: KindWorld, random: np.random.Generator, attempt: int = 1) -> Evidence:
    """One evaluation of a candidate in this world."""
    return evidence_from(world.kind, DRAWN[world.kind](world, random), attempt)


def evidence_from(kind: str, items: Sequence[Item], attempt: int = 1) -> Evidence:
    if kind == PAIRS:
        return Evidence("champion", [item for item in items if isinstance(item, Case)], attempt=attempt)
    return Evidence("champion", (), attempt=attempt, others={kind: items})


def shuffled(world: KindWorld, items: Sequence[Item], random: np.random.Generator) -> list[Item]:
    """The same evidence with what people said shuffled: values among answers, sides among prompts."""
    if all(isinstance(item, Rated) for item in items):
        order = random.permutation(len(items))
        found = [item for item in items if isinstance(item, Rated)]
        return [replace(item, value=found[j].value) for item, j in zip(found, order, strict=True)]
    flip = random.random(len(items)) < 0.5
    return [
        replace(item, own=item.other, other=item.own) if isinstance(item, Case) and f else item
        for item, f in zip(items, flip, strict=True)
    ]


def promoted_in(world: KindWorld, random: np.random.Generator, attempts: int = 20) -> int | None:
    """Which of so many candidates of a world, tried one after the other, gets through the gate, from 1."""
    for k in range(1, attempts + 1):
        number = attempt_number([world.prompts] * k, world.prompts)
        if gate_judge(evidence_of(world, random, number), BOUNDS).passed:
            return k
    return None


def shuffled_promoted_in(world: KindWorld, random: np.random.Generator, attempts: int = 20) -> int | None:
    """The same for candidates that learnt a real taste, judged by what people said shuffled."""
    for k in range(1, attempts + 1):
        items = shuffled(world, DRAWN[world.kind](world, random), random)
        number = attempt_number([world.prompts] * k, world.prompts)
        if gate_judge(evidence_from(world.kind, items, number), BOUNDS).passed:
            return k
    return None
