"""Steps cut into micro-batches by a budget of tokens, which is halved where memory does not suffice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class UncollatedRows:
    """The rows of one batch, not yet tensors: how many go at once is known only when they are computed."""

    rows: list[dict[str, Any]]


def row_tokens(row: dict[str, Any]) -> int:
    """Tokens a pair feeds when its prompt is computed once."""
    return len(row["prompt_ids"]) + len(row["chosen_ids"]) + len(row["rejected_ids"])


def micro_batches(rows: Sequence[dict[str, Any]], budget: int) -> Iterator[list[dict[str, Any]]]:
    """Cut rows, in order, so that padded to its longest row none is wider than `budget` tokens; 0 does not cut.

    A row longer than the budget goes alone.
    """
    batch: list[dict[str, Any]] = []
    longest = 0
    for row in rows:
        longest = max(longest, row_tokens(row))
        if batch and budget > 0 and longest * (len(batch) + 1) > budget:
            yield batch
            batch, longest = [], row_tokens(row)
        batch.append(row)
    if batch:
        yield batch


def split_evenly(rows: Sequence[dict[str, Any]], parts: int) -> list[list[dict[str, Any]]]:
    """Rows cut, in order, into `parts` of nearly the same number; none is empty where there are rows enough."""
    cuts = [len(rows) * part // parts for part in range(parts + 1)]
    return [list(rows[start:end]) for start, end in itertools.pairwise(cuts) if end > start]


@dataclass
class MicroBatcher:
    """Runs one step over its micro-batches and remembers what fits."""

    parameters: list[torch.nn.Parameter]
    """Parameters whose gradients a failed backward pass may have half written."""
    budget: int = 0
    """Tokens at once; 0 until something did not fit."""
    checkpoint: Callable[[], bool] = lambda: False
    """Turns gradient checkpointing on; false where it is on already."""
    say: Callable[[str], None] = lambda _: None
    max_over_ranks: Callable[[int], int] | None = None
    """The greatest of several processes' counts; None: this process trains alone. Each micro-batch is a collective
    operation of all processes, so they must make as many; a process that runs out of memory cannot halve its own."""

    def run(
        self, rows: list[dict[str, Any]], compute: Callable[[list[dict[str, Any]], float], torch.Tensor]
    ) -> torch.Tensor:
        """Sum of `compute(micro-batch, its share of the rows)`, each of which also runs the backward pass.

        Out of memory: the gradients of that micro-batch are taken back, the budget becomes half of what was tried,
        and what is left goes on. One row that does not fit is tried once more with gradient checkpointing; then the
        error is the caller's.
        """
        waiting = list(micro_batches(rows, self.budget))
        if self.max_over_ranks is not None and self.budget > 0:
            waiting = split_evenly(rows, self.max_over_ranks(len(waiting)))
        total: torch.Tensor | None = None
        while waiting:
            part = waiting.pop(0)
            before = [None if p.grad is None else p.grad.detach().clone() for p in self.parameters]
            try:
                loss = compute(part, len(part) / len(rows))
            except torch.OutOfMemoryError:
                for parameter, gradient in zip(self.parameters, before, strict=True):
                    parameter.grad = gradient
                if self.max_over_ranks is not None or (len(part) == 1 and not self.checkpoint()):
                    raise
                self._shrink(part)
                waiting = [*micro_batches([row for rest in (part, *waiting) for row in rest], self.budget)]
                continue
            total = loss if total is None else total + loss
        assert total is not None
        return total

    def _shrink(self, part: list[dict[str, Any]]) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        tried = len(part) * max(map(row_tokens, part))
        if len(part) == 1:
            self.say(
                f"one pair of {tried:,} tokens did not fit into memory: gradient checkpointing is on from now"
            )
            return
        self.budget = tried // 2
        self.say(f"out of memory at {tried:,} tokens: continuing with {self.budget:,} at once")
