"""Order of a run's rows: a function of seed and epoch, so that a resumed run repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class LengthGroupedSampler(torch.utils.data.Sampler[int]):
    """Each epoch's order, a function of seed and epoch only: shuffled, then pairs of like length put side by side.

    Sorting happens within windows of `WINDOW` batches and the batches are shuffled again, so that padding is saved
    while batches still differ from epoch to epoch. Nothing is remembered between epochs: a resumed run repeats it.
    """

    WINDOW = 8

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        epoch: Any,
        groups: Sequence[int] | None = None,
        *,
        shuffled: bool = True,
    ) -> None:
        """`epoch`: a function that says which epoch is about to start. Rows of one of the `groups` (pairs of one
        prompt) stay together, so that what they share is computed once; without them every row stands alone. Not
        `shuffled`, the rows come as they are in every epoch (easy to hard, say), a group where its first row stands.
        """
        self.shuffled = shuffled
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, epoch
        members: dict[int, list[int]] = {}
        for row in range(len(lengths)):
            members.setdefault(groups[row] if groups is not None else row, []).append(row)
        self.groups = list(members.values())

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        if not self.shuffled:
            yield from (row for group in self.groups for row in group)
            return
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + int(self.epoch()))
        place: dict[int, int] = {}
        shuffled = torch.randperm(len(self.groups), generator=generator).tolist()
        for number, group in enumerate(shuffled):
            place.update(dict.fromkeys(self.groups[group], number))
        order = [row for group in shuffled for row in self.groups[group]]
        longest = [max(self.lengths[row] for row in self.groups[group]) for group in shuffled]
        window = self.WINDOW * self.batch_size
        for start in range(0, len(order), window):
            order[start : start + window] = sorted(
                order[start : start + window], key=lambda i: (-longest[place[i]], place[i])
            )
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        whole = [batch for batch in batches if len(batch) == self.batch_size]
        short = [batch for batch in batches if len(batch) < self.batch_size]
        for i in torch.randperm(len(whole), generator=generator).tolist():
            yield from whole[i]
        for batch in short:  # last, or every later batch would straddle two groups
            yield from batch
