"""Early stopping on the eval split, and the warm-up that makes the reference of a preference loss."""

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl.recipes import DPORecipe, KTORecipe, RecipeError, RewardModelRecipe, SFTRecipe
from rl.training.adapter_trainer import stopping_arguments
from rl.training.dpo import DPOTrainer, ranking_loss
from rl.training.kto import KTOTrainer
from rl.training.policy import REFERENCE, load_policy
from rl.training.result import TrainResult
from rl.training.reward_model import RewardModelTrainer
from rl.training.rows import FEWEST_TO_STOP, evaluation_interval, stops_early
from rl.training.scoring import kl_to_reference, score_responses
from rl.training.sft import SFTTrainer
from rl.training.trl_trainer import best_evaluation
from tests.support.dpo_runs import HARDWARE, ListenerCallback, some_pairs
from tests.support.figures import figures_of
from tests.support.tiny_models import tiny_model

QUICK: dict[str, Any] = {"batch_size": 4, "learning_rate": 1e-2, "lora_r": 4, "lora_alpha": 8}
QUICK |= {"max_length": 96, "max_completion_length": 32, "logging_steps": 1, "warmup_ratio": 0.0}
QUICK |= {"max_steps": 12, "eval_steps": 1, "patience": 2}
ROWS = some_pairs(20)
CONTRARY = some_pairs(FEWEST_TO_STOP, prefer=lambda _: False, seed=1)
"""Eval rows that say the opposite: the longer a run, the worse on them."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("base"), "llama"))


def labels(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in rows
        for side in ("chosen", "rejected")
    ]


def demonstrations(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Words of which the eval rows share nothing with the others."""
    words = "line line line" if rows is ROWS else "déjà vu 12 invoices"
    return [{"prompt": row["prompt"], "completion": words} for row in rows]


def test_the_best_evaluation_is_the_first_of_equals_and_never_a_nan() -> None:
    log = [{"loss": 1.0, "step": 2}] + [
        {"eval_loss": loss, "step": 4 * n}
        for n, loss in enumerate((0.7, 0.5, float("nan"), 0.5, 0.6), start=1)
    ]
    assert best_evaluation(log) == (8, 3)
    assert best_evaluation(log[:2]) == (4, 0)
    assert best_evaluation(log[:1]) == (0, 0)
    # a resumed run evaluates a step again: it is one evaluation
    assert best_evaluation([*log, {"eval_loss": 0.4, "step": 20}]) == (20, 0)


def test_losses_and_evaluations_are_counted() -> None:
    # the ranking loss is that of the best scale
    # three of four pairs the right way round by the same distance: the best scale makes it ln 3, and p = 3/4
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    for scale in (0.02, 1.0, 50.0):
        assert ranking_loss([scale, scale, scale, -scale]) == pytest.approx(entropy, abs=1e-4)
    assert ranking_loss([-1.0, -2.0, 0.5]) == pytest.approx(math.log(2))  # no better than a coin at any scale
    assert ranking_loss([1.0, 2.0]) < 0.01
    # a run is evaluated sixteen times at most or as its recipe says
    recipe = DPORecipe(batch_size=8, gradient_accumulation=2)
    assert [evaluation_interval(recipe, steps, 1) for steps in (1, 16, 17, 160)] == [1, 1, 2, 10]
    assert evaluation_interval(DPORecipe(eval_steps=7), 160, 1) == 7
    # 16 steps train on 256 rows: 82 eval rows are worth one look, at the end
    assert [evaluation_interval(recipe, steps, 82) for steps in (16, 96, 400)] == [16, 9, 25]


def test_an_eval_split_that_is_too_small_to_tell_ends_no_run() -> None:
    patient = DPORecipe(patience=3)
    assert stops_early(patient, FEWEST_TO_STOP)
    assert not stops_early(patient, FEWEST_TO_STOP - 1)
    assert not stops_early(DPORecipe(), 1000)
    assert stopping_arguments(patient, 100, FEWEST_TO_STOP - 1) == {}
    interval = evaluation_interval(patient, 100, 100)
    assert (
        stopping_arguments(patient, 100, 100)["save_steps"] == interval
    )  # a checkpoint beside each evaluation


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def same_weights(one: Path, two: Path) -> bool:
    first, second = adapter_of(one), adapter_of(two)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


RUNS: dict[str, tuple[Any, Any, Any]] = {
    "dpo": (DPOTrainer, DPORecipe(**QUICK), lambda rows: rows),
    "kto": (KTOTrainer, KTORecipe(**QUICK), labels),
    "sft": (SFTTrainer, SFTRecipe(**QUICK), demonstrations),
    "reward_model": (RewardModelTrainer, RewardModelRecipe(**QUICK), lambda rows: rows),
}


