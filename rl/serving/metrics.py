"""Metrics of the gateway for Prometheus: counted by every web process, summed when they are read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from django.conf import settings
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from rl.serving.count_files import CountFile, whole_files

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
