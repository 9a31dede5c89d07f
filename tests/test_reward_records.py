"""What decisions earned over time: worked out by hand, calculated once, kept as history, shown and forgotten."""

import uuid
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.core.management import CommandError
from django.db import IntegrityError, OperationalError, transaction
from django.test import Client
from django_q.models import Schedule

from feedback.erasure.service import unit_forget
from feedback.models import Decision
from feedback.recording.ingest import trace_record
from feedback.services import (
    comparison_submit,
    decision_record,
    outcome_record,
    rating_submit,
    rating_withdraw,
)
from rl import tasks
from rl.agents.base import OutcomeScale, RewardFacts
from rl.datasets import prepare_training_dataset
from rl.datasets.reward_records import (
    RewardsRefused,
    decisions_pending,
    raw_rewards,
    rewarded_at_least,
    rewards_calculate,
)
from rl.models import Policy, RewardRecord, RewardSettings
from rl.rewards.answers import AgentReward
from rl.rewards.base import RewardSample
from rl.rewards.horizons import DecisionFeedback, HorizonPlan, rewards_over_time
from tests.support.api_client import ApiClient, error_of, person
from tests.support.said import command

pytestmark = pytest.mark.django_db

SAMPLE = RewardSample([{"role": "user", "content": "?"}], "an answer", "assistant", {})
FACTS = RewardFacts(
    functions={"agent": 1.0},
    outcomes={
        "reopened": OutcomeScale(good=0, bad=1),
        "revenue": OutcomeScale(good=100, bad=0, horizon="strategic"),
    },
    weights={"immediate": 1.0, "delayed": 2.0, "strategic": 1.0},
)


def earned(known: DecisionFeedback, sample: RewardSample = SAMPLE, facts: RewardFacts = FACTS) -> Any:
    return rewards_over_time(HorizonPlan([AgentReward()], facts), [sample], [known])[0]


def test_without_feedback_only_what_is_known_at_once_counts() -> None:
    # a valid answer where nobody knows the right one is worth 1; (1 + 2) / 4
    found = earned(DecisionFeedback())
    assert (found.raw, found.value) == (1.0, 0.75)
    assert found.horizons == {"immediate": 1.0, "delayed": None, "strategic": None}


def test_each_horizon_is_the_mean_of_its_parts_and_counts_by_its_weight() -> None:
    # ratings (1 + 0.5) / 2 = 0.75 -> 1; comparison won -> 2; reopened -> -2: mean 1/3. revenue 25 of 100 -> -1
    known = DecisionFeedback([1.0, 0.5], ["preferred"], {"reopened": 1.0, "revenue": 25.0, "unheard_of": 9.0})
    found = earned(known)
    expected = {"immediate": 1.0, "delayed": pytest.approx(1 / 3), "strategic": pytest.approx(-1.0)}
    assert found.horizons == expected
    assert found.raw == pytest.approx((1 * 1 + 2 * (1 / 3) + 1 * -1) / 4)
    assert found.value == pytest.approx((found.raw + 2) / 4)
    assert set(found.components["delayed"]["parts"]) == {"ratings", "comparisons", "reopened"}


def test_an_outcome_is_cut_at_what_is_worth_all_and_nothing() -> None:
    for value, raw in ((-50.0, -2.0), (0.0, -2.0), (50.0, 0.0), (100.0, 2.0), (1e9, 2.0)):
        found = earned(DecisionFeedback(outcomes={"revenue": value}))
        assert found.horizons["strategic"] == pytest.approx(raw)
    # tasks of the trace are what it led to
    steps = [{"kind": "task", "status": "completed"}, {"kind": "task", "status": "failed"}]
    sample = RewardSample(SAMPLE.prompt, "x", "assistant", {"steps": steps})
    assert earned(DecisionFeedback(), sample).horizons["strategic"] == 0.0


