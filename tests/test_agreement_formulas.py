"""Agreement among raters and contrasts of two arms, against published figures and worked by hand."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feedback.agreement import statistics
from feedback.agreement.statistics import (
    cohen_kappa,
    kappa_of_scores,
    krippendorff_alpha,
    rated_by_both,
)
from rl.statistics import wilson_interval
from rl.statistics.contrasts import (
    Contrast,
    Moments,
    always_valid,
    always_valid_low,
    always_valid_p,
    best_chances,
    chance_above_zero,
    difference,
    half_width,
    ratio_mismatch_p,
    thompson_shares,
    units_needed,
)
from rl.statistics.sequential import (
    beta_binomial,
    critical_value,
    log_mixture,
    log_normal_mixture,
    mixing_scale,
    proportion_sequence,
)
from tests.support.experiment_worlds import moments_of_counts, peeking, uplift

# Krippendorff, "Computing Krippendorff's alpha-reliability" (2011), section C: four observers, twelve units
KRIPPENDORFF = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
    [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
]
# The example of Wikipedia's article "Krippendorff's alpha": three coders, fifteen units
WIKIPEDIA = [
    [None, None, None, None, None, 3, 4, 1, 2, 1, 1, 3, 3, None, 3],
    [1, None, 2, 1, 3, 3, 4, 3, None, None, None, None, None, None, None],
    [None, None, 2, 1, 3, 4, 4, None, 2, 1, 1, 3, 3, None, 4],
]


def listed(matrix: list[list[int | None]]) -> tuple[list[int], list[int]]:
    """Units and values of a matrix of raters by units."""
    found = [(unit, value) for row in matrix for unit, value in enumerate(row) if value is not None]
    return [unit for unit, _ in found], [value for _, value in found]


@pytest.mark.parametrize(
    ("matrix", "metric", "expected", "n"),
    [
        (KRIPPENDORFF, "nominal", 0.743, 40),
        (KRIPPENDORFF, "ordinal", 0.815, 40),
        (KRIPPENDORFF, "interval", 0.849, 40),
        (WIKIPEDIA, "nominal", 0.691, 26),
        (WIKIPEDIA, "interval", 0.811, 26),
    ],
)
def test_alpha_is_the_published_one(matrix: Any, metric: Any, expected: float, n: int) -> None:
    estimate = krippendorff_alpha(*listed(matrix), metric).estimate
    assert estimate.value == pytest.approx(expected, abs=0.0005)
    assert estimate.n == n


def test_scores_on_a_continuous_scale_give_the_same_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    table = krippendorff_alpha(*listed(KRIPPENDORFF), "interval")
    monkeypatch.setattr(statistics, "_MANY_VALUES", 1)
    moments = krippendorff_alpha(*listed(KRIPPENDORFF), "interval")
    assert moments.estimate.value == pytest.approx(table.estimate.value, abs=1e-12)
    assert moments.estimate.low == pytest.approx(table.estimate.low, abs=1e-12)
    assert moments.disagreement == pytest.approx(table.disagreement, abs=1e-12, nan_ok=True)


def test_the_parts_of_the_ratings_make_up_alpha() -> None:
    units, values = listed(KRIPPENDORFF)
    alpha = krippendorff_alpha(units, values, "ordinal")
    assert alpha.estimate.value is not None
    assert 1 - np.nanmean(alpha.disagreement) == pytest.approx(alpha.estimate.value, abs=1e-12)
    alone = units.index(11)  # the last unit was rated once
    assert np.isnan(alpha.disagreement).tolist() == [i == alone for i in range(len(units))]


@pytest.mark.parametrize(
    ("units", "values"), [([], []), ([1], [1]), ([1, 2], [1, 2]), ([1, 1], [1, 1]), ([1, 1, 2], [3, 3, 4])]
)
def test_alpha_is_not_defined_without_pairs_that_could_differ(units: list[int], values: list[int]) -> None:
    assert krippendorff_alpha(units, values, "nominal").estimate.value is None


def test_alpha_of_perfect_agreement_and_of_no_numbers() -> None:
    # perfect agreement has no interval to speak of
    estimate = krippendorff_alpha([0, 0, 1, 1], [1, 1, 2, 2], "nominal").estimate
    assert (estimate.value, estimate.low, estimate.high) == (1.0, None, None)
    # values that are no numbers are refused
    with pytest.raises(ValueError, match="expected finite values"):
        krippendorff_alpha([1, 1], [1.0, float("nan")], "interval")


def test_the_interval_of_alpha_covers_what_it_should() -> None:
    """Of 300 samples of 60 units, about 95 % of the intervals hold the alpha of the whole."""
    random = np.random.default_rng(7)

    def ratings(units: int) -> tuple[Any, Any]:
        truth = random.choice(2, units, p=[0.7, 0.3])
        said = np.where(random.random((units, 3)) < 0.8, truth[:, None], 1 - truth[:, None])
        return np.repeat(np.arange(units), 3), said.ravel()

    whole = krippendorff_alpha(*ratings(100_000), "nominal").estimate.value
    assert whole is not None
    samples = [krippendorff_alpha(*ratings(60), "nominal").estimate for _ in range(300)]
    covered = sum(s.low <= whole <= s.high for s in samples if s.low is not None and s.high is not None)
    assert 0.91 <= covered / 300 <= 0.98


SAS = [[0, 4, 1], [0, 8, 0], [0, 1, 5]]
"""The example whose figures SAS gives, as quoted in statsmodels' test_inter_rater.py."""


