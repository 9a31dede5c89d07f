"""Gates: each rule on figures worked by hand, and the whole gate in worlds whose truth is known."""

from __future__ import annotations

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
    same = AnswerPair(True, True, 0.5, 0.5, 40, 40)
    return [dataclasses.replace(same, **facts)] * n


def verdict(rule: rules.Rule, found: Evidence, to: str = rules.CHAMPION, **bounds: Any) -> RuleResult:
    return rule(found, GateBounds(**bounds), to)


def test_the_shares_of_alpha_sum_to_alpha() -> None:
    assert rules.alpha_of_attempt(0.05, 1) == pytest.approx(0.1 / 3)
    assert rules.alpha_of_attempt(0.05, 3) == pytest.approx(0.05 / 18)
    # telescoping: the attempts after the first spend alpha / 3 (1 - 1 / n)
    assert sum(rules.alpha_of_attempt(0.05, k) for k in range(1, 101)) == pytest.approx(0.05 * (1 - 0.01 / 3))


def test_too_few_prompts_are_not_evidence() -> None:
    assert verdict(rules.rule_evidence, evidence(cases(29))).words.startswith("29 held-out prompts")
    near = evidence(cases(29), near_identical="58 of 90 prompts count as 29")
    assert "(58 of 90 prompts count as 29)" in verdict(rules.rule_evidence, near).words
    assert not verdict(rules.rule_evidence, evidence(cases(29))).passed
    assert verdict(rules.rule_evidence, evidence(cases(30))).passed


def test_what_passes_at_the_first_attempt_may_be_luck_at_the_tenth() -> None:
    assert verdict(rules.rule_accuracy, evidence(cases(40, 9, 1))).passed
    tenth = verdict(rules.rule_accuracy, evidence(cases(40, 9, 1), attempt=10))
    assert not tenth.passed
    assert "comparison 10 on these held-out prompts" in tenth.words


def test_a_margin_asks_for_more_than_being_better() -> None:
    assert verdict(rules.rule_accuracy, evidence(cases(30, 20, 2))).passed
    assert not verdict(rules.rule_accuracy, evidence(cases(30, 20, 2)), margin=0.3).passed


def test_a_challenger_need_only_not_be_worse() -> None:
    assert verdict(rules.rule_accuracy, evidence(cases(30, 4, 4)), rules.CHALLENGER).passed
    assert not verdict(rules.rule_accuracy, evidence(cases(30, 1, 12)), rules.CHALLENGER).passed


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (gate_answers.rule_reward, answered(), answered(reward=0.3)),
        (gate_answers.rule_valid, answered(), [*answered(16), *answered(4, valid=False)]),
        (gate_answers.rule_length, answered(chars=60), answered(chars=70)),
        (gate_answers.rule_length, answered(chars=30), answered(chars=20)),
    ],
)
def test_answers_that_got_worse_are_refused(
    rule: rules.Rule, good: list[AnswerPair], bad: list[AnswerPair]
) -> None:
    assert verdict(rule, evidence(answer_pairs=good)).outcome == PASSED
    assert verdict(rule, evidence(answer_pairs=bad)).outcome == REFUSED


@pytest.mark.parametrize(("looping", "passes"), [(15, True), (16, False)])
def test_free_text_that_says_the_same_over_and_over_is_not_served(looping: int, passes: bool) -> None:
    rambling = answered(looping, loops=True)
    found = verdict(gate_answers.rule_valid, evidence(answer_pairs=[*rambling, *answered(60 - looping)]))
    assert (found.passed, found.waits) == (passes, not passes)


@pytest.mark.parametrize(
    ("good", "passes"), [(None, False), ((70.0, 9), False), ((70.0, 10), True), ((40.0, 30), False)]
)
def test_answers_as_long_as_people_like_them_pass_beside_a_rival_of_another_length(
    good: tuple[float, int] | None, passes: bool
) -> None:
    found = evidence(answer_pairs=answered(chars=70), good_chars=good)
    assert verdict(gate_answers.rule_length, found).passed is passes


@pytest.mark.parametrize(("kl", "passes"), [(2.0, True), (2.01, False), (float("nan"), False)])
def test_the_distance_to_the_base_is_bounded(kl: float, passes: bool) -> None:
    assert verdict(gate_answers.rule_kl, evidence(kl=kl)).passed is passes


def test_a_slice_that_lost_is_named() -> None:
    found = evidence(
        [*cases(10, 20, 0, slices=("topic:a",)), *cases(4, 0, 8, slices=("topic:b",))]
    )  # fmt: skip
    said = verdict(rules.rule_slices, found)
    assert not said.passed
    assert said.figures["topic:b"] == {"value": pytest.approx(-8 / 12), "n": 12}


def test_a_small_slice_is_not_judged() -> None:
    found = evidence(cases(1, 0, 8, slices=("topic:b",)))
    assert verdict(rules.rule_slices, found).outcome == NOT_APPLICABLE


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


def test_forgetting_is_not_asked_where_nothing_is_older() -> None:
    (found,) = [v for v in gate_judge(evidence(), BOUNDS).verdicts if v.rule == "forgetting"]
    assert found.outcome == "not_applicable"


def test_one_failing_golden_case_closes_the_gate() -> None:
    right, wrong = GoldenResult("refund", True, "yes"), GoldenResult("threat", False, "sure", "must not")
    assert verdict(gate_answers.rule_golden, evidence(golden=[right])).passed
    said = verdict(gate_answers.rule_golden, evidence(golden=[right, wrong]))
    assert (said.passed, figures_of(said.words)) == (False, [1, 2])
    assert said.words.endswith("threat")


