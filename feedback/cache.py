"""Per-process caches that save a database query per request."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError, close_old_connections

from backend.logs import OutageLog

logger = logging.getLogger("feedback")
outage = OutageLog(logger)

V = TypeVar("V")

STALE_S = 600.0
"""Oldest cached value, in seconds, that is served while the database is unreachable."""

_all: list[TTLCache[object]] = []


class TTLCache(Generic[V]):
    """Values by key, each kept at most FEEDBACK_REMEMBER_S seconds in this process.

    A value read in the second half of its life is renewed by a background thread, so that requests of a busy process
    rarely wait for the database.
    """

    def __init__(self, size: int = 10_000) -> None:
        self.size = size
        self._kept: dict[Hashable, tuple[float, V]] = {}
        self._cleared = 0
        self._making: dict[Hashable, Future[V]] = {}
        """Values that a thread makes now; other threads that ask wait for that one."""
        self._renewing: set[Hashable] = set()
        _all.append(self)  # type: ignore[arg-type]

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key; calls `make` if it is missing or too old, once for threads that ask at the same time.

        While the database is unreachable, returns a value of at most STALE_S seconds' age.
        """
        time_s = time.monotonic()
        entry = self._kept.get(key)
        if entry is not None and time_s - entry[0] < settings.FEEDBACK_REMEMBER_S:
            if settings.FEEDBACK_RENEW_AHEAD and time_s - entry[0] > settings.FEEDBACK_REMEMBER_S / 2:
                self._refresh_in_background(key, make)
            return entry[1]
        try:
            return self._made_once(key, time_s, make)
        except (OperationalError, InterfaceError) as error:
            if entry is None or time_s - entry[0] > STALE_S:
                raise
            outage.report(
                f"the database cannot be reached; using data read {time_s - entry[0]:.0f} s ago", error
            )
            return entry[1]

    def _made_once(self, key: Hashable, time_s: float, make: Callable[[], V]) -> V:
        """A new value. A hundred requests at once would each open a connection to the database for it."""
        making, mine = self._making, Future[V]()
        running = making.setdefault(key, mine)
        if running is not mine:
            return running.result()
        cleared = self._cleared
        try:
            value = make()
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            if self._cleared == cleared:  # else something changed meanwhile, and this may be from before
                self._keep(key, time_s, value)
            mine.set_result(value)
            return value
        finally:
            making.pop(key, None)

    def _keep(self, key: Hashable, at: float, value: V) -> None:
        if len(self._kept) >= self.size:
            # Unknown keys must not fill the memory.
            self._kept.clear()
        self._kept[key] = (at, value)

    def _refresh_in_background(self, key: Hashable, make: Callable[[], V]) -> None:
        if key in self._renewing:
            return
        self._renewing.add(key)
        cleared = self._cleared

        def renew() -> None:
            try:
                now = time.monotonic()
                value = make()
                if self._cleared == cleared:  # Else the value may be older than the change that cleared it.
                    self._keep(key, now, value)
            finally:
                self._renewing.discard(key)

        _renewer.put(renew)

    def clear(self) -> None:
        self._cleared += 1
        self._kept.clear()
        self._making = {}  # Readers from now on must not wait for a value read before.
        self._renewing.clear()  # The renewing thread does not survive a fork.


class _Renewer:
    """Background thread that renews cached values, with one connection to the database."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, renew: Callable[[], None]) -> None:
        self._waiting.put(renew)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="ratchet-renewer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            renew = self._waiting.get()
            try:
                close_old_connections()
                renew()
            except Exception as error:
                # The next reader of an expired value gets the error.
                logger.debug("cached data could not be refreshed: %s", error)


_renewer = _Renewer()


class CostAwareCache(TTLCache[V]):
    """A value that took t seconds to make stays valid for BELIEF * t seconds, at most LONGEST_S.

    Making values takes at most 1 / BELIEF of a process's time.
    """

    BELIEF = 200.0
    LONGEST_S = 600.0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and now < kept[0]:
            return kept[1]
        value = make()
        done = time.monotonic()
        self._keep(key, done + min(self.BELIEF * (done - now), self.LONGEST_S), value)
        return value


class StampedCache(TTLCache[V]):
    """Values that stay valid while a cheap stamp is unchanged, at most LONGEST_S.

    After a change a value that took t seconds to make stays for another BELIEF * t seconds, at most LONGEST_S, so that
    a page that is asked again and again is not always making it.
    """

    BELIEF = 20.0

    def __init__(self, size: int = 10_000) -> None:
        super().__init__(size)
        self._stamps: dict[Hashable, tuple[Hashable, float]] = {}

    def get_unless(self, key: Hashable, stamp: Hashable, make: Callable[[], V], *, fresh: bool = False) -> V:
        """The value of a key. `fresh`: a changed stamp makes it anew, whatever that costs."""
        start_s = time.monotonic()
        entry, stamp_entry = self._kept.get(key), self._stamps.get(key)
        if entry is not None and stamp_entry is not None:
            is_current = stamp_entry[0] == stamp and start_s - entry[0] < CostAwareCache.LONGEST_S
            if is_current or (start_s < stamp_entry[1] and not fresh):
                return entry[1]
        value = make()
        end_s = time.monotonic()
        self._keep(key, end_s, value)
        cost_s = self.BELIEF * (end_s - start_s)
        self._stamps[key] = (stamp, end_s + min(cost_s, CostAwareCache.LONGEST_S))
        return value


def forget_all() -> None:
    """Clear every cache of this process, after a change it made and between tests."""
    for remembered in _all:
        remembered.clear()


# a fork leaves behind threads that were making values
os.register_at_fork(after_in_child=forget_all)
