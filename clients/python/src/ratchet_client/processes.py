"""Locks between processes, and objects that make themselves anew in the child of a fork."""

from __future__ import annotations

import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

RETRY_S = 0.2
"""Seconds that one attempt to get a lock waits. Ctrl-C is heard between two attempts."""


class ForkAware(Protocol):
    """An object that makes new locks in the child of a fork: a thread that held the old ones is not there."""

    def after_fork(self) -> None: ...


_fork_aware: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def renew_after_fork(thing: ForkAware) -> None:
    """Call `thing.after_fork()` in every forked child while the object exists."""
    _fork_aware.add(thing)


def _after_fork() -> None:
    for thing in list(_fork_aware):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def exclusive(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against all other threads and processes. Yields False if it is taken and wait=False.

    The lock is SQLite's own, on an empty file. It ends with its process, and a forked child does not inherit it.
    """
    database = sqlite3.connect(
        path, timeout=RETRY_S if wait else 0.0, isolation_level=None, check_same_thread=False
    )
    with closing(database) as lock:
        held = _locked(lock)
        while wait and not held:
            held = _locked(lock)
        yield held


def _locked(lock: sqlite3.Connection) -> bool:
    try:
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True
