"""Micro-batches: the loss and the gradients of the whole batch, in as many parts as memory asks for."""

from typing import Any

import pytest
import torch

from packed_forward.packing import MicroBatcher, micro_batches


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
