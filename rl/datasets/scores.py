"""Mean and spread of what raters said, as a number in [0, 1]; worked out in the database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from django.db.models import Aggregate, Case, Count, F, FloatField, Q, Sum, Value, When

from feedback.selectors import ratings_standing

TIMES_AT_ONCE = 20
"""Points in time asked of the database in one pass over the ratings."""

# the finest signal speaks, as in rl.datasets.feedback_types.rating_value: a score, else stars, else a thumb
VALUE = Case(
    When(score__isnull=False, then=F("score")),
    When(stars__isnull=False, then=(F("stars") - 1.0) / 4.0),
    When(thumb="up", then=Value(1.0)),
    When(thumb="down", then=Value(0.0)),
    output_field=FloatField(),
)


class ScoreSummary(NamedTuple):
    """Ratings with a verdict, their mean in [0, 1] and sample standard deviation; None where too few say it."""

    n: int
    mean: float | None
    std: float | None


def score_summaries(agent: str, until: Sequence[datetime]) -> list[ScoreSummary]:
    """For each time, what the ratings that stand today and were given by then say of the agent's decisions."""
    summaries: list[ScoreSummary] = []
    for start in range(0, len(until), TIMES_AT_ONCE):
        times = until[start : start + TIMES_AT_ONCE]
        aggregates: dict[str, Aggregate] = {}
        for index, time in enumerate(times):
            by_then = Q(created_at__lte=time)
            aggregates[f"n{index}"] = Count("value", filter=by_then)
            aggregates[f"sum{index}"] = Sum("value", filter=by_then)
            aggregates[f"squares{index}"] = Sum(F("value") * F("value"), filter=by_then)
        row = ratings_standing(agent).order_by().annotate(value=VALUE).aggregate(**aggregates)
        summaries += [
            _summary(row[f"n{index}"], row[f"sum{index}"], row[f"squares{index}"])
            for index in range(len(times))
        ]
    return summaries


def _summary(n: int, total: float | None, squares: float | None) -> ScoreSummary:
    # not the database's own deviation: SQLite has none, and Django's for it fails on a single value
    if not n or total is None or squares is None:
        return ScoreSummary(0, None, None)
    mean = total / n
    std = math.sqrt(max(squares - n * mean * mean, 0.0) / (n - 1)) if n > 1 else None
    return ScoreSummary(n, mean, std)