def test_kappa_of_examples() -> None:
    # kappa is the published one
    kappa = cohen_kappa(SAS)
    assert [kappa.value, kappa.low, kappa.high] == pytest.approx([0.4842, 0.2137, 0.7547], abs=5e-5)
    assert kappa.n == 19
    # weighted kappa is the published one
    assert cohen_kappa(SAS, "linear").value == pytest.approx(0.4701, abs=5e-5)
    # kappa of scores is quadratically weighted kappa
    pairs = [(i, j) for i, row in enumerate(SAS) for j, count in enumerate(row) for _ in range(count)]
    first, second = zip(*pairs, strict=True)
    assert kappa_of_scores(first, second).value == pytest.approx(
        cohen_kappa(SAS, "quadratic").value, abs=1e-12
    )
    # kappa of two who always say one thing is not defined
    assert cohen_kappa([[5, 0], [0, 0]]).value is None
    assert kappa_of_scores([0.5, 0.5], [0.5, 0.5]).value is None
    assert cohen_kappa([[0, 0], [0, 0]]).n == 0


def test_every_two_raters_are_compared_where_both_rated() -> None:
    units = np.array([7, 7, 7, 8, 8, 9])
    raters = np.array([2, 0, 1, 0, 2, 1])
    values = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = [(a, b, x.tolist(), y.tolist()) for a, b, x, y in rated_by_both(units, raters, values)]
    assert found == [(0, 1, [2.0], [3.0]), (0, 2, [2.0, 4.0], [1.0, 5.0]), (1, 2, [3.0], [1.0])]


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


def test_the_chance_agrees_with_growthbook(vectors: Any) -> None:
    given, expected = vectors["gb-bayes"]["input"], vectors["gb-bayes"]["expected"]
    found = uplift(moments_of_counts(*given["b"]), moments_of_counts(*given["a"]))
    assert chance_above_zero(found) == pytest.approx(expected["chance_to_win"], abs=2e-5)


@pytest.mark.parametrize("name", ["srm-0", "srm-2", "srm-4", "srm-6", "srm-8"])
def test_the_ratio_check_agrees_with_growthbook(vectors: Any, name: str) -> None:
    case = vectors[name]
    found = ratio_mismatch_p(case["input"]["users"], case["input"]["weights"])
    assert found == pytest.approx(case["expected"]["p"], abs=case["tol"])


def test_the_ratio_check_counts_no_units_of_an_arm_that_is_missing() -> None:
    assert ratio_mismatch_p([40], [0.5, 0.5]) == ratio_mismatch_p([40, 0], [0.5, 0.5]) < 0.001
    assert ratio_mismatch_p([], [0.5, 0.5]) == 1


