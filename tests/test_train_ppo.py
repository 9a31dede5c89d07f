"""`train_ppo`: from recorded decisions and a reward to a policy in the registry, or to a reason why not."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from rl.management.simulation import simulate
from rl.models import Policy, RunMetric, TrainingRun
from rl.rewards.base import RewardSample
from tests.support.tiny_models import tiny_model
from tests.test_commands import run

pytestmark = pytest.mark.django_db


def short(sample: RewardSample) -> float:
    """A user's own reward: likes short answers, and only knows widgets."""
    assert sample.facts["state"]["widgets"]
    return max(-2.0, 2.0 - 0.25 * sample.facts["tokens"] - 0.01 * len(sample.response))


SHORT = "tests.test_train_ppo.short"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base") / "llama"))


@pytest.fixture
def quick(base: str) -> list[str]:
    return [
        *"--agent widgets --config cpu --model".split(),
        base,
        "--batch-size",
        "4",
        "--mini-batch-size",
        "4",
        "--ppo-epochs",
        "1",
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
def test_a_run_enters_its_metrics_and_its_policy(quick: list[str]) -> None:
    simulate("widgets", scenarios=40, rated=True)
    found = json.loads(
        run("train_ppo", *quick, "--reward", SHORT, "--kl-coef", "0.3", "--temperature", "0.9", "--json")
    )
    assert set(found) >= set(
        ("run method status policy checkpoint samples left_out steps seconds metrics").split()
    )
    assert (found["method"], found["status"], found["steps"]) == ("ppo", "succeeded", 2)
    assert found["samples"]["train"] + found["samples"]["eval"] + found["samples"]["holdout"] == 40
    entered = TrainingRun.objects.get(pk=found["run"])
    knobs = ("init_kl_coef", "temperature", "reward", "max_new_tokens")
    assert [entered.recipe[knob] for knob in knobs] == [0.3, 0.9, SHORT, 6]
    rows = dict(RunMetric.objects.filter(run=entered).values_list("step", "values"))
    assert sorted(rows) == [0, 1, 2]
    assert set(rows[0]) >= {"eval_reward", "eval_kl"}
    assert set(rows[2]) >= {f"reward/{SHORT}", "kl", "loss", "eval_reward"}
    assert Policy.objects.get(name=found["policy"]).run == entered
    assert (Path(found["checkpoint"]) / "adapter_model.safetensors").is_file()
    assert Path(found["files"]["plot"]).is_file()


@pytest.mark.slow
def test_a_dry_run_foresees_steps_minutes_and_memory(quick: list[str]) -> None:
    simulate("widgets", scenarios=40)
    insisted = ("--set", "allow_constant_reward=true")  # nobody knows the right widget
    plan = json.loads(
        run("train_ppo", *quick, *insisted, "--epochs", "3", "--max-steps", "-1", "--dry-run", "--json")
    )
    assert plan["estimated_steps"] == -(-3 * plan["samples"]["train"] // 4)
    assert plan["estimated_minutes"] > 0
    assert 0.5 < plan["estimated_memory_gb"] < 2
    assert plan["recipe"]["reward"] == "agent"
    assert not TrainingRun.objects.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--reward", "nonsense"], "no reward 'nonsense'; known are agent"),
        (["--reward", "tests.test_train_ppo.missing"], "cannot be imported"),
        (["--reward", "model:999"], "run 999 trained no reward model"),
        (["--kl-coef", "-1"], "init_kl_coef must not be negative"),
        (["--mini-batch-size", "3"], "batch_size .4. must be a multiple of mini_batch_size .3."),
    ],
)
def test_a_bad_order_is_refused_first(quick: list[str], arguments: list[str], complaint: str) -> None:
    simulate("widgets", scenarios=4)
    with pytest.raises(CommandError, match=complaint):
        run("train_ppo", *quick, "--min-samples", "1", *arguments)
    assert not TrainingRun.objects.exists()


@pytest.mark.slow
def test_prompts_may_come_from_a_file(quick: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": f"question {i}", "completion": "an answer"} for i in range(30)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = json.loads(
        run("train_ppo", *quick, "--data", str(file), "--reward", "tests.test_train_ppo.anything", "--json")
    )
    assert found["status"] == "succeeded"
    assert sum(found["samples"].values()) == 30


def anything(sample: RewardSample) -> float:
    return float(len(sample.response) % 3) - 1
