"""`train_ppo`, `train_grpo`: from recorded decisions and a reward to a policy, or to a reason why not."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from rl.management.simulation import simulate
from rl.models import Policy, RunMetric, TrainingRun
from rl.rewards.base import RewardSample
from tests.support.said import printed as run

pytestmark = pytest.mark.django_db


def short(sample: RewardSample) -> float:
    """A user's own reward: likes short answers, and only knows widgets."""
    assert sample.facts["state"]["widgets"]
    return max(-2.0, 2.0 - 0.25 * sample.facts["tokens"] - 0.01 * len(sample.response))


SHORT = "tests.test_train_ppo.short"


QUICK = {
    "ppo": "--batch-size 4 --mini-batch-size 4 --ppo-epochs 1",
    "grpo": "--batch-size 8 --num-generations 4",
}


def options(method: str, base: str) -> list[str]:
    more = "--max-new-tokens 6 --max-length 256 --lora-r 2 --max-steps 2"
    words = ["--agent", "widgets", "--config", "cpu", "--model", base, *QUICK[method].split(), *more.split()]
    return [*words, "--set", "allow_constant_reward=true"]  # no answer of a random model is valid


@pytest.fixture
def quick(base: str) -> list[str]:
    return options("ppo", base)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "price"), [("ppo", "init_kl_coef"), ("grpo", "beta")])
def test_a_run_enters_its_metrics_and_its_policy(base: str, method: str, price: str) -> None:
    simulate("widgets", scenarios=40, rated=True)
    more = ("--reward", SHORT, "--kl-coef", "0.3", "--temperature", "0.9", "--json")
    found = json.loads(run(f"train_{method}", *options(method, base), *more))
    assert set(found) >= set(
        ("run method status policy checkpoint samples left_out steps seconds metrics").split()
    )
    assert (found["method"], found["status"], found["steps"]) == (method, "succeeded", 2)
    assert found["samples"]["train"] + found["samples"]["eval"] + found["samples"]["holdout"] == 40
    entered = TrainingRun.objects.get(pk=found["run"])
    knobs = (price, "temperature", "reward", "max_new_tokens")
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


@pytest.mark.campaign
def test_a_dry_run_of_grpo_counts_whole_groups(base: str) -> None:
    simulate("widgets", scenarios=40)
    asked = ("--reward", SHORT, *"--epochs 3 --max-steps -1 --dry-run --json".split())
    plan = json.loads(run("train_grpo", *options("grpo", base), *asked))
    # two prompts a step, and a batch is always filled
    assert plan["estimated_steps"] == 3 * -(-plan["samples"]["train"] // 2)
    assert plan["estimated_minutes"] > 0
    assert 0.5 < plan["estimated_memory_gb"] < 2
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
