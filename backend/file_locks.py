"""Advisory file locks between threads and processes of one machine, released when their holder dies, also after a fork.

POSIX only. The client package has its own, because it runs without the server's packages.
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
    """An object with locks, which threads of the parent process may hold after a fork."""

    def after_fork(self) -> None: ...


_fork_aware_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(thing: ForkAware) -> None:
    """Call `thing.after_fork()` in every child process while it lives."""
    _fork_aware_locks.add(thing)


def _after_fork() -> None:
    # Parent and child share the open file: a copy left open here would keep the lock after the parent's death.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for thing in _fork_aware_locks:
        thing.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def descriptor_lock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file exclusively; False if it is locked elsewhere and `wait` is False."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def descriptor_hold(descriptor: int) -> None:
    """Close this descriptor in child processes, so that its lock dies with this process."""
    _descriptors.add(descriptor)


def descriptor_close(descriptor: int) -> None:
    """Unlock and close a held descriptor; in the child of a fork it is closed already."""
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        # Another thread may have forked: its copy would keep the lock until exec.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes; yields False if taken and `wait` is False."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    descriptor_hold(descriptor)
    try:
        yield descriptor_lock(descriptor, wait=wait)
    finally:
        descriptor_close(descriptor)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all bytes, although write(2) may take fewer at a time. Raises OSError."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
