"""RLHF as one method: a reward model from the feedback found, judged on the holdout, then PPO against it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl.jobs import lifecycle, progress, stages, train
from rl.models import RewardModelVersion, TrainingRun
from rl.models.runs import RunRefused
from rl.reward_models import service as reward_models
from rl.rewards.catalogue import AUTO
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.django_db, pytest.mark.training]

JUDGE = {"batch_size": 16, "learning_rate": 5e-3, "lora_r": 4, "lora_alpha": 8, "max_length": 96, "epochs": 5}
JUDGE |= {"warmup_ratio": 0.0}
PPO = {
    "batch_size": 4,
    "mini_batch_size": 4,
    "ppo_epochs": 1,
    "lora_r": 2,
    "lora_alpha": 4,
    "max_length": 96,
    "max_new_tokens": 6,
    "max_steps": 1,
    "reward": AUTO,
    "eval_prompts": 2,
    "allow_constant_reward": True,  # no answer of a random model is one of the two that were recorded
}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "llama"))


def thumbs(n: int) -> None:
    """n thumbs on single answers: people like what names a chart."""
    for index in range(n):
        good = index % 2 == 0
        row = decision_record(
            agent="planner",
            messages=f"how did revenue change over week {index}",
            response="line_chart" if good else "table",
        ).row
        rating_submit(decision=row, rater="ada", thumb="up" if good else "down")


def order(base: str, **changes: Any) -> lifecycle.TrainOrder:
    return lifecycle.TrainOrder("planner", "ppo", "cpu", base, {**PPO, **changes})


def test_thumbs_become_a_judge_a_policy_learns_from(base: str, settings: Any, ratchet_home: Path) -> None:
    settings.RATCHET_CONFIG = {"reward_model": JUDGE}
    thumbs(160)
    report = train.train(order(base))
    run = TrainingRun.objects.get(pk=report["run"])
    stage = run.stages.get()
    judge = RewardModelVersion.objects.get()
    expected = ("reward_model", "succeeded", "binary", run)
    assert (stage.method, stage.status, stage.recipe["objective"], stage.stage_of) == expected
    assert (judge.run, judge.base_model) == (stage, base)
    assert judge.ranking["what"] == "labels"
    assert judge.ranking["low"] > 0.5
    assert (ratchet_home / judge.path / "reward_model.json").is_file()
    assert report["reward"] == run.recipe["reward"] == f"model:{judge.name}"
    assert f"reward auto: {judge.name}, which ranks" in report["why"]
    # what its reward model read is what it learnt from: not the ratings kept for judging
    assert 0 < int(report["policy"].removeprefix("planner-v")) < 160
    # the second run finds it, and trains none
    assert TrainingRun.objects.get(pk=train.train(order(base))["run"]).stages.count() == 0
    assert RewardModelVersion.objects.count() == 1


def test_a_coin_is_refused_as_a_reward(base: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_models, "_scores", lambda model, rows, hardware: [[0.0]] * len(rows))
    settings.RATCHET_CONFIG = {"reward_model": {**JUDGE, "max_steps": 1}}
    thumbs(60)
    with pytest.raises(
        RunRefused, match=r"ranks held-out feedback better than chance .* of \d+ held-out thumbs"
    ):
        train.train(order(base))
    run = TrainingRun.objects.get(method="ppo")
    assert (run.status, run.stages.get().status) == ("refused", "succeeded")
    assert "rate more at /rate/?agent=planner" in run.reason


@pytest.mark.campaign
def test_a_run_killed_early_goes_on(base: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.RATCHET_CONFIG = {"reward_model": {**JUDGE, "save_steps": 10}}
    thumbs(120)
    steps: list[int] = []
    stop = progress.RunListener.should_stop
    monkeypatch.setattr(
        progress.RunListener,
        "should_stop",
        lambda self: self.run.method == "reward_model" and len(steps) > 14,
    )
    tell = progress.RunListener.on_step
    monkeypatch.setattr(
        progress.RunListener,
        "on_step",
        lambda self, step, total: (steps.append(step), tell(self, step, total))[1],
    )
    # one step of its own, by passes: max_steps would cap the stage too
    asked = order(base)
    report = train.train(dataclasses.replace(asked, knobs={**asked.knobs, "max_steps": -1, "epochs": 0.03}))
    run = TrainingRun.objects.get(pk=report["run"])
    assert (report["status"], run.status, run.stages.get().status) == ("cancelled", "cancelled", "cancelled")
    monkeypatch.setattr(progress.RunListener, "should_stop", stop)
    done = len(steps)
    report = train.train_resume(run.pk, actor="test")
    run.refresh_from_db()
    assert (report["status"], run.status, run.stages.get().status) == ("succeeded", "succeeded", "succeeded")
    assert steps[done] > steps[0], "the stage went on from its checkpoint"
    assert RewardModelVersion.objects.count() == 1


def test_a_stage_ends_with_the_run_that_is_cancelled() -> None:
    parent = TrainingRun.objects.create(agent="a", method="ppo", base_model="b", status="running")
    stage = TrainingRun.objects.create(
        agent="a", method="reward_model", base_model="b", status="running", stage_of=parent
    )
    TrainingRun.objects.filter(pk=parent.pk).update(cancel_requested=True)
    stop = progress.StopRequest()
    progress.RunListener(stage, stop, None).on_step(5, 5)
    assert stop.asked


def test_a_stage_whose_worker_died_is_left_to_its_run() -> None:
    parent = TrainingRun.objects.create(agent="a", method="ppo", base_model="b", recipe={"reward": AUTO})
    stage = TrainingRun.objects.create(
        agent="a",
        method="reward_model",
        base_model="b",
        status="running",
        stage_of=parent,
        worker="gone:1:1",
        asked_by=f"run {parent.pk}",
    )
    assert stages.waits_for_reward_model(parent)
    assert lifecycle.runs_reclaim() == []
    stage.refresh_from_db()
    assert stage.status == "failed"
    assert "gone:1:1" in stage.reason
    assert f"run {parent.pk} " in stage.reason
