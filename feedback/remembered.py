"""What a process remembers for a few seconds, so that not every request asks the database for it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from django.conf import settings
from django.db import InterfaceError, OperationalError

logger = logging.getLogger("feedback")

V = TypeVar("V")

STALE_S = 600.0
"""How long what a process remembers stands in for a database that cannot be reached: apps are served meanwhile."""

_all: list[Remembered[object]] = []


class Remembered(Generic[V]):
    """Values by key, each kept FEEDBACK_REMEMBER_S seconds at most, in this process alone."""

    def __init__(self, size: int = 10_000) -> None:
        self.size = size
        self._kept: dict[Hashable, tuple[float, V]] = {}
        _all.append(self)  # type: ignore[arg-type]

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made anew when it is too old. Two threads may both make it; the later one stays."""
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < settings.FEEDBACK_REMEMBER_S:
            return kept[1]
        try:
            value = make()
        except (OperationalError, InterfaceError):
            if kept is None or now - kept[0] > STALE_S:
                raise
            logger.warning("the database cannot be reached; going by what was read %.0f s ago", now - kept[0])
            return kept[1]
        if len(self._kept) >= self.size:
            # a flood of keys nobody sent before must not fill the memory
            self._kept.clear()
        self._kept[key] = (now, value)
        return value

    def clear(self) -> None:
        self._kept.clear()


class Believed(Remembered[V]):
    """Values that are costly to make, believed for as long as that is worth it: what took a second to make is kept for
    BELIEF seconds, so that making it anew never takes more than one part in BELIEF of a process's time."""

    BELIEF = 200.0
    LONGEST_S = 600.0

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made anew when it is too old for what it costs."""
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is not None and now < kept[0]:
            return kept[1]
        value = make()
        done = time.monotonic()
        self._kept[key] = (done + min(self.BELIEF * (done - now), self.LONGEST_S), value)
        return value


def forget_all() -> None:
    """Ask the database again for everything: after a change in this process, and between tests."""
    for remembered in _all:
        remembered.clear()
