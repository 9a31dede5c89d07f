"""Values of an experiment's metric per decision, and figures adjusted by its units' past (CUPED).

Covariates come from before the units had an arm: earlier decisions and feedback, the time of arrival, the first prompt.
A bandit's figures are not adjusted: a unit's arm depends on earlier outcomes.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

import numpy as np
from django.db.models import Q

from feedback.explorer.bulk_readers import (
    DecisionSet,
    Exposure,
    PromptText,
    exposures,
    outcomes_of,
    past_set,
    prompts_of,
    verdicts,
)
from rl.datasets.feedback_types import rating_value
from rl.linear.features import WORDS, prompt_features
from rl.models import Experiment, RewardRecord
from rl.recipes.experiment_metrics import Metric
from rl.statistics.contrasts import FOLDS, Floats, Moments, adjusted_moments

Values: TypeAlias = Mapping[uuid.UUID, float]


def metric_values(
    decisions: DecisionSet, metric: Metric, rows: Sequence[Exposure]
) -> tuple[dict[uuid.UUID, float], int]:
    """(decision -> value, number of simulated ratings in them); latency as its logarithm. rows: the set's decisions."""
    if metric.name == "error_rate":
        return {row.id: float(row.failed) for row in rows}, 0
    if metric.name == "latency_ms":
        return {row.id: math.log(max(row.latency_ms, 0.01)) for row in rows if row.latency_ms is not None}, 0
    if metric.name == "cost_usd_per_1000":
        return {row.id: 1000 * row.cost_usd for row in rows if row.cost_usd is not None}, 0
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


# --- Values from before the experiment ---


LOOKBACK = timedelta(days=90)
"""How far back a unit's past is read."""

MOST_PROMPTS = 5_000
"""With more units their first prompts are not read: reading is slow, and many units need less help."""

MOST_FEATURES = 40
"""Most features of prompts, those nearest to half of the units."""

RARE = 0.05
"""A feature is left out if fewer than this share of units have it, or lack it."""

OWN_PAST, TIME, FIRST_PROMPT = "their past", "when they came", "their first prompt"
"""Groups of covariates, as pages name them."""


@dataclass(frozen=True)
class Adjustment:
    """Adjusted moments of the main metric by arm, and the covariates used."""

    moments: Mapping[str, Moments]
    covariates: tuple[str, ...]


@dataclass(frozen=True)
class _Unit:
    """A unit of an arm, with its first exposure."""

    arm: str
    name: str
    first: Exposure


def adjustment_of(
    experiment: Experiment, metric: Metric, rows: Sequence[Exposure], values: Values
) -> Adjustment | None:
    """Adjusted figures; None for a bandit, a draft, too few units, or without covariates that vary."""
    if experiment.allocation == Experiment.Allocation.THOMPSON or experiment.started_at is None:
        return None
    units = _units(rows)
    arms = sorted({unit.arm for unit in units})
    if len(arms) < experiment.arms.count():
        return None
    groups = {
        OWN_PAST: _past_deviations(experiment, metric, arms, units),
        TIME: _time(units),
        FIRST_PROMPT: _prompts(units),
    }
    columns_by_group = {name: columns for name, columns in groups.items() if columns is not None}
    if not columns_by_group:
        return None
    sums, counts = _totals(units, rows, values)
    sizes = columns_by_group[OWN_PAST][:, -1] if OWN_PAST in columns_by_group else np.zeros(len(units))
    numbers = {arm: number for number, arm in enumerate(arms)}
    found = adjusted_moments(
        sums,
        counts,
        np.array([numbers[unit.arm] for unit in units]),
        np.hstack(list(columns_by_group.values())),
        np.array([_fold(experiment.salt, unit.name) for unit in units]),
        np.expm1(sizes),
    )
    return None if found is None else Adjustment(dict(zip(arms, found, strict=True)), tuple(columns_by_group))


def _units(rows: Iterable[Exposure]) -> list[_Unit]:
    first: dict[tuple[str, str], Exposure] = {}
    for row in rows:
        known = first.get((row.arm, row.unit))
        if known is None or (row.exposed_at, row.id) < (known.exposed_at, known.id):
            first[row.arm, row.unit] = row
    return [_Unit(*key, row) for key, row in sorted(first.items())]


