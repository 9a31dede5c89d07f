"""Concordance, permutation tests and calibrated probabilities: by hand, by other programs' words, by simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rl.statistics.calibration import cross_fitted
from rl.statistics.concordance import gini_concordance, gini_concordance_p
from rl.statistics.permutation import draws_for, lopsided_mean_p, monte_carlo_p, sign_flip_p


def test_with_thumbs_it_is_the_area_under_the_roc_curve_with_delong_s_error() -> None:
    found = gini_concordance([1, 1, 0, 0, 1], [3, 1, 2, 0, 4])
    assert found is not None
    # liked 3, 1, 4 against disliked 2, 0: five of six times higher
    assert found.gain == pytest.approx(5 / 6 - 1 / 2)
    # shares won: liked 1, 1/2, 1; disliked 2/3, 1. Squares about 5/6: 1/6 over 3^2 and 1/18 over 2^2; times 5/4
    assert found.error == pytest.approx(math.sqrt(5 / 4 * (1 / 6 / 9 + 1 / 18 / 4)))
    assert found.clusters == 5


def test_ties_count_half() -> None:
    found = gini_concordance([1, 0], [2, 2])
    assert found is not None
    assert found.gain == 0


def test_better_rated_by_more_counts_for_more() -> None:
    # pairs (v, s): 1-0.5 right by 0.5, 1-0 right by 1, 0.5-0 wrong by 0.5: (0.5 + 1 - 0.5) / 2 = 0.5 is Gini's
    found = gini_concordance([1.0, 0.5, 0.0], [3, 1, 2])
    assert found is not None
    assert found.gain == pytest.approx(0.25)


def test_answers_to_one_prompt_are_one_cluster() -> None:
    values, scores = [1, 0, 1, 0, 1, 0], [6, 1, 5, 2, 4, 3]
    alone, prompts = (
        gini_concordance(values, scores),
        gini_concordance(values, scores, ["a", "a", "b", "b", "c", "c"]),
    )
    assert alone is not None
    assert prompts is not None
    assert alone.gain == prompts.gain == 0.5
    assert (alone.clusters, prompts.clusters) == (6, 3)
    # the same answers four times over are no more evidence than once
    copied = gini_concordance(values * 4, scores * 4, list("aabbcc") * 4)
    assert copied is not None
    assert copied.error == pytest.approx(prompts.error, abs=1e-12)


def test_where_all_were_rated_alike_nothing_can_be_said() -> None:
    assert gini_concordance([1, 1, 1], [3, 2, 1]) is None
    assert gini_concordance_p([1, 1, 1], [3, 2, 1]) == 1.0


def test_a_perfect_order_keeps_an_interval() -> None:
    found = gini_concordance([1] * 20 + [0] * 20, range(40, 0, -1))
    assert found is not None
    assert found.error == 0
    # 3 m n / (m + n + 1) draws a coin would need: 3 * 400 / 41 = 29.3; Wilson's bound n / (n + t^2), t(39) = 2.0227
    draws = 3 * 400 / 41
    assert found.interval(0.95).low + 0.5 == pytest.approx(draws / (draws + 2.0227**2), abs=1e-4)
    assert found.interval(0.95).high == pytest.approx(0.5)


def test_the_exact_chance_of_a_perfect_order() -> None:
    # 1 of the 10 ways to put two liked among five
    assert gini_concordance_p([1, 1, 0, 0, 0], [5, 4, 3, 2, 1]) == pytest.approx(0.1, abs=0.02)
    assert gini_concordance_p([1, 1, 0, 0, 0], [1, 2, 3, 4, 5]) == 1.0


def test_the_interval_covers_as_often_as_it_says() -> None:
    random, covered = np.random.default_rng(5), 0
    for _ in range(400):
        liked = random.random(80) < 0.7
        scores = random.standard_normal(80) + liked
        found = gini_concordance(liked.astype(float), scores)
        assert found is not None
        # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt 2) = 0.76025
        interval = found.interval(0.95)
        covered += interval.low <= 0.76025 - 0.5 <= interval.high
    assert 0.925 <= covered / 400 <= 0.985


@pytest.mark.campaign
@pytest.mark.parametrize("heavy", [False, True])
def test_values_that_have_nothing_to_do_with_scores_are_called_a_gain_no_more_often_than_said(
    heavy: bool,
) -> None:
    random, found = np.random.default_rng(7), []
    for _ in range(200):
        scores = random.standard_cauchy(60) if heavy else random.standard_normal(60)
        found.append(gini_concordance_p((random.random(60) < 0.9).astype(float), scores))
    assert sum(p <= 0.05 for p in found) <= 18  # 10 expected; 18 or fewer in 99 % of cases


def test_scores_that_only_spread_further_are_no_gain() -> None:
    # liked answers are few and their scores spread four times as far: the plain rank test errs in 12 % here
    random, found = np.random.default_rng(9), []
    for _ in range(200):
        liked = np.arange(80) < 16
        scores = random.standard_normal(80) * np.where(liked, 4.0, 1.0)
        found.append(gini_concordance_p(liked.astype(float), scores))
    assert sum(p <= 0.05 for p in found) <= 18


def test_flipped_signs_are_counted_exactly() -> None:
    # of the 16 ways to sign 4, 3, 2, 1 the sums of at least 8 (+4+3+2-1): 10, 8; two ways
    assert sign_flip_p([4, 3, 2, -1]) == 2 / 16
    ways = [sum(s * d for s, d in zip(signs, (4, 3, 2, 1), strict=True)) for signs in
            itertools.product((1, -1), repeat=4)]  # fmt: skip
    assert sum(way >= 8 for way in ways) == 2
    assert sign_flip_p([0.0, 0.0]) == 1.0
    assert sign_flip_p([]) == 1.0


def test_one_huge_difference_is_no_evidence() -> None:
    assert sign_flip_p([1e9, *[-0.1, 0.1] * 20]) > 0.4


def test_a_p_value_is_the_same_each_time_and_never_zero() -> None:
    random = np.random.default_rng(1)
    liked = (random.random(100) < 0.5).astype(float)
    scores = random.standard_normal(100) + 3 * liked
    first = gini_concordance_p(liked, scores, draws=draws_for(0.05))
    assert first == gini_concordance_p(liked, scores, draws=draws_for(0.05)) == 1 / 5000
    assert draws_for(0.0001) == 99_999
    assert monte_carlo_p(1.0, lambda random, count: np.zeros(count), 1, draws=9) == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        gini_concordance([1, 0], [bad, 1])
    with pytest.raises(ValueError, match="finite"):
        sign_flip_p([bad])


def test_a_score_that_knows_nothing_gives_the_share_of_the_liked() -> None:
    values = [1.0, 1.0, 1.0, 0.0] * 10
    known = cross_fitted(values, [0.0] * 40, range(40))
    # in each fold 32 others, 24 liked: (24 + 1) / (32 + 2)
    assert known.probabilities == pytest.approx([25 / 34] * 40)
    assert known.brier[3] == pytest.approx((25 / 34) ** 2)
    # a score that is lower for what is liked earns nothing by being turned round
    against = cross_fitted(values, [-value for value in values], range(40))
    assert against.probabilities == pytest.approx([25 / 34] * 40)


def test_a_score_that_knows_is_believed_only_where_it_was_not_fitted() -> None:
    random = np.random.default_rng(3)
    scores = random.standard_normal(2000)
    truth = 1 / (1 + np.exp(-(2 * scores + 0.5)))
    liked = (random.random(2000) < truth).astype(float)
    known = cross_fitted(liked.tolist(), scores.tolist(), range(2000))
    assert np.abs(np.array(known.probabilities) - truth).mean() < 0.03
    best = float(-(truth * np.log(truth) + (1 - truth) * np.log1p(-truth)).mean())
    assert np.mean(known.log_losses) == pytest.approx(best, abs=0.03)
    # answers to one prompt stand in one fold: a prompt of its own label cannot vouch for itself
    noise = cross_fitted(
        (random.random(300) < 0.5).astype(float).tolist(), random.standard_normal(300).tolist(), range(300)
    )
    assert np.mean(noise.log_losses) > math.log(2) - 0.005


# --- Lopsided means -------------------------------------------------------------------------------------------


def test_of_two_values_the_lopsided_mean_is_the_exact_binomial() -> None:
    """P(at least 8 heads of 10) = 56 / 1024: a Beta(8, 3) lies below 1/2 as often (Clopper & Pearson)."""
    p = lopsided_mean_p([1.0] * 8 + [-1.0] * 2, -1.0, draws=49_999)
    assert p == pytest.approx(56 / 1024, abs=0.008)


def test_a_gain_on_every_prompt_may_hide_a_loss_that_no_prompt_showed() -> None:
    # weight w of the worst value is Beta(1, n): the sum 0.01 (1 - w) - w is 0 or less from w = 0.01 / 1.01 on, a chance
    # of (1 / 1.01)^n: 0.37 for 100 prompts, 0.0071 for 500
    assert lopsided_mean_p([0.01] * 100, -1.0) == pytest.approx(1.01**-100, abs=0.1)
    assert lopsided_mean_p([0.01] * 500, -1.0, draws=49_999) == pytest.approx(1.01**-500, abs=0.002)
    assert sign_flip_p([0.01] * 100) < 0.001
    assert lopsided_mean_p([-0.1, 0.0], -1.0) == lopsided_mean_p([]) == 1.0


def test_values_below_the_least_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at least -1, found -1\.5"):
        lopsided_mean_p([0.5, -1.5], -1.0)
    with pytest.raises(ValueError, match="NaN"):
        lopsided_mean_p([0.5, float("nan")])
