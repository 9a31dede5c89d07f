"""Learnt is what a run that made a policy really read: by its dataset's rows, for random mixes of feedback."""

import random
import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from feedback.models import Comparison, Decision, Outcome, Rating
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from rl.datasets import snapshot_rows
from rl.datasets.buffer import buffer_ids, buffer_size, buffer_size_fresh, buffer_sizes, run_rewards_resolve
from rl.datasets.reward_records import rewards_calculate
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.plan import dataset_of_claimed
from rl.models import GateSettings, LearnerSettings, Learnt, RewardSettings, Snapshot, TrainingRun
from rl.models.learning import learner_config
from rl.models.runs import LEARNER
from rl.online import champion_monitor, learner
from rl.recipes import RecipeError, recipe_named
from tests.support.experiments import policy_of

pytestmark = pytest.mark.django_db

AGENT = "helper"
WORTH = {"solved": {"good": 1, "bad": 0}}


@pytest.fixture(autouse=True)
def switched_on(settings: Any) -> None:
    settings.ENABLE_ONLINE_LEARNING = True


def decide(prompt: str, response: str, agent: str = AGENT, **facts: Any) -> Decision:
    return decision_record(agent=agent, messages=prompt, response=response, **facts).row


def mixed(seed: int, prompts: int = 40) -> None:
    """Feedback of every kind on answers to so many prompts, some of it saying nothing."""
    chance = random.Random(seed)
    RewardSettings.objects.get_or_create(agent=AGENT, defaults={"outcomes": WORTH})
    for number in range(prompts):
        one, two = (decide(f"{seed}: question {number}", f"answer {side}") for side in "ab")
        for row in (one, two):
            kind = chance.choice(["thumb", "score", "correction", "notes", "outcome", "nothing"])
            if kind == "thumb":
                rating_submit(decision=row, rater="ada", thumb=chance.choice(["up", "down"]))
            elif kind == "score":
                rating_submit(decision=row, rater="bob", score=chance.random())
            elif kind == "correction":
                rating_submit(decision=row, rater="cy", correction=f"better {number}")
            elif kind == "notes":
                rating_submit(decision=row, rater="cy", notes="hm")
            elif kind == "outcome":
                outcome_record(decision=row, name="solved", value=chance.choice([0, 1]))
        if chance.random() < 0.3:
            preference = chance.choice(["left", "right", "tie", "both_bad"])
            comparison_submit(left=one, right=two, preference=preference, rater="dan")


def ids_of_all() -> set[uuid.UUID]:
    return {
        pk
        for model in (Rating, Comparison, Outcome)
        for pk in model._default_manager.values_list("pk", flat=True)
    }


def enter(method: str, *, asked_by: str = "train", **more: Any) -> TrainingRun:
    """A run with its dataset, as a worker settles it before training."""
    knobs = more.pop("knobs", {})
    order = TrainOrder(AGENT, method, knobs=knobs, actor=asked_by, min_samples=1, **more)
    recipe = recipe_named(method, "cpu").with_knobs(**knobs)
    run = TrainingRun.objects.create(
        agent=AGENT, method=method, base_model="bundled", asked_by=asked_by, status="running", worker="w"
    )
    run.snapshot = dataset_of_claimed(run, order, recipe).snapshot
    run.save(update_fields=["snapshot"])
    return run


def end(run: TrainingRun, status: str) -> None:
    TrainingRun.objects.filter(pk=run.pk).update(status=status, finished_at=timezone.now())


def learnt(runs_of: Iterable[TrainingRun] | None = None, use: str = "trained") -> set[uuid.UUID]:
    rows = Learnt.objects.filter(use=use)
    if runs_of is not None:
        rows = rows.filter(run__in=list(runs_of))
    return set(rows.values_list("feedback", flat=True))


def behind(run: TrainingRun) -> set[uuid.UUID]:
    """Ids of the feedback on the prompts of a snapshot's training rows, read from its file."""
    assert run.snapshot is not None
    prompts = {row["prompt_hash"] for row in snapshot_rows(run.snapshot, "train")}
    on = {"decision__prompt_hash__in": prompts}
    found = set(Rating.objects.filter(**on).values_list("pk", flat=True))
    found |= set(Outcome.objects.filter(**on).values_list("pk", flat=True))
    return found | set(Comparison.objects.filter(left__prompt_hash__in=prompts).values_list("pk", flat=True))


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(6))
def test_learnt_never_exceeds_the_snapshots_and_nothing_is_lost(seed: int) -> None:
    chance = random.Random(f"runs {seed}")
    made: list[TrainingRun] = []
    for turn in range(4):
        mixed(10 * seed + turn, prompts=15)
        rewards_calculate(AGENT)
        before = set(buffer_ids(AGENT))
        run = enter(chance.choice(["dpo", "kto", "sft"]), max_samples=chance.choice([None, 8]))
        assert learnt([run]) <= behind(run) & before
        assert run.feedback_count >= len(learnt([run]))
        ended = chance.choice(["succeeded", "failed", "cancelled", "refused"])
        end(run, ended)
        if ended == "succeeded":
            made.append(run)
            assert set(buffer_ids(AGENT)) == before - learnt([run]) - learnt([run], "held_out")
        else:
            assert set(buffer_ids(AGENT)) == before
    trained = [pk for run in made for pk in learnt([run])]
    assert len(trained) == len(set(trained)), "learnt for the first time twice"
    # every piece waits, or was read by exactly the runs that made policies, or can say nothing (a rated one's outcome)
    silent = set(Outcome.objects.filter(decision__ratings__isnull=False).values_list("pk", flat=True))
    assert ids_of_all() - silent <= set(buffer_ids(AGENT)) | learnt(made) | learnt(made, "held_out")


