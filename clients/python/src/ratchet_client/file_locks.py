"""Advisory file locks between threads and processes, on POSIX and Windows, released when their holder dies."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against every other thread and process; without `wait`, yield whether it was free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _descriptors.add(descriptor)
    try:
        locked = _lock(descriptor, wait)
        try:
            yield locked
        finally:
            # closing alone would leave the lock to a program that another thread is starting, until that calls exec
            if locked and descriptor in _descriptors:
                _unlock(descriptor)
    finally:
        if descriptor in _descriptors:
            _descriptors.discard(descriptor)
            os.close(descriptor)


def _lock(descriptor: int, wait: bool) -> bool:
    if sys.platform == "win32":
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not wait:
                    return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    if sys.platform == "win32":
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all of the bytes: one call of write(2) may take fewer. Raises OSError where the disk takes no more."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync_folder(folder: Path) -> None:
    """Have the names of a folder's files outlive a power cut."""
    if sys.platform == "win32":
        return  # a folder cannot be opened there, and need not be
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
