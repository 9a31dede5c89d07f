"""DPO runs that cannot go on, or train on less than was given: each says what to change."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rl.training.result import TrainingFailed, TrainingRefused
from rl.training.run import failures_explained, run_context
from tests.support.dpo_runs import HARDWARE, QUICK, ListenerCallback, a_trainer, some_pairs
from tests.support.dpo_runs import base as base


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


def test_a_full_disk_fails_with_what_to_do(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(TrainingFailed, match="is full: free some space and resume"),
        failures_explained(run_context(QUICK, "", output_dir=tmp_path, hardware=HARDWARE)),
    ):
        raise OSError(28, "No space left on device")


def test_no_pairs_are_refused(base: str, tmp_path: Path) -> None:
    with pytest.raises(TrainingRefused, match="at least one preference pair"):
        a_trainer(base, tmp_path / "run").train([])


def test_pairs_that_teach_nothing_are_refused_with_their_count(base: str, tmp_path: Path) -> None:
    same = [{**row, "rejected": row["chosen"]} for row in some_pairs(3)]
    with pytest.raises(TrainingRefused, match="none among 3: 3 identical responses"):
        a_trainer(base, tmp_path / "run").train(same)


def test_a_row_without_a_prompt_is_refused_with_its_number(base: str, tmp_path: Path) -> None:
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
