"""REST of rl: an agent's policies, what a training would come to, and one from the request to the policy."""

import math
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone
from django_q.models import OrmQ
from redis.exceptions import ConnectionError as RedisConnectionError

from feedback.services import comparison_submit, decision_record, rating_submit
from rl import tasks
from rl.datasets import DatasetRefused
from rl.datasets.stats import score_summaries
from rl.jobs import lifecycle
from rl.jobs.lifecycle import TrainOrder, run_claim, run_dispatch, run_enqueue
from rl.jobs.train import train_queued
from rl.models import Policy, RunMetric, TrainingRun
from tests.support.api_client import ApiClient, error_of
from tests.support.server import ROOT, Server

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator() -> ApiClient:
    return ApiClient("read", "operate")


def rate(n: int, *, pairs: bool = True, agent: str = "support-bot") -> None:
    """n ratings, by scores; of two responses to one prompt each, or of as many prompts."""
    for index in range(n):
        good = index % 2 == 0
        prompt = f"question {index // 2 if pairs else index}"
        row = decision_record(
            agent=agent, messages=prompt, response=f"{'good' if good else 'bad'} {index}"
        ).row
        rating_submit(decision=row, rater="ada", score=0.9 if good else 0.2)


def policy(name: str, count: int, **more: Any) -> Policy:
    base = {"agent": "support-bot", "base_model": "bundled", "base_model_hash": "x", "adapter_sha256": "y"}
    path = f"policies/{name}"
    return Policy.objects.create(name=name, adapter_path=path, feedback_count=count, **base, **more)


TRAIN = "/api/policies/train_policy/support-bot"


def test_a_dry_run_says_what_training_would_come_to(operator: ApiClient) -> None:
    rate(40)
    response = operator.post(TRAIN, {"dryRun": True})
    assert response.status_code == 200
    plan = response.json()
    assert (plan["status"], plan["feedbackCount"]) == ("dry_run", 40)
    assert plan["scoreMean"] == pytest.approx(0.55)
    assert plan["scoreStd"] == pytest.approx(statistics.stdev([0.9, 0.2] * 20))
    knobs = plan["modelConfig"]
    batches = math.ceil(plan["pairs"] / knobs["batch_size"] / knobs["gradient_accumulation"])
    # few rows are passed over twelve times at most
    assert plan["estimatedSteps"] == min(math.ceil(knobs["min_steps"] / batches), 12) * batches > 0
    assert 0 < plan["pairs"] <= 20
    assert plan["estimatedTimeMinutes"] == pytest.approx(plan["estimatedSteps"] * 0.5 / 60, abs=1e-3)
    # what the command's dry run says of it: few rows, and a gate that is far
    assert "the policy may memorise them" in plan["doubt"]
    assert (plan["evidence"]["needed"], plan["evidence"]["kind"]) == (30, "pairs")
    assert not TrainingRun.objects.exists()


def test_identical_trainings_that_are_asked_for_before_one_begins_are_one_run(operator: ApiClient) -> None:
    rate(40)
    same = [operator.post(TRAIN, {"maxSteps": 2}) for _ in range(3)]
    assert [response.status_code for response in same] == [202] * 3
    assert (
        len({response["Location"] for response in same})
        == TrainingRun.objects.count()
        == OrmQ.objects.count()
        == 1
    )
    operator.post(TRAIN, {"maxSteps": 3})
    TrainingRun.objects.update(status="running")
    operator.post(TRAIN, {"maxSteps": 3})
    assert TrainingRun.objects.count() == 3


def test_knobs_of_the_request_stand_in_the_plan_and_time_follows_an_earlier_run(operator: ApiClient) -> None:
    rate(40)
    plan = operator.post(TRAIN, {"dryRun": True, "maxSteps": 7, "learningRate": 0.002}).json()
    assert plan["estimatedSteps"] == 7
    assert (plan["modelConfig"]["max_steps"], plan["modelConfig"]["learning_rate"]) == (7, 0.002)
    over = {"status": "succeeded", "steps_done": 10, "result": {"seconds": 120.0}}
    over |= {"finished_at": timezone.now()}
    TrainingRun.objects.create(agent="another", method="dpo", base_model="bundled", config="default", **over)
    plan = operator.post(TRAIN, {"dryRun": True, "maxSteps": 5}).json()
    assert plan["estimatedTimeMinutes"] == pytest.approx(1.0)
    assert plan["modelConfig"]["preset"] == "default"