def test_a_gain_that_only_one_rater_sees_is_refused() -> None:
    alone = [*cases(0, 20, 0, raters=("mallory",)), *cases(20, 5, 5, raters=("ada",))]
    shared = [*cases(0, 20, 0, raters=("mallory",)), *cases(20, 10, 1, raters=("ada",))]
    assert "depends on one rater: without mallory's 20" in verdict(rules.rule_raters, evidence(alone)).words
    assert verdict(rules.rule_raters, evidence(shared)).outcome == PASSED


def test_two_raters_who_both_see_it_are_no_reproach() -> None:
    # 11 to 3 is luck in 2.9 % (binomial), too much for a first attempt; 22 to 6 in 0.2 %, and both see the same
    both = [*cases(20, 11, 3, raters=("ada",)), *cases(20, 11, 3, raters=("bob",))]
    assert verdict(rules.rule_raters, evidence(both)).outcome == PASSED


def test_a_gain_that_may_be_chance_rests_on_nobody() -> None:
    small = [*cases(20, 5, 1, raters=("ada",)), *cases(30, 3, 3, raters=("bob",))]
    assert verdict(rules.rule_raters, evidence(small)).outcome == NOT_APPLICABLE


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


def test_a_reward_that_fell_by_chance_waits_until_the_bound_is_ruled_out() -> None:
    up, down, same = answered(1, reward=1.0)[0], answered(1, reward=0.0)[0], answered(1)[0]
    # 5 up and 6 down by half a point: a coin does so; of 12 prompts that rules out little, of 60 a fall of 0.2
    mixed = [up] * 5 + [down] * 6
    few = verdict(gate_answers.rule_reward, evidence(answer_pairs=[*mixed, same]))
    many = verdict(gate_answers.rule_reward, evidence(answer_pairs=mixed + [same] * 49))
    fell = verdict(gate_answers.rule_reward, evidence(answer_pairs=[down] * 5 + [same] * 55))
    assert (few.passed, few.waits) == (False, True)
    assert many.passed
    assert (fell.passed, fell.waits, fell.figures["p"]) == (False, False, 1 / 32)


def test_prompts_that_nobody_judged_say_nothing_of_the_reward() -> None:
    told, silent = answered(30, reward=0.2), answered(170, judged=False)
    assert not verdict(gate_answers.rule_reward, evidence(answer_pairs=told + silent)).passed
    assert verdict(gate_answers.rule_reward, evidence(answer_pairs=silent)).outcome == NOT_APPLICABLE


def test_what_people_wrote_allows_as_much_distance_as_it_lies_away() -> None:
    written = {CORRECTIONS: [Case(-1.0, -4.0)] * 30}
    gain = Difference(3.2, 3.0, 3.4)
    for kl, lead, passes in ((4.9, True, True), (5.1, True, False), (4.9, False, True), (5.1, False, False)):
        found = Evidence("base", () if lead else cases(40), kl=kl, other_kinds=written, written_gain=gain)
        assert verdict(gate_answers.rule_kl, found).passed is passes, (kl, lead)
    unknown = Evidence("base", (), kl=2.1, other_kinds=written)
    assert not verdict(gate_answers.rule_kl, unknown).passed


def test_a_lower_off_policy_estimate_is_refused() -> None:
    good, bad = Difference(0.01, -0.1, 0.1), Difference(-0.08, -0.2, 0.05)
    assert verdict(gate_answers.rule_off_policy, evidence(off_policy=good)).passed
    assert not verdict(gate_answers.rule_off_policy, evidence(off_policy=bad)).passed
    assert verdict(gate_answers.rule_off_policy, evidence()).outcome == NOT_APPLICABLE


def test_a_policy_of_several_fields_is_held_against_a_classifier_of_each() -> None:
    """It beats a base that is never right, and is right in 7 of 100 prompts: not promoted."""
    close, far = (
        evidence(right_beside=(0.56, 0.6)),
        evidence(right_beside=(0.067, 0.6), fields="Some are right."),
    )
    assert verdict(gate_answers.rule_fields, close).outcome == PASSED
    refused = verdict(gate_answers.rule_fields, far)
    assert (refused.outcome, refused.waits) == (REFUSED, True)
    assert refused.figures == {"value": 0.067, "classifier": 0.6, "bound": 0.05}
    assert "(Some are right)" in refused.words
    assert verdict(gate_answers.rule_fields, evidence()).outcome == NOT_APPLICABLE


def test_every_rule_stands_in_the_report_and_every_refusal_in_its_reason() -> None:
    report = gate_judge(evidence(cases(5, 0, 5), kl=9.0), BOUNDS)
    assert len(report.verdicts) == len(rules.RULES)
    assert [said.rule for said in report.refusals] == ["evidence", "accuracy", "kl"]
    assert report.reason.count(";") == 2
    assert report.as_dict()["passed"] is False


@pytest.mark.parametrize(
    "bad", [{"alpha": 0.0}, {"min_evidence": 0}, {"max_kl": -1.0}, {"max_length_ratio": 0.9}]
)
def test_bounds_outside_their_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(GateError):
        GateBounds(**bad)


# --- Worlds whose truth is known; the long form with more seeds is benchmarks/gates.py -------------------------


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
def test_what_only_looks_better_is_refused_with_the_right_reason(
    world: gate_worlds.World, reason: str
) -> None:
    found = sheets(world, 40)
    assert sum(report.passed for report in found) <= 2
    assert refused_by(found, reason) >= 0.9
