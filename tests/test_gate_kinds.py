"""The gate on evidence other than pairs: rules on figures worked by hand, and worlds whose truth is known."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl.gates import rules
from rl.gates.effects import effect_of, items_of
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS
from rl.gates.report import OLDER, REFUSED, Case, Evidence, GateBounds, Item, RatedAnswer, RuleResult
from rl.gates.rules import CHAMPION, gate_judge, rule_slices
from tests.support.evidence_worlds import KindWorld, evidence_of, promoted_in
from tests.support.figures import figures_of
from tests.support.gate_worlds import BOUNDS

KINDS = (LABELS, CORRECTIONS, TESTS, OUTCOMES, REWARDS)
"""Every kind but pairs, which tests/test_gates.py tries."""


def thumbs(up: list[float], down: list[float], **facts: Any) -> list[Item]:
    """One answer to each prompt, with the shifts of those liked and those disliked."""
    return [
        RatedAnswer(f"{value}{i}{facts}", value, shift, **facts)
        for value, shifts in ((1.0, up), (0.0, down))
        for i, shift in enumerate(shifts)
    ]


def evidence(**others: list[Item]) -> Evidence:
    return Evidence("base", (), other_kinds=others)


def verdict(rule: rules.Rule, found: Evidence, to: str = rules.CHAMPION, **bounds: Any) -> RuleResult:
    return rule(found, GateBounds(**bounds), to)


LIKED = thumbs([2.0 + i / 10 for i in range(20)], [i / 10 for i in range(20)])
"""Every liked answer moved further than every disliked one, but for the ties at 2.0 there are none: 0 to 1.9, 2 to
3.9."""


def test_thumbs_carry_the_gate_where_there_are_no_pairs() -> None:
    report = gate_judge(evidence(labels=LIKED), BOUNDS)
    assert report.passed
    assert (report.verdicts[0].figures["prompts"], report.verdicts[0].figures["kind"]) == (40, LABELS)
    said = report.verdicts[1]
    assert said.words.startswith(
        "+50.0 points in concordance with thumbs, stars and scores against base, lower bound "
    )
    assert said.figures["kind"] == LABELS
    assert (said.figures["accuracy"], said.figures["against_accuracy"]) == (1.0, 0.5)


def test_too_little_waits() -> None:
    # twenty nine prompts are not evidence however often they were rated
    items = [RatedAnswer(f"p{i}", float(j), float(j)) for i in range(29) for j in range(2)]
    said = verdict(rules.rule_evidence, evidence(labels=items))
    assert not said.passed
    assert (said.figures["prompts"], said.figures["needed"], said.waits) == (29, 30, True)
    # answers that were all liked wait for one that was not
    said = verdict(rules.rule_accuracy, evidence(labels=thumbs([1.0 + i for i in range(40)], [])))
    assert (said.passed, said.waits) == (False, True)
    assert said.figures == {"kind": LABELS, "n": 40}


def test_thumbs_that_are_all_alike_do_not_keep_other_evidence_from_leading() -> None:
    """They tell no policy from another: what people wrote is asked, or said to be too little."""
    up = thumbs([float(i) for i in range(100)], [])
    written: list[Item] = [Case(1, 0) for _ in range(40)]
    assert gate_judge(evidence(labels=up, corrections=written), BOUNDS).passed
    said = verdict(rules.rule_evidence, evidence(labels=up, corrections=written[:29]))
    assert (said.passed, said.figures["prompts"], said.figures["kind"]) == (False, 29, CORRECTIONS)
    # a single one that was not liked makes them evidence again
    mixed = [*up, *thumbs([], [0.0])]
    assert verdict(rules.rule_evidence, evidence(labels=mixed, corrections=written)).words.startswith("101 ")


def test_worse_and_written() -> None:
    # what moved towards the disliked is worse
    turned = [
        RatedAnswer(item.prompt, 1 - item.value, item.shift)
        for item in LIKED
        if isinstance(item, RatedAnswer)
    ]
    assert not verdict(rules.rule_accuracy, evidence(labels=turned), rules.CHALLENGER).passed
    assert verdict(rules.rule_accuracy, evidence(labels=LIKED), rules.CHALLENGER).passed
    # log likelihood of what people wrote is told in nats per token
    written = [Case(-1.0 - i / 100, -1.5 - i / 50) for i in range(40)]
    said = verdict(rules.rule_accuracy, evidence(corrections=written))
    assert said.passed
    # differences 0.5 + i / 100, mean 0.695
    assert said.words.startswith("+0.695 nats per token in agreement with what people wrote against base")


def test_a_loss_on_another_kind_of_evidence_closes_the_gate() -> None:
    lost = [Case(0.0, 1.0)] * 8 + [Case(1.0, 1.0)] * 24
    report = gate_judge(evidence(labels=LIKED, tests=lost), BOUNDS)
    (refusal,) = report.refusals
    assert refusal.rule == "other_evidence"
    assert (refusal.figures[TESTS]["value"], refusal.figures[TESTS]["n"]) == (-0.25, 32)
    assert report.harmful
    # a coin falls so four times running in one of sixteen, and 29 prompts are not asked
    assert gate_judge(
        evidence(labels=LIKED, tests=[Case(0.0, 1.0)] * 4 + [Case(1.0, 1.0)] * 28), BOUNDS
    ).passed
    assert gate_judge(evidence(labels=LIKED, tests=lost[:29]), BOUNDS).passed


def test_a_base_that_finds_right_answers_likelier_and_does_not_give_them_is_beaten_by_known_answers() -> None:
    # of 33 prompts the base orders 32 pairs rightly, as the right text is the shorter one, and answers 18 rightly
    pairs = [Case(1.0, 1.0)] * 32 + [Case(1.0, 0.0)]
    answers: list[Item] = [Case(1.0, 1.0)] * 18 + [Case(1.0, 0.0)] * 15
    found = Evidence("base", pairs, other_kinds={KNOWN: answers}, discrete=True)
    assert gate_judge(found, BOUNDS).passed
    assert not gate_judge(replace(found, discrete=False), BOUNDS).passed


def test_a_reward_model_does_not_judge_what_was_trained_on_it() -> None:
    better = [Case(0.9, 0.1 + i / 100) for i in range(40)]
    assert gate_judge(evidence(rewards=better), BOUNDS).passed
    barred = Evidence(
        "base", (), other_kinds={REWARDS: better}, exclusions={REWARDS: "it was trained on them"}
    )
    report = gate_judge(barred, BOUNDS)
    assert not report.passed
    assert "rewards are not used: it was trained on them" in report.verdicts[0].words


def test_thumbs_of_one_rater_do_not_carry_alone() -> None:
    ups = [float(i) for i in range(30, 60)]
    alone = [
        *thumbs(ups, [float(i) for i in range(30)], raters=("mallory",)),
        *thumbs([float(i) for i in range(0, 60, 2)], [float(i) for i in range(1, 61, 2)], raters=("ada",)),
    ]
    said = verdict(rules.rule_raters, evidence(labels=alone))
    assert not said.passed
    assert said.words.startswith("the gain depends on one rater: without mallory's 60 of 120 prompts it is")


def test_a_slice_and_what_is_older_are_judged_by_thumbs_too() -> None:
    lost = thumbs([float(i) for i in range(12)], [float(i) for i in range(20, 32)], slices=("topic:b", OLDER))
    found = evidence(labels=[*LIKED, *lost])
    assert "worse on slice topic:b: -50.0 points over 24 prompts" in verdict(rules.rule_slices, found).words
    older = verdict(rules.rule_forgetting, found)
    assert not older.passed
    assert figures_of(older.words) == [-50.0, 24]


@pytest.mark.parametrize(("gain", "shuffle"), [(0.0, False), (0.25, True)], ids=["equal", "shuffled"])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_luck_nor_shuffled_feedback_promotes(kind: str, gain: float, shuffle: bool) -> None:
    """The long form with 1,000 seeds is benchmarks/gate_kinds.py."""
    world = KindWorld(kind, prompts=40, gain=gain)
    through = [promoted_in(world, np.random.default_rng(seed), shuffle=shuffle) for seed in range(20)]
    assert sum(found is not None for found in through) <= 3  # 1 expected at most; 3 or fewer in 98.4 %


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_points_better_is_promoted_by_every_kind(kind: str) -> None:
    world = KindWorld(kind, prompts=200, gain=0.2)
    passed = [
        gate_judge(evidence_of(world, np.random.default_rng(seed)), BOUNDS).passed for seed in range(20)
    ]
    assert sum(passed) >= 18


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CORRECTIONS, REWARDS])
def test_a_little_better_nearly_everywhere_and_much_worse_on_a_few_is_not_better(kind: str) -> None:
    """By Student's t and sign flips alone 12 % of such series ended in a promotion."""
    world = KindWorld(kind, prompts=200, skew=0.1)
    through = [promoted_in(world, np.random.default_rng(seed)) for seed in range(60)]
    assert sum(found is not None for found in through) <= 6  # 3 expected at most; 6 or fewer in 97 %


