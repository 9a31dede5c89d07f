"""Intervals, paired comparison, concordance and permutation tests, against published values and worked by hand."""

import math

import numpy as np
import pytest
import scipy
from scipy import stats

from benchmarks.judging import false_verdicts, power
from rl.statistics import (
    concordance,
    mcnemar_exact,
    mcnemar_unconditional,
    mean_interval,
    paired_difference,
    wilson_interval,
)
from rl.statistics.concordance import gini_concordance, gini_concordance_p
from rl.statistics.permutation import draws_for, lopsided_mean_p, monte_carlo_p, sign_flip_p
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE, WinShare, log_evidence, share_low
from tests.support.judging_worlds import JudgingWorld

# statsmodels, statsmodels/stats/tests/test_proportion.py (BSD-3), values from R's binom package
WILSON = [
    (18, 20, 0.6989663547715128, 0.972133518786232),
    (4, 200, 0.00780442641634947, 0.05028708690582643),
    (0, 30, 0.0, 0.11351339),
    (19, 38, 0.348499283643951, 0.651500716356049),
]


def test_wilson_interval_gives_the_published_limits() -> None:
    for successes, n, low, high in WILSON:
        interval = wilson_interval(successes, n)
        assert interval.value == successes / n
        assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-6)
    for n in (1, 2, 7, 1000):
        assert (wilson_interval(0, n).low, wilson_interval(n, n).high) == (0.0, 1.0)
        assert 0 < wilson_interval(0, n).high < 1
    wide, narrow = wilson_interval(7, 10, 0.99), wilson_interval(7, 10, 0.8)
    assert wide.low < narrow.low < 0.7 < narrow.high < wide.high
    assert wilson_interval(0, 0).as_dict() == {"value": None, "low": None, "high": None, "n": 0}
    for successes in (-1, 4):
        with pytest.raises(ValueError, match="successes"):
            wilson_interval(successes, 3)


def test_mcnemar() -> None:
    # mcnemar exact is twice the smaller binomial tail
    # 1 of 8 discordant: 2 * (C(8,0) + C(8,1)) / 2^8 = 18/256
    assert mcnemar_exact(1, 7) == mcnemar_exact(7, 1) == pytest.approx(18 / 256, abs=1e-12)
    # 0 of 5: 2 / 32
    assert mcnemar_exact(0, 5) == pytest.approx(1 / 16, abs=1e-12)
    # 2 of 4: twice the tail is 22/16
    assert mcnemar_exact(2, 2) == mcnemar_exact(0, 0) == 1.0
    with pytest.raises(ValueError, match="at least 0"):
        mcnemar_exact(-1, 2)
    # the unconditional p is the largest chance of what is as extreme
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


def test_paired_difference_by_published_limits() -> None:
    # paired difference gives the published limits
    # complete response before and after consolidation (Cavo et al. 2012); expected value from the tests of the R
    # package contingencytables (tests/testthat/test-ch8.R): -0.0621 (95% CI -0.1186 to -0.0046)
    found = paired_difference(59, 6, 16, 80)
    assert (found.value, found.low, found.high) == pytest.approx((-0.0621, -0.1186, -0.0046), abs=5e-5)
    # airway reactivity before and after transplantation (Bentur et al. 2009), no correlation; Fagerland, Lydersen &
    # Laake, Statistics in Medicine 33 (2014), table of intervals: Newcombe -0.507 to -0.026
    found = paired_difference(1, 1, 7, 12)
    assert found.value == pytest.approx(-6 / 21, abs=1e-12)
    assert (found.low, found.high) == pytest.approx((-0.507, -0.026), abs=5e-4)
    # paired difference turns round with its sides and stays within minus 1 and 1
    one, two = paired_difference(20, 9, 3, 8), paired_difference(20, 3, 9, 8)
    assert (one.value, one.low, one.high) == pytest.approx((-two.value, -two.high, -two.low), abs=1e-12)
    for counts in ((0, 5, 0, 0), (0, 0, 5, 0), (5, 0, 0, 0), (0, 0, 0, 5), (3, 0, 0, 3), (0, 1, 0, 0)):
        difference = paired_difference(*counts)
        assert -1 <= difference.low <= difference.value <= difference.high <= 1
    with pytest.raises(ValueError, match="at least one pair"):
        paired_difference(0, 0, 0, 0)


