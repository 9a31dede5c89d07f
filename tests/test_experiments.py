"""Who answers for a unit: buckets, ramps, exclusion groups; making, starting and stopping experiments."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
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


def test_a_unit_stands_where_its_digest_says() -> None:
    # printf 'salt\x1funit-1' | sha256sum: its first and its next 13 hex digits (52 bits), over 2^52
    first, second = "6e383a7695ca3", "9a6f7bca888f5"
    assert positions("salt", "unit-1") == (int(first, 16) / 2**52, int(second, 16) / 2**52)


def independent(pairs: Iterable[tuple[bool, bool]]) -> bool:
    """Whether two properties of the units have nothing to do with each other."""
    table = [[0, 0], [0, 0]]
    for one, two in pairs:
        table[one][two] += 1
    return bool(stats.chi2_contingency(table, correction=False).pvalue > 0.001)


def test_units_are_spread_evenly_over_buckets() -> None:
    places = [positions("salt", unit) for unit in UNITS]
    for column in (0, 1):
        assert share_p([*Counter(int(place[column] * 100) for place in places).values()]) > 0.001
    # taking part says nothing of the arm, nor does another salt's arm
    assert independent((taken < 0.25, arm >= 0.5) for taken, arm in places)
    other = [positions("another", unit)[1] for unit in UNITS]
    assert independent((place[1] >= 0.5, arm >= 0.5) for place, arm in zip(places, other, strict=True))


@pytest.mark.slow
def test_a_bandit_draws_afresh_in_each_epoch() -> None:
    def new(epoch: int, unit: str) -> bool:
        return plan(epoch=epoch).assignment(unit).arm == "e/new"

    assert independent((new(1, unit), new(2, unit)) for unit in UNITS)


def test_arms_get_their_weights_and_the_propensity_is_the_arms_share() -> None:
    uneven = plan(arms=(ArmPlan("old", "a-v1", 3.0), ArmPlan("new", "a-v2", 1.0)))
    found = [(a.arm, a.propensity) for unit in UNITS if (a := uneven.assignment(unit))]
    assert set(found) == {("e/old", 0.75), ("e/new", 0.25)}
    assert stats.binomtest(found.count(("e/new", 0.25)), len(UNITS), 0.25).pvalue > 0.001


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


@pytest.fixture
def policies(db: None) -> tuple[Policy, Policy]:
    return policy_of("filer-v1", Policy.Stage.CHAMPION), policy_of("filer-v2")


def test_without_an_experiment_the_champion_answers_else_the_base_model(db: None) -> None:
    assert assign("filer", "user-1").policy == "base"
    policy_of("filer-v1", Policy.Stage.CHAMPION)
    found = assign("filer", "user-1")
    assert (found.policy, found.arm, found.propensity) == ("filer-v1", "", 1.0)


@pytest.mark.parametrize("end", ["stopped", "an arm's policy is rejected"])
def test_a_started_experiment_splits_the_units_until_it_ends(policies: Any, end: str) -> None:
    def found() -> set[tuple[str, str]]:
        return {(a.arm, a.policy) for unit in UNITS[:50] for a in [plan_of("filer").assign(unit)]}

    running = experiment_start(draft_of(), actor="ann")
    assert found() == {("shorter/control", "filer-v1"), ("shorter/challenger", "filer-v2")}
    # a decision without a unit is a unit of its own
    assert len({assign("filer", "").arm for _ in range(64)}) == 2
    if end == "stopped":
        experiment_stop(running, actor="ann", reason="enough seen")
    else:
        Policy.objects.filter(name="filer-v2").update(stage=Policy.Stage.REJECTED)
    assert {policy for _, policy in found()} == {"filer-v1"}


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


def test_a_ramp_only_goes_up_and_what_is_done_is_kept(policies: Any) -> None:
    running = experiment_start(draft_of(ramp=10), actor="ann")
    assert experiment_ramp(running, 25, actor="bob").ramp == 25
    for wrong in (25, 10, 30):
        with pytest.raises(ExperimentRefused, match="50, 100"):
            experiment_ramp(running, wrong, actor="ann")
    experiment_stop(running, actor="bob", reason="enough seen")
    kept = ExperimentEvent.objects.order_by("pk").values_list("kind", "actor")
    assert list(kept) == [("created", "ann"), ("started", "ann"), ("ramped", "bob"), ("stopped", "bob")]


def test_settings_that_cannot_be_are_refused(policies: Any) -> None:
    for knobs, fault in (
        ({"metric": "happiness"}, "expected one of"),
        ({"guardrails": [{"metric": "latency_ms", "margin": -1}]}, "margin"),
        ({"slices": ["colour"]}, "slices"),
        ({"ramp": 33}, "ramp"),
    ):
        with pytest.raises(ExperimentRefused, match=fault):
            draft_of(**knobs)
    policy_of("support-v1", agent="support")
    arms = [ArmOrder("filer-v1", "a"), ArmOrder("support-v1", "b")]
    with pytest.raises(ExperimentRefused, match="policies of agent filer"):
        experiment_create("filer", "mixed", arms, actor="ann")
