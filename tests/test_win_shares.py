"""The sequential test of a judging round: exact evidence, an interval that agrees with the verdict, and error rates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from benchmarks.judging import false_verdicts, power
from rl.statistics.sequential import (
    BETTER,
    NOT_WORSE,
    OPEN,
    WORSE,
    WinShare,
    log_evidence,
    share_low,
)
from tests.support.judging_worlds import JudgingWorld

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


@pytest.mark.parametrize("share", [0.5, 0.4, 0.2])
def test_the_evidence_does_not_grow_on_average_where_the_claim_is_false(share: float) -> None:
    for wins, losses in ((0, 0), (7, 3), (3, 9)):
        now = math.exp(log_evidence(wins, losses, 0.5))
        won, lost = (math.exp(log_evidence(wins + w, losses + 1 - w, 0.5)) for w in (1, 0))
        assert share * won + (1 - share) * lost <= now * (1 + 1e-9)


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


def test_a_fixed_horizon_test_does_not_survive_looking() -> None:
    random = np.random.default_rng(3)
    walks = np.cumsum(random.random((300, 400)) < 0.5, axis=1)
    n = np.arange(1, 401)
    called = (np.abs(2 * walks - n) > 1.96 * np.sqrt(n))[:, 9:].any(axis=1)
    assert called.mean() > 0.3


def test_a_better_policy_is_found() -> None:
    found = power(JudgingWorld(0.7, ties=0.2, prompts=400), 200)
    assert found["better_within_200_prompts"] > 0.95
    assert 40 < found["median_judgements"] < 70
