"""Made-up worlds of an app's model (the incumbent) and a candidate, whose answers to a closed set are known to be right
or wrong. People rate the incumbent's answers; the gate knows what the lists of known answers hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rl.gates.evidence_kinds import KNOWN
from rl.gates.report import AnswerPair, Case, Evidence, GateBounds, GateReport
from rl.gates.rules import gate_judge

ATTEMPTS = 20


@dataclass(frozen=True)
class IncumbentWorld:
    """Shares of right answers, and how people rate the incumbent's recorded ones."""

    prompts: int = 150
    """Held-out prompts with a recorded answer."""
    incumbent: float = 0.7
    gain: float = 0.0
    """Right answers of the candidate minus the incumbent's, as a share of all prompts."""
    correlation: float = 0.5
    """Phi coefficient of being right: two models of one task err on the same hard prompts."""
    answers: int = 5
    """Size of the closed set; two wrong answers are the same by chance."""
    rated_right: float = 1.0
    """Probability that a right answer gets a thumb up."""
    rated_wrong: float = 1.0
    """Probability that a wrong answer gets a thumb down."""
    corrected: float = 0.8
    """Of thumbs down, those with a correction."""
    noise: float = 0.0
    """Share of ratings given at random: half of them thumbs up, a correction is any other answer."""


@dataclass(frozen=True)
class Answered:
    """Columns over prompts."""

    incumbent: np.ndarray
    candidate: np.ndarray
    same_wrong: np.ndarray
    """True where both are wrong with one answer."""
    rated: np.ndarray
    corrected: np.ndarray
    chosen: np.ndarray
    """Prompts that people chose to rate, before anybody asked."""
    by_chance: np.ndarray
    """Prompts that are rated at random."""
    believed: np.ndarray
    """True where the ratings call the incumbent's answer right."""
    believed_own: np.ndarray
    """The same of the candidate's answer."""

    @property
    def differ(self) -> np.ndarray:
        found: np.ndarray = (self.incumbent != self.candidate) | (
            ~self.incumbent & ~self.candidate & ~self.same_wrong
        )
        return found

    @property
    def settled(self) -> np.ndarray:
        """Prompts whose right answer is known: it was liked, or written."""
        found: np.ndarray = self.rated & (self.believed | self.corrected)
        return found

    def asked(self, prompts: np.ndarray) -> Answered:
        """The same after somebody rated these prompts' answers and picked the right one where it was wrong."""
        return replace(self, rated=self.rated | prompts, corrected=self.corrected | prompts)

    def evidence(self, attempt: int = 1) -> Evidence:
        """Known answers: an answer on neither list is not right."""
        known = np.flatnonzero(self.rated)
        own = self.believed_own & (self.believed | self.corrected)
        cases = [Case(float(own[i]), float(self.believed[i])) for i in known]
        same, rated, settled, asked = (
            column.tolist() for column in (~self.differ, self.rated, self.settled, self.rated & ~self.chosen)
        )
        answers = [
            AnswerPair(
                True,
                True,
                0.5,
                0.5,
                10,
                10,
                judged=False,
                same=same[i],
                said=rated[i],
                other_said=rated[i],
                settled=settled[i],
                prompt_hash=str(i),
                asked=asked[i],
            )
            for i in range(len(same))
        ]
        return Evidence("incumbent", (), answers, other_kinds={KNOWN: cases}, discrete=True, attempt=attempt)


def incumbent_of(world: IncumbentWorld, random: np.random.Generator) -> Answered:
    """The incumbent's answers and their ratings, with a candidate like it in nothing yet."""
    right = random.random(world.prompts) < world.incumbent
    rated = random.random(world.prompts) < np.where(right, world.rated_right, world.rated_wrong)
    corrections = random.random(world.prompts) < world.corrected
    by_chance, believed = np.zeros(world.prompts, bool), right
    if world.noise:
        by_chance = random.random(world.prompts) < world.noise
        believed = np.where(by_chance, random.random(world.prompts) < 0.5, right)
    corrected = rated & ~believed & corrections
    same = np.ones(world.prompts, bool)
    return Answered(right, right, same, rated, corrected, rated, by_chance, believed, believed)


def candidate_of(world: IncumbentWorld, found: Answered, random: np.random.Generator) -> Answered:
    """A candidate's answers to the same prompts."""
    q, p = world.incumbent, world.incumbent + world.gain
    shared = min(world.correlation * (p * (1 - p) * q * (1 - q)) ** 0.5, (min(p, q) - p * q))
    if_right, if_wrong = p + shared / q, p - shared / (1 - q)
    candidate = random.random(world.prompts) < np.where(found.incumbent, if_right, if_wrong)
    # wrong models mostly fall into the same trap; else one of the other wrong answers
    same = random.random(world.prompts) < world.correlation + (1 - world.correlation) / (world.answers - 1)
    answered = replace(found, candidate=candidate, same_wrong=same, believed_own=candidate)
    if world.noise:
        # A random rating calls the liked answer right, or the one that a random correction happens to name.
        named = random.random(world.prompts) < 1 / (world.answers - 1)
        own = np.where(found.believed, ~answered.differ, answered.differ & named)
        answered = replace(answered, believed_own=np.where(found.by_chance, own, candidate))
    return answered


def judged(found: Answered, attempt: int = 1, bounds: GateBounds | None = None) -> GateReport:
    return gate_judge(found.evidence(attempt), bounds or GateBounds())


def opens(
    world: IncumbentWorld,
    seed: int,
    after: Callable[[Answered, np.random.Generator], Answered] = lambda found, random: found,
    bounds: GateBounds | None = None,
) -> bool:
    """True if the gate opens to the first candidate; `after`: what people rate once it was compared."""
    random = np.random.default_rng(seed)
    found = candidate_of(world, incumbent_of(world, random), random)
    return judged(after(found, random), 1, bounds).passed


def opens_in_a_row(world: IncumbentWorld, seed: int, bounds: GateBounds | None = None) -> bool:
    """True if the gate opens to any of ATTEMPTS candidates, tried on one holdout against one incumbent."""
    random = np.random.default_rng(seed)
    base = incumbent_of(world, random)
    return any(
        judged(candidate_of(world, base, random), attempt, bounds).passed
        for attempt in range(1, ATTEMPTS + 1)
    )


STEP = 5
"""Ratings between two looks of `ratings_until_verdict`, all at the level of a second comparison."""


def ratings_until_verdict(world: IncumbentWorld, seed: int) -> tuple[int, int] | None:
    """Ratings after the first comparison until the gate opens: what would change the verdict first, and in chance
    order. None where it does not open even with all of them."""
    random = np.random.default_rng(seed)
    found = candidate_of(world, incumbent_of(world, random), random)
    missing = np.flatnonzero(~found.settled)
    by_chance = random.permutation(missing)
    first = np.concatenate(
        [random.permutation(missing[found.differ[missing] == side]) for side in (True, False)]
    )
    counts = [_until(found, order) for order in (first, by_chance)]
    return None if counts[0] is None or counts[1] is None else (counts[0], counts[1])


def _until(found: Answered, order: np.ndarray) -> int | None:
    for count in [*range(STEP, len(order), STEP), len(order)]:
        asked = np.zeros(len(found.rated), bool)
        asked[order[:count]] = True
        if judged(found.asked(asked), 2).passed:
            return count
    return None