@pytest.mark.training
@pytest.mark.parametrize("method", RUNS)
def test_a_run_that_stalls_keeps_its_best_weights(base: str, tmp_path: Path, method: str) -> None:
    trainer, recipe, shaped = RUNS[method]
    result = trainer(recipe, base, output_dir=tmp_path, hardware=HARDWARE).train(
        shaped(ROWS), shaped(CONTRARY)
    )
    metric = "eval_ranking_loss" if method == "dpo" else "eval_loss"
    losses = dict(zip(result.history["eval_step"], result.history[metric], strict=True))
    assert result.status == "succeeded"
    assert result.best_step == min(losses, key=lambda step: losses[step])
    assert result.steps == result.best_step + recipe.patience < result.total_steps == 12
    assert figures_of(result.stopped_early) == [result.steps, 12, 2, result.best_step]
    checkpoints = tmp_path / "checkpoints"
    assert same_weights(Path(result.checkpoint), checkpoints / f"checkpoint-{result.best_step}")
    assert not same_weights(Path(result.checkpoint), checkpoints / f"checkpoint-{result.steps}")
    assert result.metrics[metric] == losses[result.best_step]


@pytest.mark.campaign
@pytest.mark.training
def test_a_killed_run_counts_its_patience_from_where_it_was(base: str, tmp_path: Path) -> None:
    recipe = DPORecipe(**QUICK)

    def run(folder: str, **more: Any) -> TrainResult:
        owner = DPOTrainer(recipe, base, output_dir=tmp_path / folder, hardware=HARDWARE, **more)
        return owner.train(ROWS, CONTRARY)

    whole = run("whole")
    with pytest.raises(ConnectionError):
        run("killed", listener=ListenerCallback(die_after=whole.steps))
    resumed = run("killed", resume=True)
    assert (resumed.steps, resumed.best_step) == (whole.steps, whole.best_step)
    assert same_weights(Path(resumed.checkpoint), Path(whole.checkpoint))


# The warm-up -----------------------------------------------------------------------------------------------------


def test_a_warm_up_needs_its_reference_computed_before() -> None:
    with pytest.raises(RecipeError, match="warm_up_steps needs precompute_reference"):
        DPORecipe(warm_up_steps=10, precompute_reference=False)


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_the_reference_was_shown_what_was_judged(base: str, tmp_path: Path, method: str) -> None:
    trainer, recipe, shaped = RUNS[method]
    recipe = dataclasses.replace(
        recipe,
        warm_up_steps=6,
        patience=0,
        eval_steps=0,
        max_steps=1,
        learning_rate=1e-5,
        warm_up_learning_rate=1e-2,
    )
    notes = ListenerCallback()
    owner = trainer(recipe, base, output_dir=tmp_path, hardware=HARDWARE, listener=notes)
    result = owner.train(shaped(ROWS))
    assert "warmed up on the 40 responses that were judged, 6 steps: they are the reference" in notes.notes
    # at its first step the policy is its reference: the rewards are nought, whatever the base says
    assert result.history["rewards/chosen"] == pytest.approx([0.0], abs=1e-4)
    asked = [(row["prompt"], row["completion"]) for row in labels(ROWS)[:8]]

    def mean_logp(adapter: str | None) -> float:
        scores = score_responses(load_policy(base, adapter, hardware=HARDWARE), asked)
        return sum(score.logp for score in scores) / len(scores)

    assert mean_logp(str(tmp_path / "warm_up" / "adapter")) > mean_logp(None) + 5
    # and its distance is measured from there: one step away from the reference, and far from the base
    policy = load_policy(base, result.checkpoint, hardware=HARDWARE)
    assert same_weights(Path(result.checkpoint) / REFERENCE, tmp_path / "warm_up" / "adapter")
    near = kl_to_reference(policy, asked)
    shutil.rmtree(Path(result.checkpoint) / REFERENCE)
    policy = load_policy(base, result.checkpoint, hardware=HARDWARE)  # a reference is loaded once
    assert 10 * near < kl_to_reference(policy, asked)


@pytest.mark.campaign
@pytest.mark.training
def test_a_resumed_run_takes_the_warm_up_that_was_finished(base: str, tmp_path: Path) -> None:
    recipe = DPORecipe(**QUICK | {"warm_up_steps": 3, "max_steps": 4, "patience": 0, "save_steps": 2})
    with pytest.raises(ConnectionError):
        DPOTrainer(
            recipe, base, output_dir=tmp_path, hardware=HARDWARE, listener=ListenerCallback(die_after=3)
        ).train(ROWS)
    adapter = tmp_path / "warm_up" / "adapter" / "adapter_model.safetensors"
    written = adapter.stat().st_mtime_ns
    result = DPOTrainer(recipe, base, output_dir=tmp_path, hardware=HARDWARE, resume=True).train(ROWS)
    assert (result.status, result.steps) == ("succeeded", 4)
    assert adapter.stat().st_mtime_ns == written
