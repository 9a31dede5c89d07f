"""Made-up worlds in which it is known whether a policy is better: what the gate is tried on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rl.gates.effects import one_per_prompt
from rl.gates.report import AnswerPair, Case, Evidence, GateBounds, GateReport
from rl.gates.rules import CHAMPION, gate_judge

BOUNDS = GateBounds()
DISCORDANT = 0.3
"""Share of held-out prompts on which the two policies differ."""


RATERS = ["ada", "bob", "cy", "dee", "eli", "flo"]
"""People who judge, in the order of their names."""


@dataclass(frozen=True)
class World:
    """How a candidate differs from its champion, and what happened to the ratings of the holdout."""

    gain: float = 0.0
    """True difference in accuracy."""
    prompts: int = 400
    flipped: float = 0.0
    """Share of held-out preferences that were given the wrong way round."""
    hostile: float = 0.0
    """Share of held-out prompts judged by one hostile rater, whom alone the candidate pleases."""
    hostile_gain: float = 0.0
    broken: float = 0.0
    """What the candidate loses on the slice `topic:broken`, a tenth of the prompts."""
    longer: float = 1.0
    """Its answers are so many times as long."""
    uneven: bool = False
    """Prompts differ: on some the policies differ one time in five, on others always, on 60 % on average; the gain is
    in proportion, and raters flip none to three in ten of their preferences, each their own share."""
    pairs: int = 1
    """Rated pairs to each prompt, of one rater."""
    repeats: float = 0.3
    """Chance that a further pair of a prompt says what its first one says."""
    length_bias: float = 0.0
    """Accuracy it gains where the preferred answer is the longer one, and loses where it is the shorter."""


@dataclass(frozen=True)
class Outcomes:
    """What both sides did on the pairs of each held-out prompt, as columns over prompts."""

    pairs: list[tuple[np.ndarray, np.ndarray]]
    """Of each prompt's first pair, second pair, ...: whether the candidate and the champion are right."""
    people: np.ndarray
    broken: np.ndarray
    long_preferred: np.ndarray

    @property
    def differences(self) -> np.ndarray:
        """Candidate minus champion per prompt: the mean of its pairs."""
        found: np.ndarray = np.mean([own.astype(float) - other for own, other in self.pairs], axis=0)
        return found


def outcomes_of(world: World, random: np.random.Generator) -> Outcomes:
    """What a candidate and its champion do in this world."""
    n = world.prompts
    hostile = random.random(n) < world.hostile
    broken = random.random(n) < 0.1
    long_preferred = random.random(n) < 0.7
    gain = np.where(hostile, world.hostile_gain, world.gain)
    gain = np.where(broken, gain - world.broken, gain)
    gain = gain + np.where(long_preferred, world.length_bias, -world.length_bias)
    if world.uneven:
        spread = random.uniform(0.2, 1.0, n)
        gain, discordant = gain * spread / 0.6, spread
    else:
        discordant = np.maximum(DISCORDANT, np.abs(gain))

    def sides() -> tuple[np.ndarray, np.ndarray]:
        draw = random.random(n)
        wins, losses = draw < (discordant + gain) / 2, draw > 1 - (discordant - gain) / 2
        same_right = random.random(n) < 0.7
        return wins | (~losses & same_right), losses | (~wins & same_right)

    own, other = sides()
    luck = random.random(n)
    chosen = random.choice(len(RATERS), n)
    people = np.where(hostile, "mallory", np.array(RATERS)[chosen])
    haste = np.searchsorted(RATERS, people) % len(RATERS) * 0.06 if world.uneven else world.flipped
    flip = luck < haste
    own, other = own ^ flip, other ^ flip
    pairs = [(own, other)]
    for _ in range(world.pairs - 1):
        mine, theirs = sides()
        flip, same = random.random(n) < haste, random.random(n) < world.repeats
        pairs.append((np.where(same, own, mine ^ flip), np.where(same, other, theirs ^ flip)))
    return Outcomes(pairs, people, broken, long_preferred)


def evidence_of(world: World, random: np.random.Generator, attempt: int = 1) -> Evidence:
    """One evaluation of a candidate in this world."""
    return evidence_from(world, outcomes_of(world, random), random, attempt)


def evidence_from(world: World, found: Outcomes, random: np.random.Generator, attempt: int = 1) -> Evidence:
    """What an evaluation shows of these outcomes."""
    n = world.prompts
    pairs = [
        Case(
            bool(own[i]),
            bool(other[i]),
            (
                "topic:broken" if found.broken[i] else "topic:rest",
                "preferred:longer" if found.long_preferred[i] else "preferred:shorter",
            ),
            (str(found.people[i]),),
        )
        for own, other in found.pairs
        for i in range(n)
    ]
    cases = list(one_per_prompt(pairs, [f"p{i % n}" for i in range(len(pairs))]).values())
    lengths = random.lognormal(4.0, 0.5, 64)
    own, other = found.pairs[0]
    answered = [
        AnswerPair(
            True, True, float(own[i]), float(other[i]), int(lengths[i] * world.longer), int(lengths[i])
        )
        for i in range(min(64, n))
    ]
    return Evidence("base", cases, answered, kl=0.3, attempt=attempt)


def promoted_in_a_row(
    world: World, sizes: Sequence[int], random: np.random.Generator, *, alike: bool = False
) -> int | None:
    """Which of the candidates of a world, tried one after the other on a holdout of these sizes, gets through, from 1.

    `alike`: each says of the prompts that were there before what the one before it said; otherwise nothing binds them.
    """
    whole = evidence_of(replace(world, prompts=max(sizes)), random) if alike else None
    for k, size in enumerate(sizes, 1):
        if whole is None:
            found = evidence_of(replace(world, prompts=size), random, k)
        else:
            found = replace(whole, cases=whole.cases[:size], attempt=k)
        if gate_judge(found, BOUNDS).passed:
            return k
    return None


def sheets(world: World, seeds: int) -> list[GateReport]:
    """The gate's report of one first attempt per seed."""
    return [
        gate_judge(evidence_of(world, np.random.default_rng(seed)), BOUNDS, CHAMPION) for seed in range(seeds)
    ]


def refused_by(found: list[GateReport], rule: str) -> float:
    """Share of reports that this rule refuses."""
    return sum(rule in [verdict.rule for verdict in report.refusals] for report in found) / len(found)


BETTER = World(gain=0.10)
EQUAL = World(prompts=200)
FLIPPED = World(gain=-0.10, flipped=0.3)
"""A candidate that learnt from ratings 30 % of which were flipped: worse, seen through the same noise."""
HOSTILE = World(gain=0.0, hostile=0.4, hostile_gain=0.4)
"""One rater gave 40 % of the votes; the candidate pleases that rater and nobody else."""
LENGTHY = World(gain=0.10, longer=2.0, length_bias=0.2)
BROKEN = World(gain=0.15, broken=0.7)
