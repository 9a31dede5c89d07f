"""`train_grpo`: from recorded decisions and a reward, or from rated groups, to a policy in the registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from feedback.services import decision_record, rating_submit
from rl.management.simulation import simulate
from rl.models import Policy, RunMetric, Snapshot, TrainingRun
from tests.test_commands import run
from tests.test_train_ppo import SHORT, base

__all__ = ["base"]


@pytest.fixture
def quick(base: str) -> list[str]:
    return [
        "--agent", "widgets", "--config", "cpu", "--model", base, "--batch-size", "8", "--num-generations", "4",
        "--max-new-tokens", "6", "--max-length", "256", "--lora-r", "2", "--max-steps", "2",
        "--set", "allow_constant_reward=true",  # no answer of a random model is valid
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.django_db
def test_a_run_enters_its_metrics_and_its_policy(quick: list[str]) -> None:
    simulate("widgets", scenarios=40, rated=True)
    found = json.loads(
        run("train_grpo", *quick, "--reward", SHORT, "--kl-coef", "0.3", "--temperature", "0.9", "--json")
    )
    assert (found["method"], found["status"], found["steps"]) == ("grpo", "succeeded", 2)
    assert sum(found["samples"].values()) == 40
    entered = TrainingRun.objects.get(pk=found["run"])
    knobs = ("beta", "temperature", "reward", "max_new_tokens", "mode")
    assert [entered.recipe[knob] for knob in knobs] == [0.3, 0.9, SHORT, 6, "online"]
    rows = dict(RunMetric.objects.filter(run=entered).values_list("step", "values"))
    assert sorted(rows) == [0, 1, 2]
    assert set(rows[0]) >= {"eval_reward", "eval_kl"}
    assert set(rows[2]) >= {f"reward/{SHORT}", "kl", "loss", "eval_reward"}
    assert Policy.objects.get(name=found["policy"]).run == entered
    assert (Path(found["checkpoint"]) / "adapter_model.safetensors").is_file()
    assert Path(found["files"]["plot"]).is_file()


@pytest.mark.campaign
@pytest.mark.django_db
def test_logged_groups_are_a_dataset_of_their_own(quick: list[str]) -> None:
    for number in range(24):
        for response, thumb in (("a chart", "up"), ("a table", "down")):
            row = decision_record(agent="widgets", messages=f"question {number}", response=response).row
            rating_submit(decision=row, rater="ada", thumb=thumb)
    found = json.loads(run("train_grpo", *quick, "--logged", "--json"))
    assert found["status"] == "succeeded"
    assert sum(found["samples"].values()) == 24
    assert Snapshot.objects.get().kind == Snapshot.Kind.GROUPS
    assert TrainingRun.objects.get().recipe["mode"] == "logged"


@pytest.mark.campaign
@pytest.mark.django_db
def test_a_dry_run_foresees_steps_minutes_and_memory(quick: list[str]) -> None:
    simulate("widgets", scenarios=40)
    plan = json.loads(
        run(
            "train_grpo",
            *quick,
            "--reward",
            SHORT,
            "--epochs",
            "3",
            "--max-steps",
            "-1",
            "--dry-run",
            "--json",
        )
    )
    train = plan["samples"]["train"]
    assert plan["estimated_steps"] == 3 * -(-train // 2)  # two prompts a step, and a batch is always filled
    assert plan["estimated_minutes"] > 0
    assert 0.5 < plan["estimated_memory_gb"] < 2
    assert not TrainingRun.objects.exists()
