"""Intervals and paired comparison, against published values and values worked by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from scipy import stats

from rl.statistics import (
    mcnemar_exact,
    mcnemar_unconditional,
    mean_interval,
    paired_difference,
    wilson_interval,
)

VECTORS = Path(__file__).parent.parent.parent / "shared" / "data" / "vectors" / "reference_vectors.json"

# statsmodels, statsmodels/stats/tests/test_proportion.py (BSD-3), values from R's binom package
WILSON = [
    (18, 20, 0.6989663547715128, 0.972133518786232),
    (4, 200, 0.00780442641634947, 0.05028708690582643),
    (0, 30, 0.0, 0.11351339),
    (19, 38, 0.348499283643951, 0.651500716356049),
]


@pytest.mark.parametrize(("successes", "n", "low", "high"), WILSON)
def test_wilson_interval_gives_the_published_limits(successes: int, n: int, low: float, high: float) -> None:
    interval = wilson_interval(successes, n)
    assert interval.value == successes / n
    assert interval.low == pytest.approx(low, abs=1e-6)
    assert interval.high == pytest.approx(high, abs=1e-6)


def test_wilson_interval_gives_the_limits_of_the_shared_vectors() -> None:
    if not VECTORS.exists():
        pytest.skip("the reference vectors (../shared) are not on this machine")
    cases = [case for case in json.loads(VECTORS.read_text()) if case["id"].startswith("wilson-")]
    assert len(cases) == 4
    for case in cases:
        interval = wilson_interval(case["input"]["count"], case["input"]["nobs"])
        assert [interval.low, interval.high] == pytest.approx(case["expected"]["ci"], abs=case["tol"])


def test_wilson_interval_stays_within_0_and_1_at_the_ends() -> None:
    for n in (1, 2, 7, 1000):
        assert wilson_interval(0, n).low == 0.0
        assert wilson_interval(n, n).high == 1.0
        assert 0 < wilson_interval(0, n).high < 1


def test_wilson_interval_narrows_with_less_confidence() -> None:
    wide, narrow = wilson_interval(7, 10, 0.99), wilson_interval(7, 10, 0.8)
    assert wide.low < narrow.low < 0.7 < narrow.high < wide.high


def test_wilson_interval_of_nothing_claims_nothing() -> None:
    assert wilson_interval(0, 0).as_dict() == {"value": None, "low": None, "high": None, "n": 0}


@pytest.mark.parametrize(("successes", "n"), [(-1, 3), (4, 3)])
def test_wilson_interval_refuses_impossible_counts(successes: int, n: int) -> None:
    with pytest.raises(ValueError, match="expected 0 <= successes <= n"):
        wilson_interval(successes, n)


def test_mcnemar_exact_is_twice_the_smaller_binomial_tail() -> None:
    # 1 of 8 discordant: 2 * (C(8,0) + C(8,1)) / 2^8 = 18/256
    assert mcnemar_exact(1, 7) == pytest.approx(18 / 256, abs=1e-12)
    assert mcnemar_exact(7, 1) == mcnemar_exact(1, 7)
    # 0 of 5: 2 / 32
    assert mcnemar_exact(0, 5) == pytest.approx(1 / 16, abs=1e-12)


def test_the_unconditional_p_is_the_largest_chance_of_what_is_as_extreme() -> None:
    # 2 wins of 3 cases, mid-p 1/8: as extreme are 2 of 2 and 3 of 3. With a share s of discordant cases their chance is
    # 3 s^2 (1 - s) / 4 + s^3 / 8, largest at s = 0.8: 0.16
    assert mcnemar_unconditional(2, 0, 3) == pytest.approx(0.16, abs=1e-4)
    # 2 of 2 where all are discordant: 1/4, as the conditional test has it
    assert mcnemar_unconditional(2, 0, 2) == pytest.approx(0.25, abs=1e-5)
    assert mcnemar_unconditional(0, 0, 5) == 1.0
    assert mcnemar_unconditional(1, 2, 5) == pytest.approx(7 / 8)


@pytest.mark.parametrize("alpha", [0.1 / 3, 0.05 / 6, 0.05 / 18])
def test_the_unconditional_test_errs_no_more_than_allowed_whatever_the_share(alpha: float) -> None:
    n = 24
    for share in (0.1, 0.3, 0.6, 0.95, 1.0):
        errs = sum(
            float(stats.multinomial.pmf([w, d, n - w - d], n, [share / 2, share / 2, 1 - share]))
            for w in range(n + 1)
            for d in range(w)
            if w + d <= n and mcnemar_unconditional(w, d, n) <= alpha
        )
        assert errs <= alpha + 1e-6, share


def test_mcnemar_exact_never_exceeds_1() -> None:
    # 2 of 4: twice the tail is 22/16
    assert mcnemar_exact(2, 2) == 1.0
    assert mcnemar_exact(0, 0) == 1.0


def test_mcnemar_exact_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar_exact(-1, 2)


def test_paired_difference_gives_the_published_limits_of_a_correlated_table() -> None:
    # complete response before and after consolidation (Cavo et al. 2012); expected value from the tests of the R
    # package contingencytables (tests/testthat/test-ch8.R): -0.0621 (95% CI -0.1186 to -0.0046)
    difference = paired_difference(59, 6, 16, 80)
    assert difference.value == pytest.approx(-0.0621, abs=5e-5)
    assert difference.low == pytest.approx(-0.1186, abs=5e-5)
    assert difference.high == pytest.approx(-0.0046, abs=5e-5)


def test_paired_difference_gives_the_published_limits_of_a_table_without_correlation() -> None:
    # airway reactivity before and after transplantation (Bentur et al. 2009); Fagerland, Lydersen & Laake,
    # Statistics in Medicine 33 (2014), table of intervals: Newcombe -0.507 to -0.026
    difference = paired_difference(1, 1, 7, 12)
    assert difference.value == pytest.approx(-6 / 21, abs=1e-12)
    assert difference.low == pytest.approx(-0.507, abs=5e-4)
    assert difference.high == pytest.approx(-0.026, abs=5e-4)


def test_paired_difference_is_worked_out_by_hand() -> None:
    # 6 both, 3 first only, 1 second only, 2 neither: n = 12, p1 = 9/12, p2 = 7/12, z = 1.959964
    # Wilson 9/12: (0.4676945, 0.9110584); Wilson 7/12: (0.3195113, 0.8067397)
    # ad - bc = 12 - 3 = 9, less n/2 = 6 -> 3; margins 9*3*7*5 = 945; phi = 3/30.7409 = 0.0975900
    low = math.sqrt(0.2823055**2 - 2 * 0.09759 * 0.2823055 * 0.2234064 + 0.2234064**2)
    high = math.sqrt(0.2638220**2 - 2 * 0.09759 * 0.2638220 * 0.1610584 + 0.1610584**2)
    difference = paired_difference(6, 3, 1, 2)
    assert difference.low == pytest.approx(1 / 6 - low, abs=1e-6)
    assert difference.high == pytest.approx(1 / 6 + high, abs=1e-6)


def test_paired_difference_turns_round_with_its_sides() -> None:
    one, two = paired_difference(20, 9, 3, 8), paired_difference(20, 3, 9, 8)
    assert (one.value, one.low, one.high) == pytest.approx((-two.value, -two.high, -two.low), abs=1e-12)


def test_paired_difference_stays_within_minus_1_and_1() -> None:
    for counts in ((0, 5, 0, 0), (0, 0, 5, 0), (5, 0, 0, 0), (0, 0, 0, 5), (3, 0, 0, 3), (0, 1, 0, 0)):
        difference = paired_difference(*counts)
        assert -1 <= difference.low <= difference.value <= difference.high <= 1


def test_paired_difference_of_no_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        paired_difference(0, 0, 0, 0)


def test_mean_interval_uses_students_t() -> None:
    # mean 3, variance 2.5, n 5; t(0.975, 4) = 2.776445 (any table)
    interval = mean_interval([1, 2, 3, 4, 5])
    half = 2.776445105 * math.sqrt(2.5 / 5)
    assert interval.value == 3.0
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half), abs=1e-8)


def test_mean_interval_is_cut_to_the_possible_range() -> None:
    interval = mean_interval([1.0, 1.0, 0.0], bounds=(0.0, 1.0))
    assert (interval.low, interval.high) == (0.0, 1.0)


def test_mean_interval_of_one_value_knows_no_spread() -> None:
    assert mean_interval([0.4]).as_dict() == {"value": 0.4, "low": None, "high": None, "n": 1}
    assert mean_interval([0.4], bounds=(0, 1)).as_dict() == {"value": 0.4, "low": 0, "high": 1, "n": 1}


def test_mean_interval_of_nothing_claims_nothing() -> None:
    assert mean_interval([]).value is None


def test_mean_interval_refuses_what_is_not_a_number() -> None:
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, math.nan])
