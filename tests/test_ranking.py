"""Concordance by hand, its interval on few rows, and how often tosses pass for a ranking."""

from __future__ import annotations

import numpy as np
import pytest

from rl.statistics import concordance, concordance_difference


def test_concordance_by_hand() -> None:
    # of 0.9>0.2, 0.9>0.5, 0.5>0.2 the scores have the first and the second right, and tie the third
    found = concordance([0.9, 0.2, 0.5], [3.0, 1.0, 1.0], ["a", "b", "c"])
    assert (found.share.value, found.pair_count, found.share.n) == (pytest.approx(2.5 / 3), 3, 3)


def test_of_thumbs_it_is_the_area_under_the_curve() -> None:
    # liked 2 and 5 against disliked 1, 3, 4: 2>1, 5>1, 5>3, 5>4 of six
    found = concordance([1, 0, 0, 1, 0], [2, 1, 3, 5, 4], list("abcde"))
    assert (found.share.value, found.pair_count) == (pytest.approx(4 / 6), 6)


def test_nothing_to_compare_has_no_share() -> None:
    assert concordance([1, 1], [0.1, 0.2], ["a", "b"]).share.value is None
    assert concordance([], [], []).share.n == 0


def test_a_perfect_ranking_of_few_rows_is_no_certainty() -> None:
    four = concordance([1, 1, 0, 0], [4, 3, 2, 1], list("abcd")).share
    assert (four.value, four.high) == (1.0, 1.0)
    assert four.low is not None
    assert four.low < 0.5
    twenty = concordance([1, 0] * 10, [2, 1] * 10, [str(n) for n in range(20)]).share
    assert twenty.low is not None
    assert twenty.low > 0.6


def test_rows_of_one_prompt_are_not_evidence_of_their_own() -> None:
    values, scores = [1, 0] * 20, list(np.linspace(0, 1, 40) + np.tile([0.5, 0.0], 20))
    alone = concordance(values, scores, [str(n) for n in range(40)]).share
    together = concordance(values, scores, [str(n // 8) for n in range(40)]).share
    assert alone.value == together.value
    assert alone.low is not None
    assert together.low is not None
    assert together.low < alone.low


@pytest.mark.parametrize("kind", ["thumbs", "scores"])
def test_tosses_rank_better_than_a_coin_as_seldom_as_promised(kind: str) -> None:
    """400 coin-tossing reward models on 30 held-out responses: at most 2.5 % may pass, and chance on top of it."""
    rng = np.random.default_rng(3)
    passed = 0
    for _ in range(400):
        values = rng.integers(0, 2, 30) if kind == "thumbs" else rng.random(30).round(1)
        low = concordance(list(values), list(rng.normal(size=30)), [str(n) for n in range(30)]).share.low
        passed += low is not None and low > 0.5
    assert passed <= 18  # the 98 % point of a binomial at 2.5 % is 17


def test_the_difference_of_two_on_the_same_rows_by_hand() -> None:
    values, prompts = [1.0, 0.0, 1.0, 0.0], list("abcd")
    better, worse = [4.0, 1.0, 3.0, 2.0], [1.0, 4.0, 2.0, 3.0]
    found = concordance_difference(values, better, worse, prompts)
    assert found is not None
    assert found.value == pytest.approx(1.0)
    same = concordance_difference(values, better, better, prompts)
    assert same is not None
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