def test_a_weight_of_nothing_leaves_a_horizon_out() -> None:
    facts = RewardFacts({"agent": 1.0}, FACTS.outcomes, {"immediate": 0.0, "delayed": 1.0})
    assert earned(DecisionFeedback([0.0]), facts=facts).raw == -2.0
    assert earned(DecisionFeedback(), facts=facts).raw is None
    bad: list[dict[str, float]] = [
        {"soon": 1.0},
        *({"delayed": weight} for weight in (-1.0, float("nan"), 0.0)),
    ]
    for weights in bad:
        with pytest.raises(ValueError, match="weight"):
            HorizonPlan([], RewardFacts(weights=weights))
    assert earned(DecisionFeedback([1.0])).basis == earned(DecisionFeedback([1.0])).basis
    assert earned(DecisionFeedback([1.0])).basis != earned(DecisionFeedback([0.75])).basis


def decide(number: int = 1, agent: str = "support", **facts: Any) -> Decision:
    said = {"agent": agent, "messages": f"q{number}", "response": f"r{number}", **facts}
    return decision_record(**said).row


def test_calculating_again_adds_nothing() -> None:
    rating_submit(decision=decide(), rater="ada", thumb="up")
    decide(2)
    first = rewards_calculate()
    assert (first.calculated, first.written, first.pending) == (2, 2, 0)
    assert rewards_calculate().calculated == 0
    again = rewards_calculate(everything=True)
    assert (again.calculated, again.written) == (2, 0)
    assert RewardRecord.objects.count() == 2


def test_feedback_that_comes_later_makes_it_pending_and_the_old_reward_stays_on_record() -> None:
    row = decide()
    rewards_calculate()
    rating = rating_submit(decision=row, rater="ada", thumb="down").row
    assert list(decisions_pending("support").values_list("pk", flat=True)) == [row.pk]
    rewards_calculate()
    rating_withdraw(rating)
    rewards_calculate()
    records = list(RewardRecord.objects.filter(decision=row.pk))
    # at once 1 at 0.2; a thumb down -2 at 0.6: (0.2 - 1.2) / 0.8
    assert [record.raw for record in records] == [1.0, pytest.approx(-1.25), 1.0]
    assert [record.supersedes for record in records] == [records[1], records[2], None]


def test_everything_said_or_measured_counts_as_news() -> None:
    one, other = decide(1, messages="q"), decide(2, messages="q")
    rewards_calculate()
    comparison_submit(left=one, right=other, preference="left", rater="ada")
    assert set(decisions_pending("support")) == {one, other}
    rewards_calculate()
    outcome_record(decision=one, name="reopened", value=1)
    assert set(decisions_pending("support")) == {one}


def test_an_operators_settings_change_the_reward_of_the_calculated_too() -> None:
    row = decide()
    outcome_record(decision=row, name="ticket_reopened", value=1)
    rewards_calculate()
    assert raw_rewards([row.pk]) == {row.pk: 1.0}  # nobody said what the outcome is worth
    settings = RewardSettings(
        agent="support",
        immediate_weight=1,
        delayed_weight=1,
        outcomes={"ticket_reopened": {"good": 0, "bad": 1}},
    )
    settings.full_clean()
    settings.save()
    assert rewards_calculate().calculated == 0
    assert rewards_calculate(everything=True).written == 1
    assert raw_rewards([row.pk]) == {row.pk: pytest.approx(-0.5)}


def test_a_trace_speaks_through_its_tool_calls() -> None:
    steps = [
        {"kind": "tool_call", "name": "search", "error": "timeout"},
        {"kind": "decision", "messages": "q", "response": "r"},
    ]
    (pk,) = trace_record(agent="support", steps=steps).decisions
    rewards_calculate()
    record = RewardRecord.objects.get(decision=pk)
    assert record.immediate == pytest.approx((1 - 2) / 2)
    assert record.components["immediate"]["parts"]["tool_success"]["detail"]["failed"] == ["search"]


