"""Collective operations over the processes of one launch; for a single process each is the identity."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

T = TypeVar("T")


class Processes:
    """The processes of a launch (`accelerate launch`), or this one alone.

    PPO's steps use the sums: each process samples and scores its own share of a step's prompts, losses are divided by
    the token count of all and gradients summed, so that the step is the one a single process would make of the whole
    batch. Trainers over TRL have theirs summed by accelerate.
    """

    def __init__(self, *, cpu: bool) -> None:
        self.state = PartialState(cpu=cpu)
        self.count: int = self.state.num_processes
        self.index: int = self.state.process_index

    @property
    def main(self) -> bool:
        return self.index == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes of a tensor of the same shape in each."""
        if self.count > 1:
            x = x.clone()
            torch.distributed.all_reduce(x)
        return x

    def gradients_sum(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum the gradients over the processes, in one message."""
        if self.count == 1:
            return
        graded = [p for p in parameters if p.grad is not None]
        flat = self.sum(torch.cat([p.grad.reshape(-1) for p in graded if p.grad is not None]))
        for p, summed in zip(graded, flat.split([p.numel() for p in graded]), strict=True):
            assert p.grad is not None
            p.grad.copy_(summed.view_as(p.grad))

    def agree(self, said: T) -> T:
        """The main process's value, on all processes."""
        values = [said]
        if self.count > 1:
            broadcast_object_list(values)
        return values[0]

    def maximum(self, count: int) -> int:
        """The greatest of the processes' counts."""
        if self.count == 1:
            return count
        greatest = torch.tensor(count, device=self.state.device)
        torch.distributed.all_reduce(greatest, op=torch.distributed.ReduceOp.MAX)
        return int(greatest)

    def wait(self) -> None:
        self.state.wait_for_everyone()
