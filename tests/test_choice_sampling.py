"""Choosing among listed responses: the distribution is exact, and the draw follows it."""

from __future__ import annotations

import math
from collections import Counter
from random import Random

import pytest
from scipy import stats

from rl.serving.linear import choice_probabilities, choose

LOGPS = [math.log(0.5), math.log(0.25), math.log(0.125)]


def test_temperature_one_is_the_policy_among_these() -> None:
    # 0.5, 0.25, 0.125 of 0.875
    assert choice_probabilities(LOGPS, temperature=1) == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_temperature_two_takes_roots_first() -> None:
    roots = [math.sqrt(0.5), 0.5, math.sqrt(0.125)]
    assert choice_probabilities(LOGPS, temperature=2) == pytest.approx([r / sum(roots) for r in roots])


def test_temperature_zero_takes_the_first_of_the_best() -> None:
    assert choice_probabilities([-2.0, -1.0, -1.0]) == (0.0, 1.0, 0.0)


def test_epsilon_is_drawn_evenly() -> None:
    assert choice_probabilities(LOGPS, epsilon=0.3) == pytest.approx([0.8, 0.1, 0.1])
    assert choice_probabilities(LOGPS, temperature=1, epsilon=1.0) == pytest.approx([1 / 3] * 3)


def test_log_probabilities_of_long_texts_do_not_vanish() -> None:
    # exp(-5000) is no number; the difference of one nat is
    shares = choice_probabilities([-5000.0, -5001.0], temperature=1)
    assert shares == pytest.approx([1 / (1 + math.exp(-1)), math.exp(-1) / (1 + math.exp(-1))])


def test_the_draw_follows_the_distribution() -> None:
    random = Random(7)
    drawn = [choose(LOGPS, temperature=1, epsilon=0.2, random=random) for _ in range(20_000)]
    counts = Counter(choice.index for choice in drawn)
    expected = [20_000 * share for share in drawn[0].probabilities]
    assert stats.chisquare([counts[i] for i in range(3)], expected).pvalue > 1e-4


def test_the_propensity_is_the_share_of_what_was_drawn() -> None:
    random = Random(1)
    for _ in range(100):
        choice = choose(LOGPS, temperature=1, random=random)
        assert choice.propensity == choice.probabilities[choice.index] > 0


def test_what_has_no_share_is_never_drawn() -> None:
    class Last(Random):
        def random(self) -> float:
            return 1 - 2**-53

    assert choose([-1.0, -9.0], random=Last()).index == 0


@pytest.mark.parametrize(
    ("logps", "knobs"),
    [([], {}), (LOGPS, {"temperature": -1}), (LOGPS, {"epsilon": 1.5}), (LOGPS, {"epsilon": -0.1})],
)
def test_what_is_no_distribution_is_refused(logps: list[float], knobs: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        choice_probabilities(logps, **knobs)