def test_searches_take_a_least_reward(client: Client, settings: Any) -> None:
    good, bad, none = decide(1), decide(2), decide(3)
    rating_submit(decision=good, rater="ada", score=1.0)
    rating_submit(decision=bad, rater="sim-1", score=0.0, rater_kind="simulated")
    rewards_calculate()
    assert [*RewardRecord.objects.filter(simulated=True).values_list("decision", flat=True)] == [bad.pk]
    assert raw_rewards([uuid.uuid4()]) == {}
    assert set(rewarded_at_least(Decision.objects.all(), 0.5)) == {good, none}
    assert set(rewarded_at_least(Decision.objects.all(), -2)) == {good, bad, none}
    with pytest.raises(RewardsRefused, match="found 3"):
        rewarded_at_least(Decision.objects.all(), 3)
    key = ApiClient("read")
    found = key.get("/api/decisions/", min_reward="1.5").json()["results"]
    assert {row["id"] for row in found} <= {str(good.pk)}
    assert set(error_of(key.get("/api/decisions/", min_reward="3"))["fields"]) == {"min_reward"}
    client.force_login(person("olga", "operator"))
    html = client.get("/decisions/?min_reward=0.5").text
    assert (str(good.pk) in html, str(bad.pk) in html) == (True, False)
    assert client.get("/decisions/?min_reward=nan").status_code == 400
    settings.FEEDBACK_REWARDED = ""
    assert key.get("/api/decisions/", min_reward="-2").json()["results"] == []


def test_the_chain_of_a_decision_cannot_fork() -> None:
    row = decide()
    rewards_calculate()
    first = RewardRecord.objects.get()
    copy = {
        name: getattr(first, name)
        for name in ("decision", "agent", "raw", "components", "rows_said", "basis")
    }
    with pytest.raises(IntegrityError), transaction.atomic():
        RewardRecord.objects.create(**copy)
    with pytest.raises(IntegrityError), transaction.atomic():
        RewardRecord.objects.create(**{**copy, "raw": 2.5, "supersedes": first})
    assert str(row.pk)[:8] in str(first)


def test_settings_that_cannot_be_used_are_refused_by_field() -> None:
    worth = [1, {"good": 1, "bad": 1}, {"good": 1, "bad": 0, "horizon": "immediate"}]
    bad: list[tuple[str, Any]] = [("outcomes", {"reopened": value}) for value in worth]
    functions = ({"no_such_reward": 1}, {"agent": 0})
    for field, value in (*bad, *(("functions", one) for one in functions), ("delayed_weight", -1.0)):
        with pytest.raises(ValidationError) as refused:
            RewardSettings(agent="support", **{field: value}).full_clean()
        assert field in refused.value.message_dict


def test_datasets_of_scores_take_the_reward_of_what_nobody_rated() -> None:
    rated, earned, silent = decide(1), decide(2), decide(3)
    rating_submit(decision=rated, rater="ada", score=0.25)
    rating_submit(decision=earned, rater="ada", notes="no verdict")
    for row in (rated, earned, silent):
        outcome_record(decision=row, name="kept" if row is not silent else "unheard_of", value=1)
    RewardSettings.objects.create(
        agent="support", immediate_weight=0, outcomes={"kept": {"good": 1, "bad": 0}}
    )
    before = prepare_training_dataset("support", "scores", min_samples=1, for_training=False, dry_run=True)
    rewards_calculate()
    after = prepare_training_dataset("support", "scores", min_samples=1, for_training=False, dry_run=True)
    assert [row["score"] for row in before.rows()] == [0.25]
    expected = {"r1": (0.25, "ratings"), "r2": (1.0, "reward")}
    assert {row["completion"]: (row["score"], row["source"]) for row in after.rows()} == expected


def test_forgetting_a_unit_takes_its_rewards() -> None:
    rating_submit(decision=decide(1, unit="bob"), rater="ada", thumb="up")
    decide(2, unit="ada")
    rewards_calculate()
    rating_submit(decision=decide(1, agent="other", unit="bob"), rater="ada", thumb="up")
    unit_forget("bob", dry_run=True)
    assert RewardRecord.objects.count() == 2
    unit_forget("bob")
    assert RewardRecord.objects.count() == 1