def test_mean_interval_uses_students_t_within_the_possible_range() -> None:
    # mean 3, variance 2.5, n 5; t(0.975, 4) = 2.776445 (any table)
    interval = mean_interval([1, 2, 3, 4, 5])
    half = 2.776445105 * math.sqrt(2.5 / 5)
    assert interval.value == 3.0
    assert (interval.low, interval.high) == pytest.approx((3 - half, 3 + half), abs=1e-8)
    cut = mean_interval([1.0, 1.0, 0.0], bounds=(0.0, 1.0))
    assert (cut.low, cut.high) == (0.0, 1.0)
    assert mean_interval([0.4]).as_dict() == {"value": 0.4, "low": None, "high": None, "n": 1}
    assert mean_interval([0.4], bounds=(0, 1)).as_dict() == {"value": 0.4, "low": 0, "high": 1, "n": 1}
    assert mean_interval([]).value is None
    with pytest.raises(ValueError, match="finite"):
        mean_interval([1.0, math.nan])


def test_with_thumbs_it_is_the_area_under_the_roc_curve_with_delong_s_error() -> None:
    found = gini_concordance([1, 1, 0, 0, 1], [3, 1, 2, 0, 4])
    # liked 3, 1, 4 against disliked 2, 0: five of six times higher
    assert found.gain == pytest.approx(5 / 6 - 1 / 2)
    # shares won: liked 1, 1/2, 1; disliked 2/3, 1. Squares about 5/6: 1/6 over 3^2 and 1/18 over 2^2; times 5/4
    assert found.error == pytest.approx(math.sqrt(5 / 4 * (1 / 6 / 9 + 1 / 18 / 4)))
    assert found.clusters == 5
    tied = gini_concordance([1, 0], [2, 2])
    # pairs (v, s): 1-0.5 right by 0.5, 1-0 right by 1, 0.5-0 wrong by 0.5: (0.5 + 1 - 0.5) / 2 = 0.5 is Gini's
    assert (tied.gain, gini_concordance([1.0, 0.5, 0.0], [3, 1, 2]).gain) == pytest.approx((0, 0.25))
    # where all were rated alike nothing can be said
    assert gini_concordance([1, 1, 1], [3, 2, 1]) is None
    assert gini_concordance_p([1, 1, 1], [3, 2, 1]) == 1.0


def test_answers_to_one_prompt_are_one_cluster() -> None:
    values, scores = [1, 0, 1, 0, 1, 0], [6, 1, 5, 2, 4, 3]
    alone, prompts = (
        gini_concordance(values, scores),
        gini_concordance(values, scores, ["a", "a", "b", "b", "c", "c"]),
    )
    assert alone.gain == prompts.gain == 0.5
    assert (alone.clusters, prompts.clusters) == (6, 3)
    # the same answers four times over are no more evidence than once
    copied = gini_concordance(values * 4, scores * 4, list("aabbcc") * 4)
    assert copied.error == pytest.approx(prompts.error, abs=1e-12)


def test_a_perfect_order() -> None:
    # a perfect order keeps an interval
    found = gini_concordance([1] * 20 + [0] * 20, range(40, 0, -1))
    assert found.error == 0
    # 3 m n / (m + n + 1) draws a coin would need: 3 * 400 / 41 = 29.3; Wilson's bound n / (n + t^2), t(39) = 2.0227
    draws = 3 * 400 / 41
    assert found.interval(0.95).low + 0.5 == pytest.approx(draws / (draws + 2.0227**2), abs=1e-4)
    assert found.interval(0.95).high == pytest.approx(0.5)
    # the exact chance of a perfect order
    # 1 of the 10 ways to put two liked among five
    assert gini_concordance_p([1, 1, 0, 0, 0], [5, 4, 3, 2, 1]) == pytest.approx(0.1, abs=0.02)
    assert gini_concordance_p([1, 1, 0, 0, 0], [1, 2, 3, 4, 5]) == 1.0