def test_near_identical_prompts_are_one_piece_of_evidence() -> None:
    """Ten prompts won, nine of them one question: two of two, not ten of ten; a share of a cluster is a share."""
    alike = [
        {
            "prompt_hash": str(i),
            "own": 1.0,
            "other": 0.0,
            "slices": [f"tag:{i}"],
            "raters": ["ann"],
            "cluster": "a",
        }
        for i in range(9)
    ]
    alone = {"prompt_hash": "x", "own": 1.0, "other": 0.0, "slices": [], "raters": ["bob"]}
    items = items_of([*alike, alone])
    expected = [Case(1.0, 0.0, tuple(f"tag:{i}" for i in range(9)), ("ann",)), Case(1.0, 0.0, (), ("bob",))]
    assert items == expected
    effect = effect_of(TESTS, items_of([*alike[:3], {**alike[3], "own": 0.0}, alone]))
    assert (effect.n, effect.value, effect.unit) == (2, (0.75 + 1) / 2, "points")
    # two answers to one prompt stay two; two prompts of one cluster become one answer between them
    rated = [
        {"prompt_hash": prompt, "value": value, "shift": shift, "slices": [], "cluster": "a"}
        for prompt, value, shift in (("p", 1.0, 0.5), ("p", 0.0, 0.1))
    ]
    assert len(items_of(rated)) == 2
    (one,) = items_of([*rated, {**rated[0], "prompt_hash": "q", "value": 0.5, "shift": 0.6}])
    assert isinstance(one, RatedAnswer)
    assert (one.prompt, one.value, one.shift) == ("a", 0.5, pytest.approx(0.4))