def test_the_beta_binomial_mixture_reaches_its_threshold_where_confseq_has_its_bound(vectors: Any) -> None:
    bound = vectors["cs-others"]["expected"]["beta_binomial_two_sided_bound"]
    assert beta_binomial(100, 0.2, 0.8)(bound, 100) == pytest.approx(math.log(1 / 0.05), abs=1e-4)


def test_the_scale_of_a_mixture_has_the_value_of_its_reference_implementation() -> None:
    # confseq's own test (target value of an R implementation)
    assert mixing_scale(100, 0.05) == pytest.approx(12.60056, abs=1e-5)


def test_a_mean_over_units() -> None:
    # a mean over units with several decisions counts units
    # 3 of 4 good for one unit, 0 of 1 for the other: mean 3/5. Without the first the mean is 0, without the other 3/4:
    # the jackknife's variance of the mean is 1/2 (0.6^2 + 0.15^2) = 0.19125, of one unit twice that
    found = Moments.of_ratio([3, 0], [4, 1])
    assert (found.n, found.mean) == (2, pytest.approx(0.6))
    assert found.variance == pytest.approx(0.3825)
    # a unit that makes all the decisions leaves nothing to judge by
    assert Moments.of_ratio([3, 0], [4, 0]).variance == math.inf
    # a mean over units with one decision each is the plain mean
    values = [0.0, 1.0, 1.0, 0.5]
    found = Moments.of_ratio(values, [1, 1, 1, 1])
    assert (found.mean, found.variance) == pytest.approx((np.mean(values), np.var(values, ddof=1)))


def test_the_chance_of_two_arms_is_the_normal_one() -> None:
    # difference 0.1 with standard deviation sqrt(0.01 + 0.02): Phi(0.57735) = 0.7181486
    assert best_chances([0.4, 0.5], [0.01, 0.02])[1] == pytest.approx(0.7181486, abs=1e-6)


def test_a_bandit_leaves_each_arm_its_floor() -> None:
    assert thompson_shares([0.0, 0.25, 0.75], 0.1) == pytest.approx([0.1, 0.275, 0.625])


def test_units_still_needed() -> None:
    # the units still needed settle the matter and one less does not
    found = Contrast(0.05, 0.05**2, 400)
    more = units_needed(found)
    per_unit = found.error * found.n
    at = [half_width(per_unit / n, n, 0.05, 1000) for n in (400 + more - 1, 400 + more)]
    assert at[1] < 0.05 <= at[0]
    # nobody waits for a difference that is not there
    assert units_needed(Contrast(0.0, 0.01, 400)) is None
    assert units_needed(Contrast(1e-6, 0.01, 400)) is None


def test_a_proportion_sequence() -> None:
    # a proportion sequence contains wilsons interval
    # valid at every look, so wider than the one look's
    wilson = wilson_interval(30, 100)
    low, high = proportion_sequence(30, 100)
    assert wilson.high is not None
    assert low < wilson.low < wilson.high < high
    # a proportion sequence reaches the ends
    assert proportion_sequence(0, 30)[0] == 0.0
    assert proportion_sequence(30, 30)[1] == 1.0
    assert proportion_sequence(0, 0) == (0.0, 1.0)
    # one side alone is closer
    found = difference(Moments(500, 0.6, 0.24), Moments(500, 0.5, 0.25))
    assert always_valid(found).low < always_valid_low(found) < found.value


def test_a_proportion_sequence_covers_under_peeking() -> None:
    random = np.random.default_rng(5)
    missed = 0
    for _ in range(60):
        walk = np.cumsum(random.random(600) < 0.3)
        looks = (proportion_sequence(int(walk[n - 1]), n, n_opt=300) for n in range(50, 601, 50))
        missed += any(not low <= 0.3 <= high for low, high in looks)
    assert missed <= 7  # 5 % of 60 is 3; more than 7 has a chance of 1 in 100


def test_peeking_finds_real_differences_alone() -> None:
    # equal arms rarely differ however often one looks
    # 2,000 experiments, a look every 10 decisions: the long form is benchmarks/experiments.py
    assert peeking(experiments=2000, decisions=1000, share=0.3, gain=0.0, seed=1).alarms <= 0.05
    # a real difference is found
    assert peeking(experiments=200, decisions=2000, share=0.3, gain=0.15, seed=1).alarms > 0.95
