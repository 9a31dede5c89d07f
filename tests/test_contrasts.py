"""One arm against another: reference values of other people's tests, cases worked by hand, peeking."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.statistics import wilson_interval
from rl.statistics.contrasts import (
    Contrast,
    Moments,
    always_valid,
    always_valid_low,
    always_valid_p,
    best_chances,
    difference,
    half_width,
    posterior,
    ratio_mismatch_p,
    thompson_shares,
    units_needed,
    uplift,
)
from rl.statistics.sequential import (
    beta_binomial,
    critical_value,
    log_mixture,
    log_normal_mixture,
    mixing_scale,
    proportion_sequence,
)
from tests.support.experiment_worlds import moments_of_counts, peeking

VECTORS = Path(__file__).resolve().parents[2] / "shared/data/vectors/reference_vectors.json"


@pytest.fixture(scope="module")
def vectors() -> dict[str, Any]:
    if not VECTORS.exists():
        pytest.skip("the reference vectors lie in ../shared, which is not here")
    return {case["id"]: case for case in json.loads(VECTORS.read_text("utf-8"))}


def sums(given: dict[str, Any]) -> Moments:
    """From the sum and the sum of squares of n values, with the unbiased variance."""
    total, n = given["sum"], given["n"]
    return Moments(n, total / n, (given["sum_squares"] - total**2 / n) / (n - 1))


# --- Reference vectors --------------------------------------------------------------------------------------


def test_the_error_of_a_relative_effect_agrees_with_growthbook(vectors: Any) -> None:
    given, expected = vectors["gb-welch-rel"]["input"], vectors["gb-welch-rel"]["expected"]
    found = uplift(sums(given["b"]), sums(given["a"]))
    assert found.value == pytest.approx(expected["expected"], abs=1e-5)
    assert math.sqrt(found.error) == pytest.approx(expected["se"], abs=1e-5)


def test_the_normal_mixture_agrees_with_growthbook(vectors: Any) -> None:
    given, expected = vectors["gb-seq-rel"]["input"], vectors["gb-seq-rel"]["expected"]
    contrast = uplift(sums(given["b"]), sums(given["a"]))
    assert contrast.value == pytest.approx(expected["expected"], abs=1e-5)
    assert math.sqrt(contrast.error) == pytest.approx(expected["se"], abs=1e-5)
    # where its interval ends, theirs reaches 1 / alpha
    half = (expected["ci"][1] - expected["ci"][0]) / 2
    at_end = log_normal_mixture(half / math.sqrt(contrast.error), contrast.n, given["alpha"], given["tuning"])
    assert at_end == pytest.approx(math.log(1 / given["alpha"]), abs=1e-3)
    assert always_valid_p(contrast, given["alpha"], given["tuning"]) == expected["p"]


def test_the_critical_value_is_where_the_mixture_reaches_one_over_alpha() -> None:
    # by hand, at z = 3, n = 1000: lines settled at 400, 1600 and 6400 units with 0.4, 0.35 and 0.15 of the mass
    z, n, alpha = 3.0, 1000.0, 0.05
    mass = 0.0
    for units, share in ((400, 0.4), (1600, 0.35), (6400, 0.15)):
        d = math.sqrt(2 * math.log(40) / units)
        mass += share * math.exp(-d * d * n / 2) * math.cosh(d * z * math.sqrt(n))
    spent = (5.991464547 + math.log(1 + 5.991464547)) / 1000 * n
    mass += 0.1 * math.exp(z * z * spent / (2 * (1 + spent))) / math.sqrt(1 + spent)
    assert log_mixture(z, n, alpha, 1000) == pytest.approx(math.log(mass), abs=1e-9)
    assert log_mixture(critical_value(n, alpha, 1000), n, alpha, 1000) == pytest.approx(
        math.log(20), abs=1e-6
    )


def test_an_interval_is_tightest_where_it_is_tuned_for(vectors: Any) -> None:
    at, far, near = (half_width(1.0, 6461, 0.05, tuning) for tuning in (6461, 10, 10000))
    assert vectors["gb-seq-order"]["expected"]["property"] == "width(6461) < width(10000) < width(10)"
    # the mixture is flat around what it is tuned for: within 3 % of the tightest from 0.4 to 1.6 times as many units
    assert at < 1.03 * near < far
    widths = [half_width(1.0, n, 0.05, 1000) for n in (100, 400, 1000, 1600, 10_000)]
    assert max(widths[1:4]) < 1.03 * min(widths)
    assert min(widths[0], widths[4]) > 1.1 * min(widths)


@pytest.mark.parametrize(
    ("new", "old", "value"), [(-1.0, -2.0, 0.5), (-3.0, -2.0, -0.5), (1.0, -2.0, 1.5), (3.0, 2.0, 0.5)]
)
def test_a_relative_effect_over_a_negative_mean_keeps_its_sign(new: float, old: float, value: float) -> None:
    found = uplift(Moments(100, new, 4.0), Moments(100, old, 1.0))
    assert found.value == pytest.approx(value)
    # delta method: 0.04 / old^2 + 0.01 new^2 / old^4
    assert found.error == pytest.approx(0.04 / old**2 + 0.01 * new**2 / old**4)


def test_chance_and_risk_agree_with_growthbook(vectors: Any) -> None:
    given, expected = vectors["gb-bayes"]["input"], vectors["gb-bayes"]["expected"]
    found = posterior(uplift(moments_of_counts(*given["b"]), moments_of_counts(*given["a"])))
    assert found.value == pytest.approx(expected["expected"], abs=2e-5)
    assert found.error == pytest.approx(expected["se"], abs=2e-5)
    assert found.chance == pytest.approx(expected["chance_to_win"], abs=2e-5)
    assert [found.interval.low, found.interval.high] == pytest.approx(expected["ci"], abs=2e-5)
    assert [found.risk_old, found.risk_new] == pytest.approx(expected["risk"], abs=2e-5)


@pytest.mark.parametrize("name", ["srm-0", "srm-2", "srm-4", "srm-6", "srm-8"])
def test_the_ratio_check_agrees_with_growthbook(vectors: Any, name: str) -> None:
    case = vectors[name]
    found = ratio_mismatch_p(case["input"]["users"], case["input"]["weights"])
    assert found == pytest.approx(case["expected"]["p"], abs=case["tol"])


@pytest.mark.parametrize("name", ["wilson-18-20", "wilson-4-200", "wilson-0-30", "wilson-19-38"])
def test_wilson_agrees_with_r(vectors: Any, name: str) -> None:
    case = vectors[name]
    found = wilson_interval(case["input"]["count"], case["input"]["nobs"])
    assert [found.low, found.high] == pytest.approx(case["expected"]["ci"], abs=case["tol"])


def test_the_beta_binomial_mixture_reaches_its_threshold_where_confseq_has_its_bound(vectors: Any) -> None:
    bound = vectors["cs-others"]["expected"]["beta_binomial_two_sided_bound"]
    assert beta_binomial(100, 0.2, 0.8)(bound, 100) == pytest.approx(math.log(1 / 0.05), abs=1e-4)


def test_the_scale_of_a_mixture_has_the_value_of_its_reference_implementation() -> None:
    # confseq's own test (target value of an R implementation)
    assert mixing_scale(100, 0.05) == pytest.approx(12.60056, abs=1e-5)


# --- Worked by hand -----------------------------------------------------------------------------------------


def test_a_mean_over_units_with_several_decisions_counts_units() -> None:
    # 3 of 4 good for one unit, 0 of 1 for the other: mean 3/5. Without the first the mean is 0, without the other 3/4:
    # the jackknife's variance of the mean is 1/2 (0.6^2 + 0.15^2) = 0.19125, of one unit twice that
    found = Moments.of_ratio([3, 0], [4, 1])
    assert (found.n, found.mean) == (2, pytest.approx(0.6))
    assert found.variance == pytest.approx(0.3825)


def test_a_unit_that_makes_all_the_decisions_leaves_nothing_to_judge_by() -> None:
    assert Moments.of_ratio([3, 0], [4, 0]).variance == math.inf


def test_a_mean_over_units_with_one_decision_each_is_the_plain_mean() -> None:
    values = [0.0, 1.0, 1.0, 0.5]
    found = Moments.of_ratio(values, [1, 1, 1, 1])
    assert (found.mean, found.variance) == pytest.approx((np.mean(values), np.var(values, ddof=1)))


def test_the_chance_of_two_arms_is_the_normal_one() -> None:
    # difference 0.1 with standard deviation sqrt(0.01 + 0.02): Phi(0.57735) = 0.7181486
    assert best_chances([0.4, 0.5], [0.01, 0.02])[1] == pytest.approx(0.7181486, abs=1e-6)


def test_three_equal_arms_are_equally_likely_best() -> None:
    assert best_chances([0.3] * 3, [0.01] * 3) == pytest.approx([1 / 3] * 3, abs=1e-9)


def test_a_bandit_leaves_each_arm_its_floor() -> None:
    assert thompson_shares([0.0, 0.25, 0.75], 0.1) == pytest.approx([0.1, 0.275, 0.625])


def test_the_units_still_needed_settle_the_matter_and_one_less_does_not() -> None:
    found = Contrast(0.05, 0.05**2, 400)
    more = units_needed(found)
    assert more is not None
    per_unit = found.error * found.n
    at = [half_width(per_unit / n, n, 0.05, 1000) for n in (400 + more - 1, 400 + more)]
    assert at[1] < 0.05 <= at[0]


def test_nobody_waits_for_a_difference_that_is_not_there() -> None:
    assert units_needed(Contrast(0.0, 0.01, 400)) is None
    assert units_needed(Contrast(1e-6, 0.01, 400)) is None


def test_a_proportion_sequence_contains_wilsons_interval() -> None:
    # valid at every look, so wider than the one look's
    wilson = wilson_interval(30, 100)
    low, high = proportion_sequence(30, 100)
    assert wilson.low is not None
    assert wilson.high is not None
    assert low < wilson.low < wilson.high < high


def test_a_proportion_sequence_reaches_the_ends() -> None:
    assert proportion_sequence(0, 30)[0] == 0.0
    assert proportion_sequence(30, 30)[1] == 1.0
    assert proportion_sequence(0, 0) == (0.0, 1.0)


def test_one_side_alone_is_closer() -> None:
    found = difference(Moments(500, 0.6, 0.24), Moments(500, 0.5, 0.25))
    assert always_valid(found).low < always_valid_low(found) < found.value


# --- Peeking ------------------------------------------------------------------------------------------------


def test_a_proportion_sequence_covers_under_peeking() -> None:
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(60):
        walk = np.cumsum(random.random(600) < 0.3)
        looks = (proportion_sequence(int(walk[n - 1]), n, n_opt=300) for n in range(50, 601, 50))
        missed += any(not low <= 0.3 <= high for low, high in looks)
    assert missed <= 7  # 5 % of 60 is 3; more than 7 has a chance of 1 in 100


def test_equal_arms_rarely_differ_however_often_one_looks() -> None:
    # 2,000 experiments, a look every 10 decisions: the long form is benchmarks/experiments.py
    found = peeking(experiments=2000, decisions=1000, share=0.3, gain=0.0, seed=1)
    assert found.alarms <= 0.05


def test_a_fixed_horizon_test_does_not_survive_peeking() -> None:
    # what the always-valid interval is for: the t test's 5 % become many times that
    found = peeking(experiments=400, decisions=1000, share=0.3, gain=0.0, seed=1)
    assert found.alarms_fixed_peeking > 0.15


def test_a_real_difference_is_found() -> None:
    found = peeking(experiments=200, decisions=2000, share=0.3, gain=0.15, seed=1)
    assert found.alarms > 0.95