WHOLE: dict[str, Any] = {"refused": {}, "unreadable": {}, "unreadable_count": 0}
"""What a calculation reports where every decision could be read."""


def test_the_command_says_how_many_were_calculated_and_still_wait() -> None:
    for number in range(3):
        decide(number)
    decide(agent="other")
    nothing = {**WHOLE, "labels": {}, "outcomes_without_worth": {}}
    after = "python manage.py train_ppo --agent {} --dry-run"
    two = {"calculated": 2, "written": 2, **nothing}
    found = command("calculate_rewards", "--agent-type", "support", "--limit", "2")
    assert found == {**two, "pending": 1, "agents": ["support"], "next": after.format("support")}
    found = command("calculate_rewards")
    assert found == {**two, "pending": 0, "agents": ["other", "support"], "next": after.format("other")}
    assert command("calculate_rewards", "--all")["calculated"] == 4
    with pytest.raises(CommandError, match="known are other, support"):
        command("calculate_rewards", "--agent-type", "nobody")


def test_the_workers_calculate_once_a_day() -> None:
    row = Schedule.objects.get(name="daily rewards")
    assert (row.func, row.schedule_type) == ("rl.tasks.rewards", Schedule.DAILY)
    decide()
    assert tasks.rewards() == {"calculated": 1, "written": 1, "pending": 0, **WHOLE}


def test_the_call_calculates_what_is_pending() -> None:
    decide(1), decide(2)
    client = ApiClient("operate")
    path = "/api/training/calculate-pending"
    expected = {"calculated": 1, "written": 1, "pending": 1, **WHOLE}
    assert client.post(path, {"agent": "support", "limit": 1}).json() == expected
    assert client.post(path, {}).json() == {"calculated": 1, "written": 1, "pending": 0, **WHOLE}
    assert error_of(client.post(path, {"agent": "nobody"}))["code"] == "not_found"
    assert set(error_of(client.post(path, {"limit": 0}))["fields"]) == {"limit"}
    assert ApiClient("read").post(path, {}).status_code == 403
    assert ApiClient().post(path, {}).status_code == 401


def test_an_agent_whose_settings_cannot_work_does_not_hold_up_the_others() -> None:
    decide(agent="broken"), decide()
    RewardSettings.objects.create(agent="broken", functions={"code_execution": 1})  # not switched on
    found = rewards_calculate()
    assert (found.calculated, found.pending, list(found.refused)) == (1, 0, ["broken"])
    assert "ENABLE_CODE_EXECUTION=true" in found.refused["broken"]
    with pytest.raises(RewardsRefused, match="rewards of agent broken"):
        rewards_calculate("broken")
    assert (
        error_of(ApiClient("operate").post("/api/training/calculate-pending", {"agent": "broken"}))["code"]
        == "conflict"
    )


def test_a_decisions_page_shows_its_reward_in_parts_and_links_its_policy(client: Client) -> None:
    client.force_login(person("olga", "operator"))
    row = decide(policy="support-v3")
    assert "h-reward" not in client.get(f"/decisions/{row.pk}/").text
    files = {"base_model": "b", "base_model_hash": "h", "adapter_path": "p", "adapter_sha256": "s"}
    Policy.objects.create(name="support-v3", agent="support", feedback_count=3, **files)
    rating_submit(decision=row, rater="ada", thumb="down")
    rewards_calculate()
    html = client.get(f"/decisions/{row.pk}/").text
    for said in ("raw -1.25", "immediate", "delayed", "strategic", "-2.00 (1)", "/policies/support-v3/"):
        assert said in html, said


def test_a_database_that_takes_nothing_is_no_agents_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for agent in ("one", "other"):
        row = decision_record(agent=agent, messages="q", response="r").row
        rating_submit(decision=row, rater="ann", thumb="up")

    def locked(*_: Any, **__: Any) -> None:
        raise OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(RewardRecord.objects, "bulk_create", locked)
    with pytest.raises(OperationalError, match="readonly"):
        rewards_calculate()
