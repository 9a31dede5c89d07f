"""Advisory file locks between threads and processes of this machine, released when their holder dies, forks included.

POSIX alone, as the server is. The client package has locks of its own: it runs where none of this is installed.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

_descriptors: set[int] = set()


class ForkAware(Protocol):
    """An object whose locks must be made anew in the child of a fork: threads that hold them do not exist there."""

    def after_fork(self) -> None: ...


_fork_aware_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(thing: ForkAware) -> None:
    """Have `thing.after_fork()` called in every child process, for as long as it lives."""
    _fork_aware_locks.add(thing)


def _after_fork() -> None:
    # A lock belongs to the open file, which parent and child now share: a copy left open here would keep the lock
    # after the parent's death. Closing the copy leaves the parent's lock alone.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for thing in _fork_aware_locks:
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def descriptor_lock(descriptor: int, *, wait: bool) -> bool:
    """Take the exclusive lock of an open file; False where it is held elsewhere and `wait` is not set."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def descriptor_hold(descriptor: int) -> None:
    """Count a descriptor among those that a child process closes, so that its lock dies with this process."""
    _descriptors.add(descriptor)


def descriptor_close(descriptor: int) -> None:
    """Give up the lock of a kept descriptor and close it. In the child of a fork it is closed already."""
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        # closing alone would leave the lock to a program that another thread is starting, until that calls exec
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against every other thread and process; without `wait`, yield whether it was free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    descriptor_hold(descriptor)
    try:
        yield descriptor_lock(descriptor, wait=wait)
    finally:
        descriptor_close(descriptor)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of the bytes: one call of write(2) may take fewer. Raises OSError where the disk takes no more."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
