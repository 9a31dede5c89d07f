"""Metrics of an experiment, and its guardrails. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HIGHER, LOWER = "higher", "lower"
OUTCOME = "outcome:"
_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?\Z")


class MetricError(ValueError):
    """An unknown metric or guardrail; the message names the known ones."""


@dataclass(frozen=True)
class Metric:
    """A figure of a decision. `bounded`: values in [0, 1]; `log`: arms are compared by the ratio."""

    name: str
    words: str
    goal: str = HIGHER
    bounded: bool = True
    log: bool = False

    @property
    def outcome(self) -> str:
        """Name of the outcome; empty for other metrics."""
        return self.name.removeprefix(OUTCOME) if self.name.startswith(OUTCOME) else ""


METRICS = {
    metric.name: metric
    for metric in (
        Metric("thumbs_up", "share of thumbs up"),
        Metric("score", "mean rating, 0 to 1"),
        Metric("reward", "mean reward, 0 to 1"),
        Metric("error_rate", "share of decisions that failed", goal=LOWER),
        Metric("cost_usd_per_1000", "US dollars per 1,000 answers", goal=LOWER, bounded=False),
        Metric("latency_ms", "time to answer (geometric mean)", goal=LOWER, bounded=False, log=True),
    )
}


def metric_of(name: str) -> Metric:
    """The metric of that name, or an outcome as `outcome:<name>`. Raises MetricError."""
    if name in METRICS:
        return METRICS[name]
    if name.startswith(OUTCOME) and _SLUG.match(name.removeprefix(OUTCOME)):
        return Metric(name, f"mean {name.removeprefix(OUTCOME)}", bounded=False)
    raise MetricError(f"expected one of {', '.join(METRICS)} or outcome:<name>, found {name!r}")


GUARDRAILS: tuple[Mapping[str, object], ...] = (
    {"metric": "error_rate", "margin": 0.02},
    {"metric": "latency_ms", "margin": 0.25},
)
"""Guardrails of a new experiment. `margin`: allowed loss against the control in the metric's unit, for latency as a
share; `goal`: only if not the metric's own."""


@dataclass(frozen=True)
class Guardrail:
    """A metric that must not get worse by more than `margin`."""

    metric: Metric
    goal: str
    margin: float

    @property
    def bound(self) -> float:
        """The margin on the scale on which arms are compared."""
        return math.log1p(self.margin) if self.metric.log else self.margin


def guardrails_checked(given: object) -> list[dict[str, Any]]:
    """The list as it is stored. Raises MetricError unless it is a list of {metric, margin, goal?}."""
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise MetricError('expected a list of {"metric": ..., "margin": ...}')
    for one in given:
        if unknown := sorted(set(one) - {"metric", "margin", "goal"}):
            raise MetricError(f"a guardrail has metric, margin and goal, found {unknown[0]!r}")
        if not isinstance(one.get("metric"), str):
            raise MetricError("a guardrail names its metric")
        metric_of(one["metric"])
        margin = one.get("margin", 0.0)
        if isinstance(margin, bool) or not isinstance(margin, (int, float)) or not 0 <= margin < math.inf:
            raise MetricError(f"a guardrail's margin is a number of at least 0, found {margin!r}")
        if one.get("goal", HIGHER) not in (HIGHER, LOWER):
            raise MetricError(f"a guardrail's goal is {HIGHER} or {LOWER}, found {one['goal']!r}")
    return given


def guardrails_of(given: Sequence[dict[str, object]]) -> list[Guardrail]:
    """Stored guardrails as objects. Raises MetricError."""
    found = []
    for one in guardrails_checked(list(given)):
        metric = metric_of(one["metric"])
        found.append(Guardrail(metric, one.get("goal", metric.goal), float(one.get("margin", 0.0))))
    return found
