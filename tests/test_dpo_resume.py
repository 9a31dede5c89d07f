"""DPO runs that end early: killed, stopped, half-written, and what a later run may take from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl.training.policy import generate, load_policy
from rl.training.result import TrainingRefused, checkpoint_is_whole
from tests.support.dpo_runs import HARDWARE, QUICK, ListenerCallback, a_trainer, some_pairs
from tests.support.dpo_runs import base as base
from tests.support.tiny_models import tiny_model


@pytest.mark.training
def test_a_killed_run_resumes_to_the_same_steps_and_the_same_weights(base: str, tmp_path: Path) -> None:
    rows, recipe = some_pairs(20), dataclasses.replace(QUICK, epochs=2, save_steps=3)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(rows)
    with pytest.raises(ConnectionError):
        a_trainer(base, tmp_path / "killed", recipe, listener=ListenerCallback(die_after=8)).train(rows)
    follower = ListenerCallback()
    resumed = a_trainer(base, tmp_path / "killed", recipe, listener=follower, resume=True).train(rows)
    assert follower.steps == [7, 8, 9, 10]
    assert (resumed.steps, resumed.status) == (whole.steps, "succeeded")
    assert resumed.history["step"] == whole.history["step"] == list(range(1, 11))
    assert resumed.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-5)
    assert resumed.history["learning_rate"] == whole.history["learning_rate"]
    one = load_file(Path(whole.checkpoint) / "adapter_model.safetensors")
    two = load_file(Path(resumed.checkpoint) / "adapter_model.safetensors")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-5, rtol=1e-4)


@pytest.mark.training
def test_a_half_written_checkpoint_is_skipped(base: str, tmp_path: Path) -> None:
    rows, recipe = some_pairs(20), dataclasses.replace(QUICK, save_steps=2)
    with pytest.raises(ConnectionError):
        a_trainer(base, tmp_path / "run", recipe, listener=ListenerCallback(die_after=5)).train(rows)
    last = tmp_path / "run" / "checkpoints" / "checkpoint-4"
    assert checkpoint_is_whole(last)
    (last / "optimizer.pt").write_bytes((last / "optimizer.pt").read_bytes()[:100])
    follower = ListenerCallback()
    resumed = a_trainer(base, tmp_path / "run", recipe, listener=follower, resume=True).train(rows)
    assert follower.steps == list(range(3, 16))
    assert resumed.steps == 15
    assert "checkpoint-4 was only half-written or is damaged, and is not used" in follower.notes


@pytest.mark.training
def test_a_run_stopped_on_request_leaves_a_checkpoint_that_answers_and_can_go_on(
    base: str, tmp_path: Path
) -> None:
    rows = some_pairs(20)
    stopped = a_trainer(base, tmp_path / "run", listener=ListenerCallback(stop_after=2)).train(rows)
    assert (stopped.status, stopped.steps, stopped.total_steps) == ("cancelled", 2, 15)
    assert Path(stopped.checkpoint).name == "checkpoint-2"
    policy = load_policy(base, stopped.checkpoint, hardware=HARDWARE)
    assert generate(policy, [rows[0]["prompt"]], max_new_tokens=2)
    finished = a_trainer(base, tmp_path / "run", resume=True).train(rows)
    assert (finished.status, finished.steps) == ("succeeded", 15)


@pytest.mark.training
def test_a_run_is_not_resumed_with_other_knobs_or_other_pairs(base: str, tmp_path: Path) -> None:
    a_trainer(base, tmp_path / "run", listener=ListenerCallback(stop_after=1)).train(some_pairs(8))
    other = dataclasses.replace(QUICK, beta=0.2)
    with pytest.raises(TrainingRefused, match=r"started with other beta \(0.1, now 0.2\)"):
        a_trainer(base, tmp_path / "run", other, resume=True).train(some_pairs(8))
    with pytest.raises(TrainingRefused, match="started with other rows"):
        a_trainer(base, tmp_path / "run", resume=True).train(some_pairs(9))


@pytest.mark.slow
def test_a_retrain_on_grown_data_computes_the_reference_of_what_is_new(base: str, tmp_path: Path) -> None:
    pairs = some_pairs(10)
    cache = tmp_path / "cache"
    first = a_trainer(base, tmp_path / "first", cache_dir=cache)
    first.train(pairs[:8])
    assert any("16 computed, 0 from the cache" in note for note in first.context.details), (
        first.context.details
    )
    second = a_trainer(base, tmp_path / "second", cache_dir=cache)
    second.train(pairs)
    assert any("4 computed, 16 from the cache" in note for note in second.context.details), (
        second.context.details
    )


@pytest.mark.slow
def test_a_run_with_what_is_known_is_the_run_without(base: str, tmp_path: Path) -> None:
    pairs = some_pairs(8)
    cache = tmp_path / "cache"
    a_trainer(base, tmp_path / "fills", cache_dir=cache).train(pairs)
    known = a_trainer(base, tmp_path / "known", cache_dir=cache).train(pairs)
    alone = a_trainer(base, tmp_path / "alone").train(pairs)
    assert known.history["loss"] == pytest.approx(alone.history["loss"], abs=1e-6)


@pytest.mark.slow
def test_another_base_model_knows_nothing_of_it(base: str, tmp_path: Path) -> None:
    pairs, cache = some_pairs(8), tmp_path / "cache"
    a_trainer(base, tmp_path / "fills", cache_dir=cache).train(pairs)
    other = a_trainer(str(tiny_model(tmp_path / "other", seed=1)), tmp_path / "out", cache_dir=cache)
    other.train(pairs)
    assert any("16 computed" in note for note in other.context.details), other.context.details
