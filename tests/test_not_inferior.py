"""`not_inferior`: a loss of the margin is ruled out, in the gate, in judging rounds and in experiments."""

import dataclasses
import math

import numpy as np
import pytest
import scipy

from rl.experiments.verdicts import HARM, NOT_INFERIOR, UNDECIDED, Rule, effect_of, verdict_of
from rl.gates.answers import CHALLENGER, CHAMPION
from rl.gates.evidence_kinds import KNOWN, LABELS, PAIRS
from rl.gates.report import Case, Evidence, GateBounds, GateError, JudgingEvidence, RatedAnswer
from rl.gates.rules import allowed_loss, gate_judge, rule_accuracy
from rl.models import GateSettings, JudgedPair, JudgingRound
from rl.recipes.experiment_metrics import HIGHER, LOWER, metric_of
from rl.registry.judging import judgement_submit, round_standing
from rl.statistics.contrasts import Moments
from rl.statistics.intervals import not_inferior_p
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE, WinShare
from tests.support.incumbent_worlds import IncumbentWorld, opens_in_a_row
from tests.support.judging import AGENT, preference, round_of

MARGIN = 0.05
BOUNDS = GateBounds(not_inferior=MARGIN)


def test_without_a_discordant_case_the_p_is_the_chance_of_seeing_none() -> None:
    assert not_inferior_p(0, 0, 60, MARGIN) == pytest.approx(0.95**60, abs=2e-6)


@pytest.mark.parametrize(("n", "margin", "alpha"), [(40, 0.1, 0.05), (50, 0.05, 0.0333), (40, 0.1, 0.008)])
def test_a_loss_is_rarely_called_none(n: int, margin: float, alpha: float) -> None:
    counts = [(w, k) for w in range(n + 1) for k in range(n + 1 - w)]
    passing = np.array(
        [one for one in counts if one[0] > one[1] - n * margin and not_inferior_p(*one, n, margin) <= alpha]
    )
    for lost in (margin, 0.15, 0.3, 0.5):
        shares = [lost - margin, lost, 1 - 2 * lost + margin]
        table = np.column_stack([passing, n - passing.sum(1)])
        assert scipy.stats.multinomial.pmf(table, n, shares).sum() <= alpha


def test_impossible_counts_and_margins_are_refused() -> None:
    for counts in ((5, 6, 10, 0.05), (-1, 2, 10, 0.05), (1, 1, 10, 0.0)):
        with pytest.raises(ValueError, match="expected wins and losses"):
            not_inferior_p(*counts)
    for margin in (0.5, -0.1, math.nan):
        with pytest.raises(GateError, match="not_inferior"):
            GateBounds(not_inferior=margin)


def known(wins: int, losses: int, both: int, **facts: object) -> Evidence:
    cases = [Case(1, 0)] * wins + [Case(0, 1)] * losses + [Case(1, 1)] * both
    return Evidence("old", (), other_kinds={KNOWN: cases}, discrete=True, **facts)  # type: ignore[arg-type]


def test_a_policy_as_good_is_promoted_where_a_loss_is_ruled_out() -> None:
    even = known(10, 10, 380)
    assert not rule_accuracy(even, GateBounds(), CHAMPION).passed
    found = rule_accuracy(even, BOUNDS, CHAMPION)
    assert found.passed
    assert (found.figures["margin"], found.figures["low"] > -MARGIN) == (-MARGIN, True)
    few = rule_accuracy(known(2, 2, 40), BOUNDS, CHAMPION)
    assert (few.passed, few.waits) == (False, True)
    assert not rule_accuracy(known(10, 40, 350), BOUNDS, CHAMPION).passed


def test_attempts_and_clusters() -> None:
    # each attempt must be surer and a challenger is told its worth
    passed = [rule_accuracy(known(4, 4, 192, attempt=k), BOUNDS, CHAMPION).passed for k in (1, 2, 20)]
    assert passed == [True, True, False]
    found = rule_accuracy(known(1, 4, 25), BOUNDS, CHALLENGER)
    assert found.passed
    assert "1 % of the traffic" in found.words
    # averaged cases of clusters are asked too
    cases = [Case(0.5, 1.0), Case(1.0, 0.5)] * 10 + [Case(1, 1)] * 300
    even = Evidence("old", (), other_kinds={KNOWN: cases}, discrete=True)
    assert rule_accuracy(even, BOUNDS, CHAMPION).passed
    worse = [Case(0.5, 1.0)] * 40 + [Case(1, 1)] * 280
    assert not rule_accuracy(dataclasses.replace(even, other_kinds={KNOWN: worse}), BOUNDS, CHAMPION).passed