def test_a_sample_marks_no_more_than_it_took() -> None:
    for number in range(60):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", thumb="up" if number % 2 else "down")
    run = enter("kto", max_samples=20)
    end(run, "succeeded")
    assert len(learnt([run])) == run.snapshot.counts["train"] == run.feedback_count
    assert buffer_size(AGENT) == 40


def test_a_reward_model_takes_nothing_until_a_policy_follows_it() -> None:
    for number in range(30):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", score=number / 30)
    judge = enter("reward_model", knobs={"objective": "regression"})
    end(judge, "succeeded")
    assert buffer_size(AGENT) == 30
    assert len(learnt([judge])) == judge.snapshot.counts["train"]  # type: ignore[union-attr]
    policy = enter("ppo", knobs={"reward": f"agent,model:{judge.pk}"})
    end(policy, "succeeded")
    assert learnt([policy]) == learnt([judge])
    assert policy.feedback_count == judge.feedback_count
    assert buffer_size(AGENT) == 0  # what the judge kept for judging is kept by its policy too


def test_a_policy_whose_reward_model_is_its_first_stage_learnt_what_that_did() -> None:
    for number in range(30):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", score=number / 30)
    policy = enter("ppo", asked_by=LEARNER, knobs={"reward": "auto"})
    assert (policy.feedback_count, learnt([policy])) == (0, set())
    stage = enter("reward_model", knobs={"objective": "regression"})  # while the policy's run is at work
    assert len(learnt([stage])) == stage.feedback_count > 0
    policy.recipe = {"reward": f"model:{stage.pk}"}
    run_rewards_resolve(policy)
    end(policy, "succeeded")
    assert learnt([policy]) == learnt([stage])
    assert policy.feedback_count == stage.feedback_count
    assert (buffer_size(AGENT), buffer_size_fresh(AGENT)) == (0, 0)


def test_a_policy_paid_by_the_agent_alone_learns_from_no_rating() -> None:
    for number in range(20):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", thumb="up")
    run = enter("ppo", knobs={"reward": "agent", "allow_constant_reward": "true"})
    end(run, "succeeded")
    assert (run.feedback_count, learnt([run]), buffer_size(AGENT)) == (0, set(), 20)
    assert (run.snapshot.kind, sum(run.snapshot.counts.values())) == (Snapshot.Kind.PROMPTS, 20)


def test_the_most_that_one_retrain_reads_bounds_what_it_learns_and_not_what_is_shown() -> None:
    LearnerSettings.objects.create(agent=AGENT, max_buffer_size=10)
    for number in range(25):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", thumb="up" if number % 2 else "down")
    newest = set(Rating.objects.order_by("-created_at").values_list("pk", flat=True)[:10])
    assert learner.OnlineLearner(AGENT).get_status()["buffer_size"] == 25
    run = enter("kto", asked_by=LEARNER)
    assert set(run.learnt.values_list("feedback", flat=True)) == newest
    assert learnt([run]) <= newest
    end(run, "succeeded")
    assert buffer_size_fresh(AGENT) == 15


def test_what_a_retrain_could_not_use_starts_no_other_but_stays_in_the_buffer() -> None:
    for number in range(12):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", notes="only words")
        rating_submit(decision=decide(f"p{number}", "a"), rater="ada", thumb="up" if number % 2 else "down")
    end(enter("kto", asked_by=LEARNER), "succeeded")
    assert (buffer_size(AGENT), buffer_size_fresh(AGENT)) == (12, 0)


