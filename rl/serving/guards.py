"""Guards against a slow or dead backend: a bounded queue and a circuit breaker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl.serving.base import BackendFailed


class ConcurrencyLimiter:
    """Limiter with a number of places inside and a number of places to wait; a caller beyond both is refused
    at once."""

    def __init__(self, slots: int, waiting: int, name: str) -> None:
        self.name = name
        self._free = threading.Semaphore(slots)
        self._limit = slots + waiting
        self._there = 0
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, timeout_s: float) -> Iterator[None]:
        """Wait for a place and hold it. Raises BackendFailed where the queue is full, or the time is over before."""
        with self._lock:
            if self._there >= self._limit:
                raise BackendFailed(
                    f"{self.name} is busy: {self._there} requests are waiting or running", kind="busy"
                )
            self._there += 1
        try:
            if not self._free.acquire(timeout=max(timeout_s, 0)):
                raise BackendFailed(
                    f"{self.name} is busy: no free slot within {timeout_s:.3g} s", kind="busy"
                )
            try:
                yield
            finally:
                self._free.release()
        finally:
            with self._lock:
                self._there -= 1


class CircuitBreaker:
    """Opens after so many failures in a row; after a pause one request tries again, and the others wait for its word.

    The pattern of Nygard, Release It! (2007). A library was looked at: pybreaker holds one lock during every call.
    """

    def __init__(
        self,
        name: str,
        *,
        failures: int = 5,
        pause_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.failures, self.pause_s = name, failures, pause_s
        self._clock = clock
        self._failed = 0
        self._again_at = 0.0
        self._held_until = 0.0
        self._lock = threading.Lock()

    @property
    def held_s(self) -> float:
        """Seconds for which `hold` asked to wait."""
        return max(self._held_until - self._clock(), 0.0)

    def hold(self, seconds: float) -> None:
        """Keep the seconds that a server asked to be left alone for (`Retry-After`)."""
        with self._lock:
            self._held_until = max(self._held_until, self._clock() + seconds)

    @property
    def is_open(self) -> bool:
        return self._failed >= self.failures

    def enter(self) -> None:
        """Raises BackendFailed while the circuit is open."""
        with self._lock:
            if not self.is_open:
                return
            left = self._again_at - self._clock()
            if left > 0:
                raise BackendFailed(
                    f"{self.name} failed {self._failed} times in a row and is not asked for {left:.2g} "
                    "s more",
                    kind="open",
                    retry_after_s=left,
                )
            # this one tries; the next one is let in after another pause, even if this one is never heard of again
            self._again_at = self._clock() + self.pause_s

    def record_success(self) -> None:
        with self._lock:
            self._failed = 0

    def record_failure(self) -> None:
        with self._lock:
            self._failed += 1
            self._again_at = self._clock() + self.pause_s