def test_the_interval_covers_as_often_as_it_says() -> None:
    random, covered = np.random.default_rng(5), 0
    for _ in range(400):
        liked = random.random(80) < 0.7
        scores = random.standard_normal(80) + liked
        found = gini_concordance(liked.astype(float), scores)
        # P(N(1, 1) > N(0, 1)) = Phi(1 / sqrt 2) = 0.76025
        interval = found.interval(0.95)
        covered += interval.low <= 0.76025 - 0.5 <= interval.high
    assert 0.925 <= covered / 400 <= 0.985


@pytest.mark.campaign
@pytest.mark.parametrize("heavy", [False, True])
def test_unrelated_values_are_rarely_called_a_gain(heavy: bool) -> None:
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
    # of the 16 ways to sign 4, 3, 2, 1 two reach a sum of at least 8: 10 and 8 (+4+3+2-1)
    assert sign_flip_p([4, 3, 2, -1]) == 2 / 16
    assert sign_flip_p([0.0, 0.0]) == sign_flip_p([]) == 1.0
    assert sign_flip_p([1e9, *[-0.1, 0.1] * 20]) > 0.4  # one huge difference is no evidence


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


def test_a_lopsided_mean() -> None:
    # of two values the lopsided mean is the exact binomial: P(at least 8 heads of 10) = 56 / 1024: a Beta(8,
    # 3) lies below 1/2 as often (Clopper & Pearson).
    p = lopsided_mean_p([1.0] * 8 + [-1.0] * 2, -1.0, draws=49_999)
    assert p == pytest.approx(56 / 1024, abs=0.008)
    # a gain on every prompt may hide a loss that no prompt showed
    # weight w of the worst value is Beta(1, n): the sum 0.01 (1 - w) - w is 0 or less from w = 0.01 / 1.01 on, a chance
    # of (1 / 1.01)^n: 0.37 for 100 prompts, 0.0071 for 500
    assert lopsided_mean_p([0.01] * 100, -1.0) == pytest.approx(1.01**-100, abs=0.1)
    assert lopsided_mean_p([0.01] * 500, -1.0, draws=49_999) == pytest.approx(1.01**-500, abs=0.002)
    assert sign_flip_p([0.01] * 100) < 0.001
    assert lopsided_mean_p([-0.1, 0.0], -1.0) == lopsided_mean_p([]) == 1.0
    # values below the least are refused
    with pytest.raises(ValueError, match=r"at least -1, found -1\.5"):
        lopsided_mean_p([0.5, -1.5], -1.0)
    with pytest.raises(ValueError, match="NaN"):
        lopsided_mean_p([0.5, float("nan")])


def test_concordance_by_hand_and_of_few_rows() -> None:
    # concordance by hand
    # of 0.9>0.2, 0.9>0.5, 0.5>0.2 the scores have the first and the second right, and tie the third
    found = concordance([0.9, 0.2, 0.5], [3.0, 1.0, 1.0], ["a", "b", "c"])
    assert (found.share.value, found.pair_count, found.share.n) == (pytest.approx(2.5 / 3), 3, 3)
    # nothing to compare has no share
    assert concordance([1, 1], [0.1, 0.2], ["a", "b"]).share.value is None
    assert concordance([], [], []).share.n == 0
    # a perfect ranking of few rows is no certainty
    four = concordance([1, 1, 0, 0], [4, 3, 2, 1], list("abcd")).share
    assert (four.value, four.high) == (1.0, 1.0)
    assert four.low < 0.5
    assert concordance([1, 0] * 10, [2, 1] * 10, [str(n) for n in range(20)]).share.low > 0.6