def test_the_pairs_of_a_prompt_are_one_and_each_stays_in_its_slice() -> None:
    def pair(prompt: str, own: float, other: float, *slices: str, cluster: str = "") -> dict[str, Any]:
        return {"prompt_hash": prompt, "own": own, "other": other, "slices": list(slices), "cluster": cluster}

    found = items_of([pair("p", 1, 0, "t", "longer"), pair("p", 0, 0, "t", "shorter"), pair("q", 1, 1, "t")])
    assert found == [
        Case(0.5, 0.0, ("t", "longer", "shorter"), (), (("longer", 1.0, 0.0), ("shorter", 0.0, 0.0))),
        Case(1, 1, ("t",)),
    ]
    assert found[0].restrict_to_slice("longer") == Case(1.0, 0.0, ("longer",))
    assert found[0].restrict_to_slice("t") == found[0]
    # near-identical prompts are one of the prompts' means: (1/2 + 1) / 2, not two pairs of three
    (one,) = items_of(
        [pair("p", 1, 0, cluster="c"), pair("p", 0, 0, cluster="c"), pair("q", 1, 1, cluster="c")]
    )
    assert one == Case(0.75, 0.5)


def test_a_slice_of_pairs_is_judged_by_its_own_pairs() -> None:
    """Longer answers preferred: always lost. Shorter ones: always won. Each prompt has a pair of either kind."""
    stored = [
        {"prompt_hash": str(i), "own": own, "other": 1 - own, "slices": [name]}
        for i in range(40)
        for own, name in ((0, "preferred:longer"), (1, "preferred:shorter"))
    ]
    cases = [item for item in items_of(stored) if isinstance(item, Case)]
    assert len(cases) == 40
    found = rule_slices(Evidence("base", cases), BOUNDS, CHAMPION)
    assert found.outcome == REFUSED
    assert found.figures["preferred:longer"] == {"value": -1.0, "n": 40}


@pytest.mark.slow
def test_groups_that_are_near_identical_promote_nobody() -> None:
    world = KindWorld(PAIRS, prompts=120, groups="3")
    through = [promoted_in(world, np.random.default_rng(seed)) for seed in range(30)]
    assert sum(found is not None for found in through) <= 4  # 1.5 expected at most; 4 or fewer in 98 %
    blind = KindWorld(PAIRS, prompts=120, groups="3", told=False)
    through = [promoted_in(blind, np.random.default_rng(seed)) for seed in range(30)]
    assert sum(found is not None for found in through) > 4