def test_outcomes_and_traces_count_in_the_buffer_where_they_are_worth_something() -> None:
    RewardSettings.objects.create(agent=AGENT, outcomes=WORTH)
    row, traced, rated = (decide(f"q{n}", "a", run_id=f"r{n}") for n in range(3))
    outcome_record(decision=row, name="unheard_of", value=1)
    assert buffer_size(AGENT) == 0
    outcome_record(decision=row, name="solved", value=0, at="2026-01-01T00:00:00Z")
    outcome_record(
        decision=row, name="solved", value=1, at="2026-01-02T00:00:00Z"
    )  # measured again: one fact
    assert buffer_size(AGENT) == 1
    from feedback.recording.ingest import trace_record

    trace_record(agent=AGENT, run_id="r1", steps=[{"kind": "task", "name": "t", "status": "failed"}])
    rewards_calculate(AGENT)
    assert set(buffer_ids(AGENT)) == {Outcome.objects.get(value=1, name="solved").pk, traced.pk}
    # what people say of it goes before what was measured: that outcome teaches nothing
    rating_submit(decision=rated, rater="ada", thumb="up")
    outcome_record(decision=rated, name="solved", value=0)
    assert buffer_size(AGENT) == 3
    assert buffer_sizes() == {AGENT: 3}


def test_a_stopped_run_that_goes_on_leaves_to_others_what_they_learnt_meanwhile() -> None:
    for number in range(20):
        rating_submit(decision=decide(f"q{number}", "a"), rater="ada", thumb="up" if number % 2 else "down")
    stopped = enter("kto")
    end(stopped, "cancelled")
    end(enter("kto"), "succeeded")
    from rl.datasets.buffer import feedback_release

    feedback_release(stopped)
    assert learnt([stopped]) == set()


def feed(agent: str, n: int = 5) -> None:
    for number in range(n):
        rating_submit(decision=decide(f"q{number}", "a", agent=agent), rater="ada", thumb="up")


def test_an_unknown_method_stops_no_other(monkeypatch: pytest.MonkeyPatch, ratchet_home: Any) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "backend.isolation.notify", lambda event, text, **facts: told.append({"event": event, **facts})
    )
    for agent in ("alpha", "beta"):
        feed(agent)
        LearnerSettings.objects.create(agent=agent, min_samples_to_retrain=3, method="kto")
    LearnerSettings.objects.filter(agent="alpha").update(method="banana")
    done = learner.tick()
    assert any(line.startswith("retrain of alpha failed: RecipeError") and "banana" in line for line in done)
    assert TrainingRun.objects.get().agent == "beta"
    assert "expected one of auto, dpo, grpo, kto" in learner.OnlineLearner("alpha").get_status()["reason"]
    learner.tick()
    assert [(fact["event"], fact["agent"]) for fact in told] == [("clock_failed", "alpha")]
    # mended, and broken again: news
    LearnerSettings.objects.filter(agent="alpha").update(method="auto", enabled=False)
    learner.tick()
    LearnerSettings.objects.filter(agent="alpha").update(method="banana", enabled=True)
    learner.tick()
    assert len(told) == 2


def test_a_method_nobody_knows_is_refused_in_the_admin_and_in_the_operators_file(settings: Any) -> None:
    with pytest.raises(ValidationError, match="banana"):
        LearnerSettings(agent="alpha", method="banana").full_clean()
    settings.RATCHET_CONFIG = {"continuous_learning": {"method": "banana"}}
    with pytest.raises(RecipeError, match="method: expected one of auto, dpo"):
        learner_config()


def test_one_fault_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch, ratchet_home: Any) -> None:
    def broken() -> list[str]:
        raise ZeroDivisionError("the watch is broken")

    monkeypatch.setattr(champion_monitor, "champions_watch", broken)
    feed("beta")
    LearnerSettings.objects.create(agent="beta", min_samples_to_retrain=3, method="kto")
    done = learner.tick()
    assert "champion watch of all agents failed: ZeroDivisionError: the watch is broken" in done
    assert TrainingRun.objects.get().agent == "beta"


def test_each_champion_is_watched(monkeypatch: pytest.MonkeyPatch, ratchet_home: Any) -> None:
    for agent in ("alpha", "beta"):
        policy_of(f"{agent}-v1", "champion", agent=agent)
    looked: list[str] = []

    def look(champion: Any) -> None:
        looked.append(champion.agent)
        if champion.agent == "alpha":
            raise ValueError("alpha out of range")

    monkeypatch.setattr(champion_monitor, "champion_look", look)
    (line,) = champion_monitor.champions_watch()
    assert line.endswith("ValueError: alpha out of range")
    assert looked == ["alpha", "beta"]
    assert GateSettings.objects.count() == 0


def test_a_reward_function_that_raises_costs_its_own_agent_alone(settings: Any) -> None:
    RewardSettings.objects.create(agent="alpha", functions={"tests.test_run_feedback.raising": 1})
    for agent in ("alpha", "beta"):
        feed(agent, 2)
    found = rewards_calculate()
    assert (found.calculated, list(found.refused)) == (2, ["alpha"])
    assert "tests.test_run_feedback.raising" in found.refused["alpha"] or "no mood" in found.refused["alpha"]


def raising(sample: Any) -> float:
    """A reward function with a fault."""
    raise RuntimeError("no mood")
