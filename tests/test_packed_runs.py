"""Runs over the packed forward: metrics read late, micro-batches and compiled layers change no loss."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from random_models import Reads
from rl.training import dpo
from rl.training.dpo import PairTrainer
from rl.training.result import TrainingFailed
from tests.support.dpo_runs import QUICK, a_trainer, some_pairs
from tests.support.tiny_models import tiny_model


def history(base: str, folder: Path, monkeypatch: pytest.MonkeyPatch, later: bool, **knobs: Any) -> Any:
    monkeypatch.setattr(PairTrainer, "defer_metrics", later)
    recipe = dataclasses.replace(QUICK, gradient_accumulation=2, logging_steps=2, max_steps=6, **knobs)
    return a_trainer(base, folder, recipe).train(some_pairs(16), some_pairs(4, seed=1)).history


@pytest.mark.training
def test_what_is_logged_is_what_trl_logs(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = history(base, tmp_path / "at once", monkeypatch, False, eval_steps=3)
    later = history(base, tmp_path / "later", monkeypatch, True, eval_steps=3)
    timed = {"tokens_per_second", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    assert later.keys() == at_once.keys()
    assert (
        set("rewards/margins entropy mean_token_accuracy logits/chosen log_ratio num_tokens".split())
        < later.keys()
    )
    for name in later.keys() - timed:
        assert later[name] == at_once[name], name  # not nearly: the same


@pytest.mark.training
def test_a_step_waits_only_to_log(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stock, reads = trl.DPOTrainer.training_step, []  # from the batch to its gradients

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Reads() as seen:
            loss = stock(self, *args, **kwargs)
        reads.append(seen.found)
        return loss

    monkeypatch.setattr(trl.DPOTrainer, "training_step", counted)
    history(base, tmp_path / "later", monkeypatch, True)
    later, reads = reads, []
    history(base, tmp_path / "at once", monkeypatch, False)
    assert later == [[]] * 12
    assert all(len(found) >= 15 for found in reads), reads


@pytest.mark.training
def test_divergence_is_found_late(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainingFailed, match=r"at step [12] of 6: training diverged"):
        history(base, tmp_path / "run", monkeypatch, True, learning_rate=1e30, max_grad_norm=1e30)


@pytest.mark.slow
def test_the_loss_does_not_depend_on_how_a_batch_is_cut(tmp_path: Path) -> None:
    base = str(tiny_model(tmp_path / "base"))
    recipe = dataclasses.replace(QUICK, batch_size=8, max_steps=4)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(some_pairs(12))
    cut = a_trainer(base, tmp_path / "cut", dataclasses.replace(recipe, micro_tokens=120)).train(
        some_pairs(12)
    )
    assert cut.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-5)


@pytest.mark.slow
def test_memory_that_ran_out_means_less_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = str(tiny_model(tmp_path / "base"))
    recipe = dataclasses.replace(QUICK, batch_size=8, max_steps=3)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(some_pairs(12))
    stock = dpo.PairTrainer._compute_loss

    def tight(self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        out = stock(self, model, inputs, return_outputs)
        if len(inputs["input_ids"]) > 2 * 3:
            raise torch.OutOfMemoryError("more than three pairs")
        return out

    monkeypatch.setattr(dpo.PairTrainer, "_compute_loss", tight)
    trainer = a_trainer(base, tmp_path / "tight", recipe)
    cut = trainer.train(some_pairs(12))
    assert cut.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-5)
    assert any(note.startswith("out of memory at") for note in trainer.context.notes)
