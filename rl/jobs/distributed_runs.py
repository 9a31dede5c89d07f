"""Distributed runs (`accelerate launch`): rank 0 does what database and user see, the others compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from rl.models.runs import RunRefused

T = TypeVar("T")


class ProcessGroup(Protocol):
    """Interface of `rl.training.run`."""

    @property
    def main(self) -> bool: ...

    def agree(self, said: T) -> T: ...


class SingleProcess:
    """The only process there is."""

    main = True

    def agree(self, said: T) -> T:
        return said


class FollowerEnded(Exception):
    """Not an error: this process did its share of a run, and another of the launch speaks for it."""


class Launch:
    """Run that the processes of one launch train. The first says it once; the others wait for its word."""

    def __init__(self, processes: ProcessGroup) -> None:
        self.processes = processes
        self.first = processes.main
        self._said = False

    def lead(self, run_id: int, *, resume: bool, more: bool = False) -> None:
        """The first process begins this run, and the others with it. more: another run of this launch follows it."""
        self._said = not more
        self.processes.agree((run_id, resume, more))

    def give_up(self) -> None:
        """The first process will begin no run: without a word the others would wait for ever."""
        if not self._said:
            self._said = True
            self.processes.agree(None)

    def follow(self) -> tuple[int, bool, bool]:
        """The run another process leads, whether it is resumed, and whether another one follows it. Raises RunRefused
        where it began none."""
        command: tuple[int, bool, bool] | None = self.processes.agree(None)
        if command is None:
            raise RunRefused("the first process of this launch started no run; see its message above")
        return command


@contextmanager
def launch_join(processes: ProcessGroup) -> Iterator[Launch]:
    """This process's part in its launch; alone, it is the first."""
    launch = Launch(processes)
    try:
        yield launch
    except BaseException:
        if launch.first:
            launch.give_up()
        raise