def _totals(units: Sequence[_Unit], rows: Iterable[Exposure], values: Values) -> tuple[Floats, Floats]:
    place = {(unit.arm, unit.name): number for number, unit in enumerate(units)}
    sums, counts = np.zeros(len(units)), np.zeros(len(units))
    for row in rows:
        if (value := values.get(row.id)) is not None:
            number = place[row.arm, row.unit]
            sums[number] += value
            counts[number] += 1
    return sums, counts


def _fold(salt: str, unit: str) -> int:
    """The unit's fold: fixed, and independent of its arm."""
    digest = hashlib.sha256(f"{salt}:fold:{unit}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % FOLDS


# --- Covariates ---------------------------------------------------------------------------------------------


def _past_deviations(
    experiment: Experiment, metric: Metric, arms: Sequence[str], units: Sequence[_Unit]
) -> Floats | None:
    """[units, 6]: distance of the metric's past values from the mean, as a sum and shrunk as by one and five more
    values; whether there is any; their number; number of decisions. None if no unit has a past."""
    assert experiment.started_at is not None  # a draft is not adjusted
    past = past_set(experiment.agent, arms, experiment.started_at - LOOKBACK, experiment.started_at)
    rows = list(exposures(past))
    if not rows:
        return None
    values, _ = metric_values(past, metric, rows)
    mean = math.fsum(values.values()) / max(len(values), 1)
    decisions = Counter(row.unit for row in rows)
    away: dict[str, float] = defaultdict(float)
    valued: Counter[str] = Counter()
    for row in rows:
        if (value := values.get(row.id)) is not None:
            away[row.unit] += value - mean
            valued[row.unit] += 1
    columns = []
    for unit in units:
        total, n = away.get(unit.name, 0.0), valued[unit.name]
        columns.append(
            [
                total,
                total / (n + 1),
                total / (n + 5),
                float(n > 0),
                math.log1p(n),
                math.log1p(decisions[unit.name]),
            ]
        )
    return np.array(columns)


def _time(units: Sequence[_Unit]) -> Floats | None:
    """[units, 11]: days since the first unit and their square, hour as an angle, weekday. None within one day."""
    first = min(unit.first.exposed_at for unit in units)
    days = np.array([(unit.first.exposed_at - first) / timedelta(days=1) for unit in units])
    if days.max() < 1:
        return None
    hours = np.array([unit.first.exposed_at.hour + unit.first.exposed_at.minute / 60 for unit in units]) * (
        2 * math.pi / 24
    )
    weekday = np.array([unit.first.exposed_at.weekday() for unit in units])
    return np.column_stack([days, days**2, np.sin(hours), np.cos(hours), weekday[:, None] == np.arange(7)])


def _prompts(units: Sequence[_Unit]) -> Floats | None:
    """[units, up to MOST_FEATURES + 1]: log length of the first prompt, and its words, fields, tags and source. None
    with too many units, or equal prompts."""
    if len(units) > MOST_PROMPTS:
        return None
    prompts = dict(prompts_of([unit.first.id for unit in units]))
    features = [_features(prompts[unit.first.id]) if unit.first.id in prompts else {} for unit in units]
    count = Counter(name for one in features for name in one)
    least = RARE * len(units)
    telling = [name for name, n in count.items() if least <= n <= len(units) - least and name != LENGTH]
    telling.sort(key=lambda name: (abs(count[name] - len(units) / 2), name))
    columns = np.array(
        [[one.get(name, 0.0) for name in (LENGTH, *telling[:MOST_FEATURES])] for one in features]
    )
    return columns if (columns.std(axis=0) > 0).any() else None


LENGTH = "characters"


def _features(prompt: PromptText) -> dict[str, float]:
    found = dict.fromkeys(prompt_features(prompt.messages, (WORDS,)), 1.0)
    found |= {f"tag {tag}": 1.0 for tag in prompt.tags} | {f"source {prompt.source}": 1.0}
    length = sum(len(str(message.get("content") or "")) for message in prompt.messages)
    return found | {LENGTH: math.log1p(length)}
