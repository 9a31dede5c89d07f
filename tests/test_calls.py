"""Calls that work as they are written: pipelines, datasets, checkpoints, batch sizes, limits of an agent."""

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from feedback.services import outcome_record
from rl.agents import AGENTS
from rl.agents.prioritizer import CHARACTERS_PER_TOKEN
from rl.datasets import DatasetRefused, get_training_stats, prepare_training_dataset
from rl.jobs.lifecycle import TrainOrder, run_epochs
from rl.jobs.run_recipe import recipe_for
from rl.models import RewardRecord, TrainingRun
from rl.online.pipeline import TrainingPipeline
from rl.recipes import RECIPES, RecipeError, recipe_named
from tests.support.api_client import ApiClient
from tests.support.dataset_feedback import decide, feed
from tests.support.dpo_runs import HARDWARE
from tests.support.stub_ollama import OllamaServer
from tests.support.tiny_models import tiny_adapter

pytestmark = pytest.mark.django_db


def test_a_dataset_of_the_only_agent_needs_no_name() -> None:
    feed()
    assert prepare_training_dataset(source="db").counts == {"train": 12, "eval": 2, "holdout": 3}
    decide("somebody else's", "yes", agent="other")
    with pytest.raises(DatasetRefused, match="found helper, other"):
        prepare_training_dataset(source="db")


@pytest.mark.campaign
@pytest.mark.training
def test_a_pipeline_runs_as_it_is_written_and_keeps_epochs_that_can_be_exported(
    base: str, settings: Any, admin_client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed()
    knobs = {"epochs": 2, "batch_size": 5, "warm_up_steps": 0, "lora_r": 2, "lora_alpha": 4}
    settings.RATCHET_CONFIG = {"dpo": {**knobs, "checkpoints": "epoch", "logging_steps": 1}}
    outcome = TrainingPipeline("helper", base, "dpo").run_full_pipeline()
    assert (outcome.policy, outcome.stage, outcome.passed) == ("helper-v24", "candidate", False)
    run = TrainingRun.objects.get()
    assert (run.base_model, run.steps_done) == (base, 6)  # 12 pairs in fives are 3 steps an epoch
    first, last = run_epochs(run)
    assert [first.name, last.name] == ["epoch-1", "epoch-2"]
    weights = [folder / "adapter_model.safetensors" for folder in (first, last)]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    assert f"export_model --checkpoint {first}" in admin_client.get(f"/runs/{run.pk}/").content.decode()
    capsys.readouterr()
    call_command("export_model", "--checkpoint", str(first), "--output", str(tmp_path / "whole"), "--json")
    assert json.loads(capsys.readouterr().out)["format"] == "merged"
    assert (tmp_path / "whole" / "model.safetensors").is_file()


@pytest.mark.parametrize("method", ["ppo", "grpo", "reward_model"])
def test_epochs_are_kept_of_what_passes_over_rows_and_answers(method: str) -> None:
    with pytest.raises(RecipeError, match="checkpoints epoch"):
        recipe_named(method, "cpu", {"checkpoints": "epoch"})


@pytest.mark.training
def test_to_ollama(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rl.export.ollama import export_to_ollama

    checkpoint = tiny_adapter(Path(base), tmp_path / "epoch-2")
    with OllamaServer() as server:
        monkeypatch.setenv("OLLAMA_HOST", server.url)
        made = export_to_ollama(str(checkpoint))
    assert (made.name, made.uploaded) == ("epoch-2", 1)
    ((file, _),) = server.created[0]["files"].items()
    assert file.endswith(".gguf")


def test_any_batch_size_is_one() -> None:
    for method in ("dpo", "sft", "reward_model", "ppo", "grpo"):
        for preset in RECIPES[method]:
            for size in range(2 if method == "grpo" else 1, 18):
                assert recipe_named(method, preset).with_knobs(batch_size=str(size)).batch_size == size
    assert recipe_named("ppo", "cpu", {"batch_size": 12}).mini_batch_size == 12
    assert recipe_named("ppo", "cpu", {"batch_size": 48}).mini_batch_size == 24
    assert recipe_named("grpo", "cpu", {"batch_size": 13}).num_generations == 13
    assert recipe_named("grpo", "cpu", {"batch_size": 12}).num_generations == 6
    with pytest.raises(RecipeError, match="must be a multiple of mini_batch_size"):
        recipe_named("ppo", "cpu", {"batch_size": 12, "mini_batch_size": 5})


def test_the_prioritizer_brings_its_own_limits() -> None:
    _, recipe = recipe_for(TrainOrder("prioritizer", "ppo", "cpu"), HARDWARE)
    assert (recipe.max_length, recipe.max_new_tokens) == (1280, 256)
    _, dpo = recipe_for(TrainOrder("prioritizer", "dpo", "cpu"), HARDWARE)
    assert dpo.max_length == 1280
    _, named = recipe_for(TrainOrder("prioritizer", "ppo", "cpu", knobs={"max_new_tokens": 64}), HARDWARE)
    assert (named.max_length, named.max_new_tokens) == (1280, 64)
    _, other = recipe_for(TrainOrder("filer", "ppo", "cpu"), HARDWARE)
    assert (other.max_length, other.max_new_tokens) == (1024, 48)


def test_a_long_list_of_tasks_is_shortened_and_no_task_is_lost() -> None:
    agent = AGENTS["prioritizer"]
    tasks = [f"task {number:02d}" for number in range(30)]
    long = {"goal": "all of it", "tasks": tasks, "descriptions": {tasks[0]: "soon"}}
    long["descriptions"] |= dict.fromkeys(tasks[1:], "because " * 40)
    messages = agent.render(long)
    assert 2900 < sum(len(message["content"]) for message in messages) <= CHARACTERS_PER_TOKEN * 1024
    lines = messages[1]["content"].splitlines()[2:]
    assert [line.partition(":")[0] for line in lines] == tasks
    assert lines[0] == "task 00: soon"
    assert {len(line) for line in lines[1:]} == {len(lines[1])}
    assert lines[1].endswith("…")
    with pytest.raises(ValueError, match="found 200 tasks"):
        agent.render({"goal": "all", "tasks": [f"task {number}" for number in range(200)]})
    with pytest.raises(ValueError, match="shorten the context"):
        agent.render({"goal": "x" * 4000, "tasks": tasks})


def test_statistics_tell_of_rewards() -> None:
    feed()
    assert get_training_stats("helper")["rewards"]["n"] == 0
    outcome_record(decision=decide("question of its own", "yes"), name="resolved", value=1.0)
    for value in (0.25, 0.75):
        row = decide(f"worth {value}", "yes")
        RewardRecord.objects.create(
            decision=row.pk,
            agent="helper",
            value=value,
            raw=4 * value - 2,
            components={},
            rows_said=1,
            basis="0",
        )
    found = get_training_stats("helper")["rewards"]
    assert (found["n"], found["mean"], found["std"]) == (2, 0.5, pytest.approx(0.3535534))
    assert (sum(found["histogram"]), found["histogram"][2], found["histogram"][7]) == (2, 1, 1)


def test_a_policy_says_over_rest_of_which_kind_it_is() -> None:
    from tests.support.experiments import policy_of

    policy_of("filer-v1")
    (shown,) = ApiClient("read").get("/api/policies/filer").json()
    assert (shown["id"], shown["kind"]) == ("filer-v1", "adapter")