@pytest.mark.slow
def test_fewer_than_ten_samples_are_refused_with_their_count(operator: ApiClient) -> None:
    rate(9)
    for dry_run in (True, False):
        response = operator.post(TRAIN, {"dryRun": dry_run})
        assert (response.status_code, error_of(response)["fields"]) == (400, {"feedbackCount": "9 of 10"})
    assert not TrainingRun.objects.exists()


@pytest.mark.slow
def test_sixteen_single_scores_are_planned_by_the_method_that_hears_them(operator: ApiClient) -> None:
    rate(16, pairs=False)
    plan = operator.post(TRAIN, {"dryRun": True}).json()
    assert (plan["feedbackCount"], plan["method"], plan["refused"], plan["pairs"]) == (16, "kto", "", 0)
    assert plan["why"].startswith("auto took kto: ")
    assert plan["samples"] > 5
    assert plan["estimatedSteps"] > 0
    assert plan["modelConfig"]["method"] == "kto"
    # the bundled model's 3.9 million numbers of four bytes, and what a run keeps beside them
    assert 1.5 < plan["estimatedMemoryGb"] < 8
    assert "weights" in plan["estimatedMemoryBy"]
    response = operator.post(TRAIN, {})
    assert (response.status_code, response.json()["method"]) == (202, "kto")


def test_an_unfeedable_method_is_planned_and_not_trained(operator: ApiClient) -> None:
    rate(12, pairs=False)
    plan = operator.post(TRAIN, {"dryRun": True, "method": "dpo"}).json()
    assert (plan["feedbackCount"], plan["estimatedSteps"], plan["method"]) == (12, 0, "dpo")
    assert "0 pairs" in plan["refused"]
    response = operator.post(TRAIN, {"method": "dpo"})
    assert response.status_code == 400
    assert "0 pairs" in error_of(response)["message"]
    assert not TrainingRun.objects.exists()
    assert not OrmQ.objects.exists()


@pytest.mark.slow
def test_rlhf_is_planned_as_its_two_stages(operator: ApiClient) -> None:
    rate(40)
    plan = operator.post(TRAIN, {"dryRun": True, "method": "rlhf"}).json()
    assert [stage["method"] for stage in plan["stages"]] == ["reward_model", "ppo"]
    assert plan["estimatedSteps"] == sum(stage["estimatedSteps"] for stage in plan["stages"])
    assert (plan["method"], plan["modelConfig"]["reward"], plan["rewardModel"]) == ("ppo", "auto", None)
    run = operator.post(TRAIN, {"method": "rlhf"}).json()
    assert (run["method"], run["reward"], run["followUp"]) == ("ppo", "auto", "wanted")


def test_a_bad_order_is_refused_by_field_and_an_unknown_run_is_not_found(operator: ApiClient) -> None:
    rate(12)
    bad: dict[str, list[Any]] = {"dryRun": ["yes", 1], "maxSteps": [0, 1.5, "5", True, 10**400]}
    bad |= {"learningRate": [0, -1, 2], "learning_rate": [0.1], "method": [3, "banana", ""]}
    for field, values in bad.items():
        for value in values:
            response = operator.post(TRAIN, {field: value})
            assert response.status_code == 400, (field, value)
            assert field in error_of(response)["fields"]
    assert "dpo" in error_of(operator.post(TRAIN, {"method": "banana"}))["fields"]["method"]
    for pk in ("77", str(2**63), "9" * 40):
        response = operator.get(f"/api/runs/{pk}/")
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_an_order_is_a_queued_run_and_a_task(operator: ApiClient) -> None:
    rate(40)
    response = operator.post(TRAIN, {"maxSteps": 3})
    assert response.status_code == 202
    run = TrainingRun.objects.get()
    assert response["Location"] == f"/api/runs/{run.pk}/"
    assert (response.json()["id"], response.json()["status"]) == (run.pk, "queued")
    assert (run.agent, run.method, run.recipe) == ("support-bot", "dpo", {"max_steps": 3})
    task = OrmQ.objects.get().task
    assert (task["func"], task["args"]) == ("rl.tasks.train", (run.pk,))
    shown = operator.get(response["Location"]).json()
    assert (shown["status"], shown["history"]) == ("queued", {})


