"""Who answers for a unit: buckets, ramps, exclusion groups; making, starting and stopping experiments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from rl.experiments.traffic import (
    ArmOrder,
    ExperimentRefused,
    assign,
    experiment_create,
    experiment_ramp,
    experiment_start,
    experiment_stop,
    plan_of,
)
from rl.models import Experiment, ExperimentEvent, Policy
from rl.statistics.assignment import ArmPlan, ExperimentPlan, group_place, positions
from tests.support.experiments import draft_of, policy_of

UNITS = [f"user-{number}" for number in range(20_000)]


def plan(salt: str = "salt", ramp: float = 100.0, **facts: Any) -> ExperimentPlan:
    arms = facts.pop("arms", (ArmPlan("old", "a-v1", 1.0), ArmPlan("new", "a-v2", 1.0)))
    return ExperimentPlan(name="e", salt=salt, ramp=ramp, arms=arms, **facts)


def share_p(counts: list[int]) -> float:
    """Chance of counts so uneven if all buckets are equally likely."""
    return float(stats.chisquare(counts).pvalue)


# --- Buckets ------------------------------------------------------------------------------------------------


def test_a_unit_stands_where_its_digest_says() -> None:
    # printf 'salt\x1funit-1' | sha256sum: its first and its next 13 hex digits (52 bits), over 2^52
    first, second = "6e383a7695ca3", "9a6f7bca888f5"
    assert positions("salt", "unit-1") == (int(first, 16) / 2**52, int(second, 16) / 2**52)


def test_units_are_spread_evenly_over_buckets() -> None:
    for column in (0, 1):
        counts = [0] * 100
        for unit in UNITS:
            counts[int(positions("salt", unit)[column] * 100)] += 1
        assert share_p(counts) > 0.001


def test_arms_under_two_salts_are_independent() -> None:
    table = [[0, 0], [0, 0]]
    for unit in UNITS:
        table[int(positions("one", unit)[1] * 2)][int(positions("two", unit)[1] * 2)] += 1
    assert stats.chi2_contingency(table, correction=False).pvalue > 0.001


def test_taking_part_says_nothing_of_the_arm() -> None:
    table = [[0, 0], [0, 0]]
    for unit in UNITS:
        taken, arm = positions("salt", unit)
        table[int(taken < 0.25)][int(arm * 2)] += 1
    assert stats.chi2_contingency(table, correction=False).pvalue > 0.001


def test_arms_get_their_weights() -> None:
    uneven = plan(arms=(ArmPlan("old", "a-v1", 3.0), ArmPlan("new", "a-v2", 1.0)))
    new = sum(uneven.assignment(unit).arm == "e/new" for unit in UNITS)  # type: ignore[union-attr]
    assert stats.binomtest(new, len(UNITS), 0.25).pvalue > 0.001


def test_the_propensity_is_the_arms_share() -> None:
    uneven = plan(arms=(ArmPlan("old", "a-v1", 3.0), ArmPlan("new", "a-v2", 1.0)))
    found = {(a.arm, a.propensity) for unit in UNITS[:200] if (a := uneven.assignment(unit))}
    assert found == {("e/old", 0.75), ("e/new", 0.25)}


@pytest.mark.slow
def test_a_ramp_takes_its_share_and_moves_nobody_who_is_in() -> None:
    before: dict[str, str] = {}
    for ramp in (1, 5, 10, 25, 50, 100):
        step = plan(ramp=ramp)
        now = {unit: found.arm for unit in UNITS if (found := step.assignment(unit))}
        assert before.items() <= now.items()
        assert stats.binomtest(len(now), len(UNITS), ramp / 100).pvalue > 0.001
        before = now


def test_another_process_assigns_the_same() -> None:
    code = (
        "from rl.statistics.assignment import positions\n"
        "print([int(positions('salt', f'user-{n}')[1] * 1000) for n in range(50)])"
    )
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([int(positions("salt", f"user-{n}")[1] * 1000) for n in range(50)])


def test_experiments_of_one_group_share_no_unit() -> None:
    one = plan("one", 25.0, group="g", group_start=0.0)
    two = plan("two", 50.0, group="g", group_start=25.0)
    taken = [(one.takes(unit), two.takes(unit)) for unit in UNITS]
    assert not any(a and b for a, b in taken)
    assert stats.binomtest(sum(a for a, _ in taken), len(UNITS), 0.25).pvalue > 0.001
    assert stats.binomtest(sum(b for _, b in taken), len(UNITS), 0.50).pvalue > 0.001


def test_a_place_in_a_group_is_the_first_that_is_large_enough() -> None:
    assert group_place([], 50) == 0
    assert group_place([(0, 25), (50, 25)], 25) == 25
    assert group_place([(0, 25), (50, 25)], 30) is None
    assert group_place([(0, 50)], 50) == 50


@pytest.mark.slow
def test_a_bandit_draws_afresh_in_each_epoch() -> None:
    table = [[0, 0], [0, 0]]
    for unit in UNITS:
        first, second = (plan(epoch=epoch).assignment(unit) for epoch in (1, 2))
        assert first is not None
        assert second is not None
        table[first.arm == "e/new"][second.arm == "e/new"] += 1
    assert stats.chi2_contingency(table, correction=False).pvalue > 0.001


# --- From draft to end --------------------------------------------------------------------------------------


@pytest.fixture
def policies(db: None) -> tuple[Policy, Policy]:
    return policy_of("filer-v1", Policy.Stage.CHAMPION), policy_of("filer-v2")


def test_without_an_experiment_the_champion_answers_for_everybody(policies: Any) -> None:
    found = assign("filer", "user-1")
    assert (found.policy, found.arm, found.propensity) == ("filer-v1", "", 1.0)


def test_without_a_champion_the_base_model_answers(db: None) -> None:
    assert assign("filer", "user-1").policy == "base"


def test_a_started_experiment_splits_the_units(policies: Any) -> None:
    experiment_start(draft_of(), actor="ann")
    found = plan_of("filer")
    assert {found.assign(unit).arm for unit in UNITS[:50]} == {"shorter/control", "shorter/challenger"}
    assert {found.assign(unit).policy for unit in UNITS[:50]} == {"filer-v1", "filer-v2"}


def test_a_stopped_experiment_gives_everybody_the_champion(policies: Any) -> None:
    running = experiment_start(draft_of(), actor="ann")
    experiment_stop(running, actor="ann", reason="enough seen")
    assert {plan_of("filer").assign(unit).policy for unit in UNITS[:50]} == {"filer-v1"}


def test_an_arm_whose_policy_is_retired_gets_no_more_units(policies: Any) -> None:
    experiment_start(draft_of(), actor="ann")
    Policy.objects.filter(name="filer-v2").update(stage=Policy.Stage.REJECTED)
    assert {plan_of("filer").assign(unit).policy for unit in UNITS[:50]} == {"filer-v1"}


def test_a_decision_without_a_unit_is_a_unit_of_its_own(policies: Any) -> None:
    experiment_start(draft_of(), actor="ann")
    assert len({assign("filer", "").arm for _ in range(64)}) == 2


def test_a_candidate_may_not_answer_users(db: None) -> None:
    policy_of("filer-v1", Policy.Stage.CHAMPION)
    policy_of("filer-v2", Policy.Stage.CANDIDATE)
    with pytest.raises(ExperimentRefused, match="promote it"):
        experiment_start(draft_of(), actor="ann")


def test_one_agent_runs_one_experiment_outside_groups(policies: Any) -> None:
    experiment_start(draft_of("one"), actor="ann")
    with pytest.raises(ExperimentRefused, match="one is running"):
        experiment_start(draft_of("two"), actor="ann")


def test_a_full_group_takes_no_more(policies: Any) -> None:
    for name in ("one", "two"):
        experiment_start(draft_of(name, group="g", ramp=10, group_reserve=50), actor="ann")
    with pytest.raises(ExperimentRefused, match="no 50 %"):
        experiment_start(draft_of("three", group="g", ramp=10, group_reserve=50), actor="ann")
    starts = Experiment.objects.filter(status="running").order_by("pk").values_list("group_start", flat=True)
    assert list(starts) == [0.0, 50.0]


def test_a_ramp_only_goes_up(policies: Any) -> None:
    running = experiment_start(draft_of(ramp=10), actor="ann")
    assert experiment_ramp(running, 25, actor="ann").ramp == 25
    for wrong in (25, 10, 30):
        with pytest.raises(ExperimentRefused, match="can go on to 50, 100"):
            experiment_ramp(running, wrong, actor="ann")


def test_what_is_done_to_an_experiment_is_kept(policies: Any) -> None:
    running = experiment_start(draft_of(ramp=10), actor="ann")
    experiment_ramp(running, 25, actor="bob")
    experiment_stop(running, actor="bob", reason="enough seen")
    kept = ExperimentEvent.objects.order_by("pk").values_list("kind", "actor")
    assert list(kept) == [("created", "ann"), ("started", "ann"), ("ramped", "bob"), ("stopped", "bob")]


@pytest.mark.parametrize(
    ("knobs", "fault"),
    [
        ({"metric": "happiness"}, "expected one of"),
        ({"guardrails": [{"metric": "latency_ms", "margin": -1}]}, "margin"),
        ({"slices": ["colour"]}, "slices"),
        ({"ramp": 33}, "ramp"),
    ],
)
def test_settings_that_cannot_be_are_refused(policies: Any, knobs: dict[str, Any], fault: str) -> None:
    with pytest.raises(ExperimentRefused, match=fault):
        draft_of(**knobs)


def test_another_agents_policy_is_no_arm(policies: Any) -> None:
    policy_of("support-v1", agent="support")
    with pytest.raises(ExperimentRefused, match="policies of agent filer"):
        experiment_create(
            "filer", "mixed", [ArmOrder("filer-v1", "a"), ArmOrder("support-v1", "b")], actor="ann"
        )