def test_rows_of_one_prompt_are_not_evidence_of_their_own() -> None:
    values, scores = [1, 0] * 20, list(np.linspace(0, 1, 40) + np.tile([0.5, 0.0], 20))
    alone = concordance(values, scores, [str(n) for n in range(40)]).share
    together = concordance(values, scores, [str(n // 8) for n in range(40)]).share
    assert alone.value == together.value
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


ALPHA = 1 / 30


def test_the_evidence_is_the_mixture_of_likelihood_ratios() -> None:
    wins, losses, bound = 14, 5, 0.5
    prior = scipy.stats.beta(2, 2)

    def ratio(share: float) -> float:
        likelihood = share**wins * (1 - share) ** losses
        return float(likelihood / (bound**wins * (1 - bound) ** losses) * prior.pdf(share) / prior.sf(bound))

    mixed = scipy.integrate.quad(ratio, bound, 1)[0]
    assert log_evidence(wins, losses, bound) == pytest.approx(math.log(mixed))
    assert log_evidence(0, 0, 0.3) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("wins", "losses", "verdict"),
    [(0, 0, OPEN), (12, 0, BETTER), (0, 14, WORSE), (3, 2, OPEN), (60, 25, BETTER), (250, 240, NOT_WORSE)],
)
def test_the_verdict_and_the_interval_agree(wins: int, losses: int, verdict: str) -> None:
    found = WinShare(wins, losses, 0, ALPHA, 0.1)
    assert found.verdict == verdict
    assert (found.low > 0.5) == (verdict == BETTER)
    assert (found.high < 0.5) == (verdict == WORSE)
    assert (found.low > 0.4) == (verdict in (BETTER, NOT_WORSE))


def test_the_interval_narrows_and_holds_the_share() -> None:
    widths = []
    for count in (10, 100, 1000):
        found = WinShare(6 * count // 10, 4 * count // 10, 0, ALPHA, 0.1)
        assert found.low < 0.6 < found.high
        widths.append(found.high - found.low)
    assert widths == sorted(widths, reverse=True)
    assert share_low(0, 9, ALPHA) == 0.0
    assert found.confidence == pytest.approx(0.95)


def test_ties_change_nothing() -> None:
    without, tied = (WinShare(20, 8, ties, ALPHA, 0.1) for ties in (0, 50))
    assert (without.verdict, without.low, without.high) == (tied.verdict, tied.low, tied.high)


def test_a_forecast_is_what_it_takes() -> None:
    assert 30 < (WinShare(0, 0, 0, ALPHA, 0.1).further or 0) < 70
    assert WinShare(20, 20, 3, ALPHA, 0.1).further is None
    assert WinShare(30, 6, 0, ALPHA, 0.1).further == 0
    further = WinShare(30, 15, 0, ALPHA, 0.1).further
    assert further
    wins = 30 + round(further * 32 / 49)
    assert WinShare(wins, 15 + further - (wins - 30), 0, ALPHA, 0.1).verdict == BETTER
    assert (WinShare(15, 30, 0, ALPHA, 0.1).further or 0) > further


@pytest.mark.parametrize(
    ("world", "wrong"),
    [
        (JudgingWorld(0.5, ties=0.2, prompts=400), {BETTER, WORSE}),
        (JudgingWorld(0.4, ties=0.2, prompts=400), {BETTER, NOT_WORSE}),
    ],
    ids=["equal", "at the margin"],
)
def test_false_verdicts_are_rare_however_often_one_looks(world: JudgingWorld, wrong: set[str]) -> None:
    # 300 rounds; the long form is benchmarks/judging.py
    assert false_verdicts(world, wrong, 300)["value"] <= 0.05


def test_a_better_policy_is_found() -> None:
    found = power(JudgingWorld(0.7, ties=0.2, prompts=400), 200)
    assert found["better_within_200_prompts"] > 0.95
    assert 40 < found["median_judgements"] < 70
