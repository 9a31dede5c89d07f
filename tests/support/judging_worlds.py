"""Judging rounds whose truth is known: judgements drawn one by one, the test looked at after each."""

import functools
from dataclasses import dataclass

import numpy as np

from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE, WinShare


@dataclass(frozen=True)
class JudgingWorld:
    """share: probability that the candidate wins a prompt that is not tied. ties: share of tied prompts. raters: people
    who judge each prompt, of whom each calls it the other way round with probability `noise`."""

    share: float
    ties: float = 0.0
    prompts: int = 1_000
    raters: int = 1
    noise: float = 0.0
    alpha: float = 1 / 30
    margin: float = 0.1


@dataclass(frozen=True)
class SimulatedRound:
    """The first verdict "better" or "worse" with the judgements it took (None: none was reached), and every verdict
    that held at any look: somebody may stop at any of them."""

    verdict: str
    judgements: int | None
    ever: frozenset[str]


def round_simulated(world: JudgingWorld, random: np.random.Generator) -> SimulatedRound:
    """One round, looked at after each prompt that is complete."""
    wins = losses = judgements = 0
    ever: set[str] = set()
    for outcome in outcomes(world, random):
        judgements += world.raters
        if outcome == 0:
            continue
        wins, losses = (wins + 1, losses) if outcome > 0 else (wins, losses + 1)
        verdict = verdict_of(wins, losses, world.alpha, world.margin)
        if verdict != OPEN:
            ever.add(verdict)
        if verdict in (BETTER, WORSE):
            return SimulatedRound(verdict, judgements, frozenset(ever))
    return SimulatedRound(NOT_WORSE if NOT_WORSE in ever else OPEN, None, frozenset(ever))


def outcomes(world: JudgingWorld, random: np.random.Generator) -> list[int]:
    """1, -1 or 0 for each prompt: what most of its raters said."""
    tied = random.random(world.prompts) < world.ties
    truth = np.where(random.random(world.prompts) < world.share, 1, -1)
    flips = random.random((world.prompts, world.raters)) < world.noise
    votes = np.where(flips, -truth[:, None], truth[:, None]).sum(axis=1)
    return [int(value) for value in np.where(tied, 0, np.sign(votes))]


@functools.lru_cache(maxsize=500_000)
def verdict_of(wins: int, losses: int, alpha: float, margin: float) -> str:
    return WinShare(wins, losses, 0, alpha, margin).verdict
