"""The gate against an app's model in made-up worlds, the short form of benchmarks/incumbent_gate.py."""

import numpy as np
import pytest

from tests.support.incumbent_worlds import (
    IncumbentWorld,
    candidate_of,
    incumbent_of,
    judged,
    opens,
    opens_in_a_row,
    ratings_until_verdict,
)

SEEDS = 40


def opened(world: IncumbentWorld) -> int:
    return sum(opens(world, seed) for seed in range(SEEDS))


@pytest.mark.parametrize(
    "world",
    [
        IncumbentWorld(150, incumbent=0.7, gain=0.10, correlation=0.6, corrected=1.0),
        IncumbentWorld(60, incumbent=0.7, gain=0.15, correlation=0.6, corrected=1.0),
    ],
)
def test_a_better_candidate_opens_the_gate(world: IncumbentWorld) -> None:
    assert opened(world) >= 0.8 * SEEDS


@pytest.mark.parametrize("incumbent", [0.55, 0.80, 0.95])
def test_no_better_candidate_of_twenty_is_promoted(incumbent: float) -> None:
    # of 40 series two are expected at the most; seven or more are a chance of 1 in 250
    world = IncumbentWorld(150, incumbent=incumbent, corrected=1.0)
    assert sum(opens_in_a_row(world, seed) for seed in range(SEEDS)) <= 6


def test_complaints_alone_promote_nobody() -> None:
    # without the rule about ratings 56 % of such series promote
    world = IncumbentWorld(150, incumbent=0.8, rated_right=0.5, rated_wrong=1.0, corrected=1.0)
    assert sum(opens_in_a_row(world, seed) for seed in range(SEEDS)) <= 6


@pytest.mark.parametrize("ratings", [{}, {"noise": 0.5}, {"rated_right": 0.5, "rated_wrong": 0.5}])
def test_a_candidate_worse_than_the_incumbent_is_never_promoted(ratings: dict[str, float]) -> None:
    world = IncumbentWorld(150, incumbent=0.7, gain=-0.10, corrected=1.0, **ratings)
    assert sum(opens_in_a_row(world, seed) for seed in range(SEEDS)) == 0


def test_what_is_unknown_counts_against_the_candidate() -> None:
    world = IncumbentWorld(150, incumbent=0.7, gain=0.10, correlation=0.6, corrected=0.3)
    assert opened(world) < 0.5 * SEEDS
    found = incumbent_of(world, np.random.default_rng(1))
    found = candidate_of(world, found, np.random.default_rng(2))
    whole = found.asked(found.differ & ~found.settled)
    # asking where the two differ says all that there is to know of their difference
    every = found.asked(~found.settled)
    gains = [
        next(one for one in judged(part).verdicts if one.rule == "accuracy").figures
        for part in (whole, every)
    ]
    assert gains[0]["wins"] - gains[0]["losses"] == gains[1]["wins"] - gains[1]["losses"]


def test_asking_where_the_two_differ_takes_at_most_half_the_ratings() -> None:
    world = IncumbentWorld(
        200, incumbent=0.7, gain=0.15, correlation=0.6, rated_right=0.15, rated_wrong=0.15, corrected=1.0
    )
    counts = [found for seed in range(15) if (found := ratings_until_verdict(world, seed)) is not None]
    shares = sorted(first / chance for first, chance in counts)
    assert shares[len(shares) // 2] <= 0.5