def test_likelihoods_and_the_base_have_no_margin() -> None:
    pairs = Evidence("old", [Case(1, 1)] * 40)
    rated = Evidence(
        "old", (), other_kinds={LABELS: [RatedAnswer(str(n), n % 2, 0.1 * n) for n in range(40)]}
    )
    assert allowed_loss(pairs, BOUNDS, CHAMPION) == allowed_loss(rated, BOUNDS, CHAMPION) == 0
    assert allowed_loss(dataclasses.replace(known(1, 1, 40), against="base"), BOUNDS, CHAMPION) == 0
    assert allowed_loss(known(1, 1, 40), BOUNDS, CHAMPION) == MARGIN


def test_twenty_policies_that_lose_the_margin_are_hardly_ever_promoted() -> None:
    world = IncumbentWorld(200, 0.8, -MARGIN, 0.5, corrected=1.0)
    assert sum(opens_in_a_row(world, seed, BOUNDS) for seed in range(12)) <= 3


@pytest.mark.parametrize(
    ("counts", "verdict", "settled"),
    [
        ((250, 240), NOT_WORSE, True),
        ((20, 18), OPEN, False),
        ((40, 12), BETTER, True),
        ((5, 60), WORSE, True),
    ],
)
def test_a_round_can_settle_with_not_worse(counts: tuple[int, int], verdict: str, settled: bool) -> None:
    share = WinShare(*counts, 0, 1 / 30, 0.1, not_inferior=True)
    assert (share.verdict, share.settled) == (verdict, settled)
    assert (share.further == 0) == settled
    assert not WinShare(250, 240, 0, 1 / 30, 0.1).settled


def test_a_small_sure_loss_is_not_worse_and_an_even_round_ends() -> None:
    counts = 4500, 5000
    assert WinShare(*counts, 0, 1 / 30, 0.1).verdict == WORSE
    assert WinShare(*counts, 0, 1 / 30, 0.1, not_inferior=True).verdict == NOT_WORSE
    assert WinShare(20, 20, 0, 1 / 30, 0.1).further is None
    assert 50 < (WinShare(20, 20, 0, 1 / 30, 0.1, not_inferior=True).further or 0) < 1000


def _sided(judging: JudgingRound, wanted: str) -> tuple[JudgedPair, str, str]:
    pair, side = preference(judging, "ada", wanted)
    return pair, "ada", side


@pytest.mark.django_db
def test_a_rounds_end_promotes_where_the_gate_asks_no_more() -> None:
    GateSettings.objects.create(agent=AGENT, not_inferior=0.45)
    judging = round_of(60, margin=0.45)
    judging.not_inferior = True
    judging.save()
    for wanted in ("policy", "opponent") * 8:
        judgement_submit(*_sided(judging, wanted))
        judging.refresh_from_db()
        if judging.status == "ended":
            break
    assert (judging.status, judging.verdict) == ("ended", NOT_WORSE)
    share = round_standing(judging).share
    evidence = Evidence("shop", (), exclusions={PAIRS: "answers alone"})
    ended = JudgingEvidence(judging.pk, NOT_WORSE, share, "words", True, 0, 1)
    with_round = dataclasses.replace(evidence, judging=ended)
    assert gate_judge(with_round, GateBounds(not_inferior=0.45), CHAMPION).passed
    assert not gate_judge(with_round, BOUNDS, CHAMPION).passed, "the round's margin is wider than the gate's"


def rule(metric: str = "thumbs_up", goal: str = HIGHER, not_inferior: float = MARGIN) -> Rule:
    return Rule(metric_of(metric), goal, 0.05, 1000, 50, (), 1, not_inferior)


def shares(mean: float, n: int) -> Moments:
    return Moments(n, mean, mean * (1 - mean))


def test_an_experiment_ends_when_a_loss_is_ruled_out() -> None:
    even = shares(0.8, 20_000), shares(0.8, 20_000)
    assert effect_of(*even, rule()).state == NOT_INFERIOR
    assert effect_of(*even, rule(not_inferior=0.0)).state == UNDECIDED
    assert effect_of(shares(0.8, 300), shares(0.8, 300), rule()).state == UNDECIDED


def test_a_sure_loss_within_the_margin_is_no_harm_and_a_larger_one_is() -> None:
    small = effect_of(shares(0.77, 20_000), shares(0.8, 20_000), rule())
    assert (small.state, verdict_of(small, (), 1.0)) == (NOT_INFERIOR, NOT_INFERIOR)
    assert (
        verdict_of(effect_of(shares(0.77, 20_000), shares(0.8, 20_000), rule(not_inferior=0)), (), 1.0)
        == HARM
    )
    assert verdict_of(effect_of(shares(0.7, 20_000), shares(0.8, 20_000), rule()), (), 1.0) == HARM


def test_latency_may_rise_by_a_share_of_the_controls() -> None:
    slower = Moments(20_000, math.log(110), 0.1), Moments(20_000, math.log(100), 0.1)
    assert effect_of(*slower, rule("latency_ms", LOWER, 0.25)).state == NOT_INFERIOR
    assert effect_of(*slower, rule("latency_ms", LOWER, 0.02)).state == "worse"