def test_while_redis_is_away_a_run_waits_for_it(operator: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    rate(40)

    def refuse(*_: Any, **__: Any) -> None:
        raise RedisConnectionError("Error 111 connecting to localhost:6379. Connection refused.")

    with monkeypatch.context() as away:
        away.setattr(lifecycle, "async_task", refuse)
        assert operator.post(TRAIN, {}).status_code == 202
        run = TrainingRun.objects.get()
        assert (run.status, run.dispatched_at) == (TrainingRun.Status.QUEUED, None)
        away.setattr("rl.jobs.estimates.run_enqueue", refuse)  # as of what else hands a task over
        answer = operator.post(TRAIN, {"maxSteps": 3})
    assert (answer.status_code, answer["Retry-After"]) == (503, "2")
    assert answer.json()["error"]["message"].startswith("the queue cannot be reached")
    assert lifecycle.runs_redispatch() == [run]
    assert OrmQ.objects.count() == 1


def test_a_run_shows_its_history_and_then_its_policy(operator: ApiClient) -> None:
    rate(12)
    run = TrainingRun.objects.create(
        agent="support-bot", method="dpo", base_model="bundled", status="running"
    )
    RunMetric.objects.create(run=run, step=5, values={"loss": 0.6, "note": "no number"})
    RunMetric.objects.create(run=run, step=10, values={"loss": 0.4})
    shown = operator.get(f"/api/runs/{run.pk}/").json()
    assert (shown["status"], shown["history"]) == ("running", {"loss": [[5, 0.6], [10, 0.4]]})
    assert "policyId" not in shown
    TrainingRun.objects.update(status="succeeded", steps_done=10, finished_at=timezone.now())
    policy("support-bot-v12", 12, run=run)
    shown = operator.get(f"/api/runs/{run.pk}/").json()
    facts = {"status": "trained", "policyId": "support-bot-v12", "version": "v12", "rewardModelPath": None}
    facts |= {"modelPath": "policies/support-bot-v12"}
    assert {name: shown[name] for name in facts} == facts
    assert (shown["feedbackCount"], shown["trainingSteps"]) == (12, 10)
    assert shown["scoreMean"] == pytest.approx(0.55)
    assert (shown["rewardMean"], shown["rewardStd"]) == (None, None)  # not judged yet
    Policy.objects.update(metrics={"average_reward": {"value": 0.7, "n": 3}, "reward_std": 0.25})
    shown = operator.get(f"/api/runs/{run.pk}/").json()
    assert (shown["rewardMean"], shown["rewardStd"]) == (0.7, 0.25)
    # half for every answer is no measurement: nobody judged any of these texts
    unknown = {"average_reward": {"value": 0.5, "n": 3}, "reward_std": 0.0, "rewards_known": 0}
    Policy.objects.update(metrics=unknown)
    shown = operator.get(f"/api/runs/{run.pk}/").json()
    assert (shown["rewardMean"], shown["rewardStd"]) == (None, None)


def test_policies_are_listed_with_what_raters_had_said_by_then(operator: ApiClient) -> None:
    assert operator.get("/api/policies/nobody").json() == []
    assert operator.get("/api/policies/Not%20A%20Slug").status_code == 400
    rate(2)
    first = policy("support-bot-v2", 2)
    rate(4, agent="other")
    row = decision_record(agent="support-bot", messages="q", response="r").row
    rating_submit(decision=row, rater="ada", stars=5)
    second = policy(
        "support-bot-v3", 3, metrics={"average_reward": {"value": 0.4, "n": 4}, "reward_std": 0.1}
    )
    listed = operator.get("/api/policies/support-bot").json()
    facts = {"id", "agentId", "version", "kind", "createdAt", "metrics"}
    assert [set(entry) for entry in listed] == [facts] * 2
    assert [(entry["id"], entry["version"]) for entry in listed] == [(second.name, "v3"), (first.name, "v2")]
    assert [entry["metrics"]["feedbackCount"] for entry in listed] == [3, 2]
    assert listed[1]["metrics"]["scoreMean"] == pytest.approx(0.55)
    assert listed[0]["metrics"]["scoreMean"] == pytest.approx((0.9 + 0.2 + 1.0) / 3)
    assert listed[0]["metrics"]["scoreStd"] == pytest.approx(statistics.stdev([0.9, 0.2, 1.0]))
    rewards = [(entry["metrics"]["rewardMean"], entry["metrics"]["rewardStd"]) for entry in listed]
    assert rewards == [(0.4, 0.1), (None, None)]


def test_the_finest_word_of_a_rating_counts() -> None:
    for said in ({"thumb": "up"}, {"thumb": "down", "stars": 4}, {"stars": 1, "score": 0.5}, {"notes": "hm"}):
        row = decision_record(agent="a", messages="q", response="r").row
        rating_submit(decision=row, rater="ada", **said)  # type: ignore[arg-type]
    found = score_summaries("a", [timezone.now()])[0]
    assert (found.n, found.mean) == (3, pytest.approx((1 + 0.75 + 0.5) / 3))
    assert score_summaries("nobody", [timezone.now()]) == [(0, None, None)]


class Child:
    """Stands in for the command: what it does to the run, and how it ends."""

    def __init__(self, code: int, said: str = "", **changes: Any) -> None:
        self.code, self.said, self.changes = code, said, changes
        self.commands: list[list[str]] = []

    def __call__(self, arguments: list[str], log: Path) -> int:
        self.commands.append(arguments)
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(self.said)
        TrainingRun.objects.update(**self.changes)
        return self.code


def queued() -> TrainingRun:
    return run_enqueue(TrainOrder("support-bot", knobs={"max_steps": 2}))


def test_the_task_follows_its_run_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run, child = queued(), Child(0, status="succeeded", finished_at=timezone.now())
    monkeypatch.setattr(tasks, "command_run", child)
    assert tasks.train(run.pk) == "succeeded"
    own = ["train_dpo", "--queued", str(run.pk), "--json"]
    assert child.commands == [own]
    TrainingRun.objects.update(status="queued", follow_up="wanted")  # as the learner asks for it
    tasks.train(run.pk)
    assert child.commands == [own, own, ["run_pipeline", "--run", str(run.pk), "--json"]]


def test_a_refusal_of_the_child_stands_as_it_was_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = queued()
    child = Child(1, "x", status="refused", reason="2 pairs found", finished_at=timezone.now())
    monkeypatch.setattr(tasks, "command_run", child)
    assert tasks.train(run.pk) == "refused"
    run.refresh_from_db()
    assert run.reason == "2 pairs found"


@pytest.mark.parametrize("left", ["queued", "running"])
def test_a_failed_child_ends_a_killed_one_goes_on(monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    killed = queued()
    run_dispatch(killed)
    monkeypatch.setattr(tasks, "command_run", Child(-9, "", status=left, worker="elsewhere:1:1"))
    assert tasks.train(killed.pk) == "queued"
    assert OrmQ.objects.count() == 2
    monkeypatch.setattr(tasks, "command_run", Child(1, "warming up\nno such option\n", status=left))
    assert tasks.train(killed.pk) == "failed"
    killed.refresh_from_db()
    assert killed.reason.endswith("1: no such option")
    assert killed.finished_at is not None


def test_a_task_delivered_twice_leaves_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = queued()
    run_claim(run.pk)  # by this process, which lives
    monkeypatch.setattr(tasks, "command_run", Child(1, "run 1 is running"))
    TrainingRun.objects.update(status="queued")
    monkeypatch.setattr(tasks, "command_run", Child(1, "run 1 is running", status="running"))
    assert tasks.train(run.pk) == "running"


@pytest.mark.slow
def test_a_dataset_that_is_too_small_when_the_worker_comes_refuses_the_run() -> None:
    left, right = (decision_record(agent="support-bot", messages="q", response=text).row for text in "ab")
    comparison_submit(left=left, right=right, preference="left", rater="ada")
    run = queued()
    with pytest.raises(DatasetRefused):
        train_queued(run.pk, actor="test")
    run.refresh_from_db()
    assert (run.status, run.finished_at is not None) == ("refused", True)
    assert "pairs found" in run.reason


@pytest.mark.campaign
@pytest.mark.training
def test_the_quick_start_of_the_docs_ends_with_an_answer(tmp_path: Path) -> None:
    """gunicorn takes 16 scores and the order, a worker trains and judges, the policy answers by its name."""
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    (script,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    server = Server(f"sqlite:///{tmp_path / 'db.sqlite3'}", tmp_path, workers=1)
    # the way is what is tested: as few steps as show it
    (tmp_path / "config.yaml").write_text("kto: {max_steps: 10, warm_up_steps: 0}\n")
    server.environment |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "RATCHET_CONFIG": str(tmp_path / "config.yaml"),
    }
    server.migrate()
    key = server.key("ingest", "rate", "read", "operate")
    with server, server.training_worker():
        said = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "KEY": key, "URL": server.address},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert said.returncode == 0, (said.stderr, server.log())
    plan, trained, versions, answer = said.stdout.strip().split("\n", 3)
    assert plan.startswith("auto took kto: ")
    assert trained.startswith("trained support-bot-v")
    name = trained.split()[1]
    assert f"'id': '{name}'" in versions
    assert "'scoreMean': 0.55" in versions
    assert answer
    assert (tmp_path / "policies" / "support-bot" / name / "adapter_model.safetensors").exists()
