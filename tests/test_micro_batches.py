"""Micro-batches: the loss and the gradients of the whole batch, in as many parts as memory asks for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.training import pair_trainer
from rl.training.packed.micro_batches import MicroBatcher, micro_batches
from tests.support.dpo_runs import QUICK, a_trainer, some_pairs
from tests.support.tiny_models import tiny_model


def row(tokens: int) -> dict[str, Any]:
    return {"prompt_ids": [0] * (tokens - 2), "chosen_ids": [0], "rejected_ids": [0]}


def sizes(lengths: list[int], budget: int) -> list[int]:
    return [len(part) for part in micro_batches([row(length) for length in lengths], budget)]


def test_rows_are_cut_by_what_they_take_when_padded() -> None:
    assert sizes([10, 10, 10, 10, 10], 30) == [3, 2]
    assert sizes([4, 10, 10], 20) == [2, 1]
    assert sizes([10, 50, 10], 20) == [1, 1, 1]
    assert sizes([10, 50, 10], 0) == [3]


def test_a_batch_that_does_not_fit_is_halved_and_remembered() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    seen: list[int] = []
    said: list[str] = []

    def compute(rows: list[dict[str, Any]], share: float) -> torch.Tensor:
        seen.append(len(rows))
        loss = (weight + 1) * share
        loss.backward()
        if len(rows) > 2:
            raise torch.OutOfMemoryError("too many")
        return loss.detach()

    batcher = MicroBatcher([weight], say=said.append)
    total = batcher.run([row(10)] * 8, compute)
    assert seen == [8, 4, 2, 2, 2, 2]
    assert float(total) == pytest.approx(1.0)
    assert float(weight.grad) == pytest.approx(1.0)  # type: ignore[arg-type]  # nothing of the failed passes is left
    assert batcher.budget == 20
    assert len(said) == 2
    seen.clear()
    batcher.run([row(10)] * 4, compute)
    assert seen == [2, 2]


def test_one_row_that_does_not_fit_is_tried_with_checkpointing_once() -> None:
    on: list[bool] = []

    def compute(rows: list[dict[str, Any]], share: float) -> torch.Tensor:
        if not on:
            raise torch.OutOfMemoryError("too long")
        return torch.ones(())

    def checkpoint() -> bool:
        on.append(True)
        return len(on) == 1

    assert float(MicroBatcher([], checkpoint=checkpoint).run([row(10)], compute)) == 1.0

    def never(rows: list[dict[str, Any]], share: float) -> torch.Tensor:
        raise torch.OutOfMemoryError("too long")

    with pytest.raises(torch.OutOfMemoryError):
        MicroBatcher([], checkpoint=lambda: False).run([row(10)], never)


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
def test_a_run_that_is_out_of_memory_goes_on_with_less_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(tiny_model(tmp_path / "base"))
    recipe = dataclasses.replace(QUICK, batch_size=8, max_steps=3)
    whole = a_trainer(base, tmp_path / "whole", recipe).train(some_pairs(12))
    stock = pair_trainer.PairTrainer._compute_loss

    def tight(self: Any, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        out = stock(self, model, inputs, return_outputs)
        if len(inputs["input_ids"]) > 2 * 3:
            raise torch.OutOfMemoryError("more than three pairs")
        return out

    monkeypatch.setattr(pair_trainer.PairTrainer, "_compute_loss", tight)
    trainer = a_trainer(base, tmp_path / "tight", recipe)
    cut = trainer.train(some_pairs(12))
    assert cut.history["loss"] == pytest.approx(whole.history["loss"], abs=1e-5)
    assert any(note.startswith("out of memory at") for note in trainer.context.notes)
