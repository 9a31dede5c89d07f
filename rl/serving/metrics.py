"""Metrics of the gateway for Prometheus: counted by every web process, summed when they are read."""

from __future__ import annotations

import logging
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

from django.conf import settings
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

logger = logging.getLogger("rl.serving")

HEADER_BYTES = 8
"""At the start of a file: how many bytes of it are used, as a 4-byte integer, and padding."""
RETRY_S = 5.0
"""Between two tries of a file that could not be opened or written."""


class CountFile:
    """A dict of doubles in memory, copied to a file; a file that cannot be written is done without, and retried.

    Takes the place of prometheus_client's MmapedDict. Not thread-safe: the values there hold one lock around it.
    """

    def __init__(self, filename: str) -> None:
        self._path = Path(filename)
        self._descriptor: int | None = None
        self._behind = True
        """True if the file lacks something that is in memory."""
        self._retry_at = 0.0
        self._data = bytearray(HEADER_BYTES)
        self._used = HEADER_BYTES
        self._positions: dict[str, int] = {}
        self._read()
        self._write_all()

    def _read(self) -> None:
        """The counts of a process that had this number before, which go on; what cannot be read begins anew."""
        try:
            data = self._path.read_bytes()
            used = used_bytes(data)
            entries = MmapedDict.read_all_values_from_file(str(self._path)) if used > HEADER_BYTES else ()
            positions = {key: at for key, _, _, at in entries}
        except (OSError, ValueError, struct.error, RuntimeError, UnicodeDecodeError):
            return
        self._data, self._used, self._positions = bytearray(data[:used]), used, positions

    def _init_value(self, key: str) -> None:
        encoded = key.encode("utf-8")
        padded = encoded + b" " * (8 - (len(encoded) + 4) % 8)
        del self._data[self._used :]
        self._data += struct.pack(f"i{len(padded)}sdd", len(encoded), padded, 0.0, 0.0)
        self._used = len(self._data)
        self._positions[key] = self._used - 16
        self._behind = True
        self._write_all()

    def read_value(self, key: str) -> tuple[float, float]:
        """Value and timestamp, both 0 of a key that is new."""
        if key not in self._positions:
            self._init_value(key)
        value, timestamp = struct.unpack_from("dd", self._data, self._positions[key])
        return value, timestamp

    def write_value(self, key: str, value: float, timestamp: float) -> None:
        if key not in self._positions:
            self._init_value(key)
        at = self._positions[key]
        self._data[at : at + 16] = struct.pack("dd", value, timestamp)
        if self._behind or self._descriptor is None:
            self._behind = True
            self._write_all()
            return
        try:
            os.pwrite(self._descriptor, self._data[at : at + 16], at)
        except OSError as error:
            self._log_failure(error)

    def _write_all(self) -> None:
        """Bring the file up to what is in memory, its header last: a reader never looks beyond what is there."""
        if not self._behind or time.monotonic() < self._retry_at:
            return
        try:
            if self._descriptor is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            at = HEADER_BYTES
            while at < self._used:
                at += os.pwrite(self._descriptor, self._data[at : self._used], at)
            self._data[:HEADER_BYTES] = struct.pack("ii", self._used, 0)
            os.pwrite(self._descriptor, self._data[:HEADER_BYTES], 0)
        except OSError as error:
            self._log_failure(error)
            return
        if self._retry_at:
            logger.info("counts for /metrics are written to %s again", self._path)
        self._behind, self._retry_at = False, 0.0

    def _log_failure(self, error: OSError) -> None:
        if not self._retry_at:
            logger.warning(
                "counts for /metrics stay in memory: %s cannot be written (%s). Free the disk, make the folder "
                "writable, or name another in PROMETHEUS_MULTIPROC_DIR",
                self._path,
                error.strerror or error,
            )
        self._behind = True
        self._retry_at = time.monotonic() + RETRY_S

    def close(self) -> None:
        if self._descriptor is not None:
            self._write_all()
            os.close(self._descriptor)
            self._descriptor = None


def used_bytes(data: bytes) -> int:
    """Bytes of a file that hold counts. Raises ValueError where the file is shorter than it says, or empty."""
    if len(data) < HEADER_BYTES:
        raise ValueError(f"expected at least {HEADER_BYTES} bytes, found {len(data)}")
    used: int = struct.unpack_from("i", data, 0)[0]
    if not HEADER_BYTES <= used <= len(data):
        raise ValueError(f"expected {used} bytes of counts, found {len(data)}")
    return used


def whole_files(folder: Path) -> list[str]:
    """The files of a folder that can be read; one that a full disk left without its content is passed over."""
    found = []
    for path in sorted(folder.glob("*.db")):
        try:
            if used_bytes(path.read_bytes()) > HEADER_BYTES:
                found.append(str(path))
        except (OSError, ValueError) as error:
            logger.debug("%s is left out of /metrics: %s", path, error)
    return found


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
    """The sum over the files of every process, as far as they can be read."""

    def collect(self) -> Iterable[Metric]:
        merged: Iterable[Metric] = MultiProcessCollector.merge(whole_files(folder()))
        return merged


class _GaugeCollector:
    def __init__(self, gauges: dict[str, tuple[str, float]]) -> None:
        self._gauges = gauges

    def collect(self) -> list[GaugeMetricFamily]:
        return [GaugeMetricFamily(name, text, value) for name, (text, value) in self._gauges.items()]


def folder() -> Path:
    """Folder of the counts of every process; leftovers of an earlier start are cleared by `serve`."""
    return Path(settings.PROMETHEUS_MULTIPROC_DIR)
