"""DPO runs that end early: killed, stopped, half-written, and what a later run may take from them."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rl.training.policy import generate, load_policy
from rl.training.result import TrainingFailed, TrainingRefused, checkpoint_is_whole
from rl.training.run import failures_explained, run_context
from tests.support.dpo_runs import HARDWARE, QUICK, ListenerCallback, a_trainer, some_pairs
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
def test_a_stopped_run_answers_and_goes_on(base: str, tmp_path: Path) -> None:
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


@pytest.mark.training
def test_truncation_and_what_is_left_out_are_counted_and_said(base: str, tmp_path: Path) -> None:
    long = {**some_pairs(1)[0], "prompt": [{"role": "user", "content": "why " * 200}]}
    wordy = {**some_pairs(1)[0], "chosen": "because " * 60}
    same = {**some_pairs(1)[0], "rejected": some_pairs(1)[0]["chosen"]}
    follower = ListenerCallback()
    recipe = dataclasses.replace(QUICK, max_steps=1)
    result = a_trainer(base, tmp_path / "run", recipe, listener=follower).train(
        [*some_pairs(4), long, wordy, same]
    )
    assert result.samples["train"] == 6
    assert result.truncated == {"prompts": 1, "completions": 1}
    assert result.left_out == {"identical responses": 1}
    assert any("1 prompts (oldest tokens), 1 responses (end)" in note for note in follower.notes)


@pytest.mark.training
def test_a_diverging_run_fails_with_what_to_change(base: str, tmp_path: Path) -> None:
    recipe = dataclasses.replace(QUICK, learning_rate=1e30, max_grad_norm=1e30, epochs=5)
    with pytest.raises(TrainingFailed, match=r"diverged\. Lower learning_rate \(now 1e\+30\)"):
        a_trainer(base, tmp_path / "run", recipe).train(some_pairs(16))


def test_a_full_disk_says_what_to_do(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(TrainingFailed, match="is full: free some space and resume"),
        failures_explained(run_context(QUICK, "", output_dir=tmp_path, hardware=HARDWARE)),
    ):
        raise OSError(28, "No space left on device")


def test_rows_that_cannot_be_trained_on(base: str, tmp_path: Path) -> None:
    # no pairs are refused
    with pytest.raises(TrainingRefused, match="at least one preference pair"):
        a_trainer(base, tmp_path / "run").train([])
    # pairs that teach nothing are refused with their count
    same = [{**row, "rejected": row["chosen"]} for row in some_pairs(3)]
    with pytest.raises(TrainingRefused, match="none among 3: 3 identical responses"):
        a_trainer(base, tmp_path / "run").train(same)
    # a row without a prompt is refused with its number
    with pytest.raises(TrainingRefused, match="row 2: expected `prompt`"):
        a_trainer(base, tmp_path / "run").train([*some_pairs(2), {"chosen": "a", "rejected": "b"}])


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(TrainingRefused, match="expected a folder that can be written"):
        a_trainer("no-such-model", tmp_path / "file" / "run").train(some_pairs(1))


def test_a_folder_with_another_runs_checkpoints_is_refused(base: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    with pytest.raises(TrainingRefused, match="expected a folder without checkpoints"):
        a_trainer(base, tmp_path / "run").train(some_pairs(4))
