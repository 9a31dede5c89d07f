"""Metrics of the gateway for Prometheus: counted by every web process, summed when they are read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

from django.conf import settings
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

logger = logging.getLogger("rl.serving")

FILE_BYTES = 2 * 1024**2
"""Size of a process's file of counts: some 15,000 label values. More are not counted."""


class CountFile(MmapedDict):
    """prometheus_client's file of counts, on a disk that may be full or read-only: then counts stay in memory.

    Its blocks are reserved first. Writing to a hole of a memory-mapped file on a full disk kills the process (SIGBUS).
    """

    def __init__(self, filename: str) -> None:
        self._memory: dict[str, tuple[float, float]] | None = None
        path = Path(filename)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, FILE_BYTES)
            super().__init__(filename)
        except OSError as error:
            self._memory = {}
            logger.warning(
                "counts for /metrics stay in memory until this process ends: %s cannot be written (%s). Free the "
                "disk, make the folder writable, or name another in PROMETHEUS_MULTIPROC_DIR",
                path,
                error.strerror or error,
            )

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and timestamp, both 0 of a new key."""
        if self._memory is not None:
            return self._memory.get(key, (0.0, 0.0))
        if key not in self._positions and self._is_full(key):
            return 0.0, 0.0
        found: tuple[float, float] = super().read_value(key)
        return found

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if self._memory is not None:
            self._memory[key] = (value, timestamp)
        elif key in self._positions or not self._is_full(key):
            super().write_value(key, value, timestamp)

    def _is_full(self, key: str) -> bool:
        return bool(self._used + len(key.encode()) + 32 > self._capacity)

    def close(self) -> None:
        if self._memory is None:
            super().close()


# before the first counter is made: it opens its process's file
values.MmapedDict = CountFile  # type: ignore[misc, assignment]

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter(
    "ratchet_gateway_requests", "Requests answered, by agent and HTTP status", ["agent", "status"]
)
SECONDS = Histogram(
    "ratchet_gateway_seconds", "Seconds until the answer was complete", ["agent"], buckets=BUCKETS
)
TOKENS = Counter("ratchet_gateway_tokens", "Prompt and completion tokens", ["agent", "direction"])
FALLBACKS = Counter("ratchet_gateway_fallbacks", "Failed attempts, by backend and kind", ["backend", "kind"])
DECISIONS_RECORDED = Counter("ratchet_decisions_recorded", "Decisions recorded, by destination", ["how"])


def exposition(gauges: dict[str, tuple[str, float]]) -> bytes:
    """Every metric of all processes as Prometheus text. gauges: name -> (help, value), read now."""
    registry = CollectorRegistry()
    registry.register(_AllProcesses())
    registry.register(_GaugeCollector(gauges))
    return generate_latest(registry)


class _AllProcesses:
    """The sum over the files of every process."""

    def collect(self) -> Iterable[Metric]:
        merged: Iterable[Metric] = MultiProcessCollector.merge(count_files(folder()))
        return merged


class _GaugeCollector:
    def __init__(self, gauges: dict[str, tuple[str, float]]) -> None:
        self._gauges = gauges

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(name, text, value) for name, (text, value) in self._gauges.items()]


def folder() -> Path:
    """Folder of the counts of every process; leftovers of an earlier start are cleared by `serve`."""
    return Path(settings.PROMETHEUS_MULTIPROC_DIR)


def count_files(folder: Path) -> list[str]:
    """The files of every process; empty ones, left by a full disk, are passed over."""
    return [str(path) for path in sorted(folder.glob("*.db")) if path.stat().st_size]
