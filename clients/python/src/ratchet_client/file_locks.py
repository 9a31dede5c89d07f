"""File locks between threads and processes, on POSIX and Windows. A lock ends with its process."""

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
    """An object that makes new locks in the child of a fork: a thread that held the old ones is not there."""

    def after_fork(self) -> None: ...


_fork_aware_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(thing: ForkAware) -> None:
    """Call `thing.after_fork()` in every forked child while the object exists."""
    _fork_aware_locks.add(thing)


def _after_fork() -> None:
    # Parent and child share the open file, and with it the lock. Left open here, it would keep the lock after the
    # parent's death. Closing it here does not release the parent's lock.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for thing in _fork_aware_locks:
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def file_lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes. Yields False if it was taken and wait=False."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _descriptors.add(descriptor)
    try:
        locked = _lock(descriptor, wait)
        try:
            yield locked
        finally:
            # Closing is not enough: a program that another thread is starting holds the open file until its exec.
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
    """Write all bytes; one call of write(2) may write fewer. Raises OSError if the disk is full."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def fsync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of its files survive a power cut."""
    if sys.platform == "win32":
        return  # Windows cannot open a folder, and needs no sync
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
