"""Gates: each rule on figures worked by hand, and the whole gate in worlds whose truth is known."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from rl.gates import answers as gate_answers
from rl.gates import rules
from rl.gates.evidence_kinds import CORRECTIONS
from rl.gates.report import (
    NEWER,
    NOT_APPLICABLE,
    OLDER,
    PASSED,
    REFUSED,
    AnswerPair,
    Case,
    Evidence,
    GateBounds,
    GateError,
    GoldenResult,
    RuleResult,
)
from rl.gates.rules import gate_judge
from rl.statistics import Difference
from tests.support import gate_worlds
from tests.support.figures import figures_of
from tests.support.gate_worlds import promoted_in_a_row, refused_by, sheets

BOUNDS = GateBounds()


def cases(both: int = 0, wins: int = 0, losses: int = 0, neither: int = 0, **facts: Any) -> list[Case]:
    return (
        [Case(True, True, **facts)] * both
        + [Case(True, False, **facts)] * wins
        + [Case(False, True, **facts)] * losses
        + [Case(False, False, **facts)] * neither
    )


def evidence(held_out: list[Case] | None = None, **facts: Any) -> Evidence:
    return Evidence("base", cases(20, 12, 1, 7) if held_out is None else held_out, **facts)


def answered(n: int = 20, **facts: Any) -> list[AnswerPair]:
    return [dataclasses.replace(AnswerPair(True, True, 0.5, 0.5, 40, 40), **facts)] * n


def rated(rater: str, *counts: int) -> list[Case]:
    return cases(*counts, raters=(rater,))


WRITTEN = [Case(-1.0, -4.0)] * 30
TOLD, SILENT = answered(30, reward=0.2), answered(170, judged=False)


def verdict(rule: rules.Rule, found: Evidence, to: str = rules.CHAMPION, **bounds: Any) -> RuleResult:
    return rule(found, GateBounds(**bounds), to)


WON = Difference(0.01, -0.1, 0.1)
UP, DOWN, SAME = answered(1, reward=1.0)[0], answered(1, reward=0.0)[0], answered(1)[0]
MIXED = [UP] * 5 + [DOWN] * 6
RULED = [
    (rules.rule_evidence, evidence(cases(29)), {}, REFUSED),
    (rules.rule_evidence, evidence(cases(30)), {}, PASSED),
    # what passes at the first attempt may be luck at the tenth, and a margin asks for more than being better
    (rules.rule_accuracy, evidence(cases(40, 9, 1)), {}, PASSED),
    (rules.rule_accuracy, evidence(cases(40, 9, 1), attempt=10), {}, REFUSED),
    (rules.rule_accuracy, evidence(cases(30, 20, 2)), {}, PASSED),
    (rules.rule_accuracy, evidence(cases(30, 20, 2)), {"margin": 0.3}, REFUSED),
    # a challenger need only not be worse
    (rules.rule_accuracy, evidence(cases(30, 4, 4)), {"to": rules.CHALLENGER}, PASSED),
    (rules.rule_accuracy, evidence(cases(30, 1, 12)), {"to": rules.CHALLENGER}, REFUSED),
    (gate_answers.rule_reward, evidence(answer_pairs=answered()), {}, PASSED),
    (gate_answers.rule_reward, evidence(answer_pairs=answered(reward=0.3)), {}, REFUSED),
    (gate_answers.rule_valid, evidence(answer_pairs=answered()), {}, PASSED),
    (gate_answers.rule_valid, evidence(answer_pairs=[*answered(16), *answered(4, valid=False)]), {}, REFUSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=60)), {}, PASSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=70)), {}, REFUSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=30)), {}, PASSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=20)), {}, REFUSED),
    # answers as long as people like them pass beside a rival of another length
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=70), good_chars=(70.0, 9)), {}, REFUSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=70), good_chars=(70.0, 10)), {}, PASSED),
    (gate_answers.rule_length, evidence(answer_pairs=answered(chars=70), good_chars=(40.0, 30)), {}, REFUSED),
    (gate_answers.rule_kl, evidence(kl=2.0), {}, PASSED),
    (gate_answers.rule_kl, evidence(kl=2.01), {}, REFUSED),
    (gate_answers.rule_kl, evidence(kl=float("nan")), {}, REFUSED),
    (gate_answers.rule_kl, Evidence("base", (), kl=2.1, other_kinds={CORRECTIONS: WRITTEN}), {}, REFUSED),
    (rules.rule_slices, evidence(cases(1, 0, 8, slices=("topic:b",))), {}, NOT_APPLICABLE),
    (gate_answers.rule_off_policy, evidence(off_policy=WON), {}, PASSED),
    (gate_answers.rule_off_policy, evidence(off_policy=Difference(-0.08, -0.2, 0.05)), {}, REFUSED),
    (gate_answers.rule_off_policy, evidence(), {}, NOT_APPLICABLE),
    (gate_answers.rule_golden, evidence(golden=[GoldenResult("refund", True, "yes")]), {}, PASSED),
    (gate_answers.rule_fields, evidence(right_beside=(0.56, 0.6)), {}, PASSED),
    (gate_answers.rule_fields, evidence(), {}, NOT_APPLICABLE),
    # prompts that nobody judged say nothing of the reward
    (gate_answers.rule_reward, evidence(answer_pairs=[*TOLD, *SILENT]), {}, REFUSED),
    (gate_answers.rule_reward, evidence(answer_pairs=SILENT), {}, NOT_APPLICABLE),
    # 5 up and 6 down by half a point: a coin does so, and 60 prompts rule out a fall of 0.2
    (gate_answers.rule_reward, evidence(answer_pairs=MIXED + [SAME] * 49), {}, PASSED),
    # 11 to 3 is luck in 2.9 % (binomial), too much for a first attempt; 22 to 6 in 0.2 %, and both raters see it
    (rules.rule_raters, evidence([*rated("ada", 20, 11, 3), *rated("bob", 20, 11, 3)]), {}, PASSED),
    (rules.rule_raters, evidence([*rated("mallory", 0, 20), *rated("ada", 20, 10, 1)]), {}, PASSED),
    # a gain that may be chance rests on nobody
    (rules.rule_raters, evidence([*rated("ada", 20, 5, 1), *rated("bob", 30, 3, 3)]), {}, NOT_APPLICABLE),
    (rules.rule_forgetting, evidence(), {}, NOT_APPLICABLE),
]


@pytest.mark.parametrize(("rule", "found", "given", "outcome"), RULED)
def test_each_rule(rule: rules.Rule, found: Evidence, given: dict[str, Any], outcome: str) -> None:
    assert verdict(rule, found, **given).outcome == outcome


def test_a_verdict_names_what_it_counted() -> None:
    assert verdict(rules.rule_evidence, evidence(cases(29))).words.startswith("29 held-out prompts")
    near = evidence(cases(29), near_identical="58 of 90 prompts count as 29")
    assert "(58 of 90 prompts count as 29)" in verdict(rules.rule_evidence, near).words
    tenth = verdict(rules.rule_accuracy, evidence(cases(40, 9, 1), attempt=10))
    assert "comparison 10 on these held-out prompts" in tenth.words
    alone = evidence([*rated("mallory", 0, 20), *rated("ada", 20, 5, 5)])
    assert "depends on one rater: without mallory's 20" in verdict(rules.rule_raters, alone).words


@pytest.mark.parametrize(("looping", "passes"), [(15, True), (16, False)])
def test_free_text_that_says_the_same_over_and_over_is_not_served(looping: int, passes: bool) -> None:
    rambling = answered(looping, loops=True)
    found = verdict(gate_answers.rule_valid, evidence(answer_pairs=[*rambling, *answered(60 - looping)]))
    assert (found.passed, found.waits) == (passes, not passes)


def test_a_slice_that_lost_is_named() -> None:
    found = evidence([*cases(10, 20, 0, slices=("topic:a",)), *cases(4, 0, 8, slices=("topic:b",))])
    said = verdict(rules.rule_slices, found)
    assert not said.passed
    assert said.figures["topic:b"] == {"value": pytest.approx(-8 / 12), "n": 12}


def aged(wins: int, losses: int) -> Evidence:
    """Thirty older prompts, of which so many were won and lost, and forty newer ones, all won."""
    older = [(True, False)] * wins + [(False, True)] * losses + [(True, True)] * (30 - wins - losses)
    return Evidence(
        "base",
        [Case(own, other, (OLDER,)) for own, other in older]
        + [Case(True, False, (NEWER,)) for _ in range(40)],
    )


def test_what_the_champion_knew_must_not_be_forgotten() -> None:
    report = gate_judge(aged(wins=1, losses=8), BOUNDS)
    # 10 of 512 ways of nine fair coins show eight heads or more: 0.0195
    (refusal,) = report.refusals
    assert refusal.rule == "forgetting"
    assert refusal.figures["n"] == 30
    assert (refusal.figures["accuracy"], refusal.figures["against_accuracy"]) == pytest.approx(
        (22 / 30, 29 / 30)
    )
    assert gate_judge(aged(wins=1, losses=5), BOUNDS).passed  # 7 of 64: chance


def test_one_failing_golden_case_closes_the_gate() -> None:
    right, wrong = GoldenResult("refund", True, "yes"), GoldenResult("threat", False, "sure", "must not")
    said = verdict(gate_answers.rule_golden, evidence(golden=[right, wrong]))
    assert (said.passed, figures_of(said.words)) == (False, [1, 2])
    assert said.words.endswith("threat")


def test_what_may_be_chance_waits_for_more_and_harm_does_not() -> None:
    good, bad = answered(60)[0], answered(1, valid=False)[0]
    # at 90 % one-sided (z = 1.2816) Wilson's upper end of 3 in 60 is (0.0637 + 0.0386) / 1.0274 = 9.95 points, of 4 in
    # 60 (0.0804 + 0.0435) / 1.0274 = 12.1, of 4 in 100 7.3; five coins fall alike one time in 32
    few, some = [good] * 57 + [bad] * 3, [good] * 56 + [bad] * 4
    passed = verdict(gate_answers.rule_valid, evidence(answer_pairs=few))
    waits = verdict(gate_answers.rule_valid, evidence(answer_pairs=some))
    more = verdict(gate_answers.rule_valid, evidence(answer_pairs=some + [good] * 40))
    many = verdict(gate_answers.rule_valid, evidence(answer_pairs=[good] * 195 + [bad] * 5))
    assert (passed.passed, passed.figures["p"]) == (True, 1 / 8)
    assert (waits.passed, waits.waits, waits.figures["p"]) == (False, True, 1 / 16)
    assert waits.words.endswith(
        ": a loss of up to 12.1 points cannot be ruled out (one-sided 90 % interval, allowed: 10)"
    )
    assert more.passed
    assert (many.passed, many.waits, many.figures["p"]) == (False, False, 1 / 32)
    assert not gate_judge(evidence(cases(5, 0, 0)), BOUNDS).harmful
    assert gate_judge(evidence(cases(5, 0, 0), kl=9.0), BOUNDS).harmful


def test_what_waits_and_what_is_far() -> None:
    # a reward that fell by chance waits and a fall does not
    few = verdict(gate_answers.rule_reward, evidence(answer_pairs=[*MIXED, SAME]))
    fell = verdict(gate_answers.rule_reward, evidence(answer_pairs=[DOWN] * 5 + [SAME] * 55))
    assert (few.passed, few.waits) == (False, True)
    assert (fell.passed, fell.waits, fell.figures["p"]) == (False, False, 1 / 32)
    # what people wrote allows as much distance as it lies away
    written, gain = {CORRECTIONS: WRITTEN}, Difference(3.2, 3.0, 3.4)
    for kl, lead, passes in ((4.9, True, True), (5.1, True, False), (4.9, False, True), (5.1, False, False)):
        found = Evidence("base", () if lead else cases(40), kl=kl, other_kinds=written, written_gain=gain)
        assert verdict(gate_answers.rule_kl, found).passed is passes, (kl, lead)


def test_a_policy_of_several_fields_is_held_against_a_classifier_of_each() -> None:
    """It beats a base that is never right, and is right in 7 of 100 prompts: not promoted."""
    far = evidence(right_beside=(0.067, 0.6), fields="Some are right.")
    refused = verdict(gate_answers.rule_fields, far)
    assert (refused.outcome, refused.waits) == (REFUSED, True)
    assert refused.figures == {"value": 0.067, "classifier": 0.6, "bound": 0.05}
    assert "(Some are right)" in refused.words


def test_every_rule_stands_in_the_report_and_every_refusal_in_its_reason() -> None:
    report = gate_judge(evidence(cases(5, 0, 5), kl=9.0), BOUNDS)
    assert len(report.verdicts) == len(rules.RULES)
    assert [said.rule for said in report.refusals] == ["evidence", "accuracy", "kl"]
    assert report.reason.count(";") == 2
    assert report.dump()["passed"] is False


@pytest.mark.parametrize(
    "bad", [{"alpha": 0.0}, {"min_evidence": 0}, {"max_kl": -1.0}, {"max_length_ratio": 0.9}]
)
def test_bounds_outside_their_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(GateError):
        GateBounds(**bad)


@pytest.mark.campaign
def test_no_better_is_promoted_by_luck_in_twenty_attempts() -> None:
    got_through = sum(
        promoted_in_a_row(gate_worlds.EQUAL, [200] * 20, np.random.default_rng(seed)) is not None
        for seed in range(100)
    )
    assert got_through <= 5


@pytest.mark.slow
def test_ten_points_better_is_promoted() -> None:
    assert sum(report.passed for report in sheets(gate_worlds.BETTER, 100)) >= 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "reason"),
    [
        (gate_worlds.FLIPPED, "accuracy"),
        (gate_worlds.HOSTILE, "raters"),
        (gate_worlds.LENGTHY, "length"),
        (gate_worlds.BROKEN, "slices"),
    ],
    ids=["flipped ratings", "hostile rater", "length hacking", "broken slice"],
)
def test_what_only_looks_better_is_refused(world: gate_worlds.World, reason: str) -> None:
    found = sheets(world, 40)
    assert sum(report.passed for report in found) <= 2
    assert refused_by(found, reason) >= 0.9
