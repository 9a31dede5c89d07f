"""Values of a metric, decision by decision, read from the log."""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from django.db.models import Q

from feedback.explorer.bulk_readers import DecisionSet, Exposure, outcomes_of, verdicts
from rl.datasets.feedback_types import rating_value
from rl.models import RewardRecord
from rl.recipes.experiment_metrics import Metric

Values: TypeAlias = Mapping[uuid.UUID, float]


def metric_values(
    decisions: DecisionSet, metric: Metric, rows: Sequence[Exposure]
) -> tuple[dict[uuid.UUID, float], int]:
    """Decision -> value of those that have one, and how many simulated ratings are in it; latency as its logarithm.

    rows: the decisions of the set.
    """
    if metric.name == "error_rate":
        return {row.id: float(row.failed) for row in rows}, 0
    if metric.name == "latency_ms":
        return {row.id: math.log(max(row.latency_ms, 0.01)) for row in rows if row.latency_ms is not None}, 0
    if metric.name == "reward":
        return _rewards(decisions)
    if metric.outcome:
        return outcomes_of(decisions, metric.outcome), 0
    given: dict[uuid.UUID, list[float]] = defaultdict(list)
    simulated = 0
    for rating in verdicts(decisions):
        thumb = metric.name == "thumbs_up"
        value = (
            rating_value(rating.thumb) if thumb else rating_value(rating.thumb, rating.stars, rating.score)
        )
        if value is not None:
            given[rating.decision].append(value)
            simulated += rating.simulated
    return {pk: math.fsum(values) / len(values) for pk, values in given.items()}, simulated


def _rewards(decisions: DecisionSet) -> tuple[dict[uuid.UUID, float], int]:
    current = Q(superseded_by__isnull=True)
    if decisions.cutoff is not None:
        current = Q(created_at__lt=decisions.cutoff) & (
            current | Q(superseded_by__created_at__gte=decisions.cutoff)
        )
    records = RewardRecord.objects.filter(current, decision__in=decisions.ids(), value__isnull=False)
    rows = list(records.order_by().values_list("decision", "value", "simulated"))
    return {pk: value for pk, value, _ in rows if value is not None}, sum(simulated for *_, simulated in rows)
