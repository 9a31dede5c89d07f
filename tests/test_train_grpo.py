"""`train_grpo`: from recorded decisions and a reward, to a policy in the registry."""

import json
from pathlib import Path

import pytest

from rl.management.simulation import simulate
from rl.models import Policy, RunMetric, TrainingRun
from tests.test_commands import run
from tests.test_train_ppo import SHORT


@pytest.fixture
def quick(base: str) -> list[str]:
    return [
        *"--agent widgets --config cpu --model".split(),
        base,
        "--batch-size",
        "8",
        "--num-generations",
        "4",
        "--max-new-tokens",
        "6",
        "--max-length",
        "256",
        "--lora-r",
        "2",
        "--max-steps",
        "2",
        "--set",
        "allow_constant_reward=true",  # no answer of a random model is valid
    ]


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
    knobs = ("beta", "temperature", "reward", "max_new_tokens")
    assert [entered.recipe[knob] for knob in knobs] == [0.3, 0.9, SHORT, 6]
    rows = dict(RunMetric.objects.filter(run=entered).values_list("step", "values"))
    assert sorted(rows) == [0, 1, 2]
    assert set(rows[0]) >= {"eval_reward", "eval_kl"}
    assert set(rows[2]) >= {f"reward/{SHORT}", "kl", "loss", "eval_reward"}
    assert Policy.objects.get(name=found["policy"]).run == entered
    assert (Path(found["checkpoint"]) / "adapter_model.safetensors").is_file()
    assert Path(found["files"]["plot"]).is_file()


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
            *"--epochs 3 --max-steps -1 --dry-run --json".split(),
        )
    )
    train = plan["samples"]["train"]
    assert plan["estimated_steps"] == 3 * -(-train // 2)  # two prompts a step, and a batch is always filled
    assert plan["estimated_minutes"] > 0
    assert 0.5 < plan["estimated_memory_gb"] < 2
    assert not TrainingRun.objects.exists()
