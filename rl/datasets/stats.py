"""Statistics of an agent's feedback before training: counts, balance, scores, lengths, raters, duplicates."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from django.db.models import Aggregate, Case, Count, F, FloatField, Q, Sum, Value, When

from feedback import selectors
from feedback.messages import Message
from feedback.selectors import ratings_standing
from feedback.storage.sql import chunks
from rl.datasets.evidence import SIMULATED_RATER
from rl.datasets.feedback_types import NEUTRAL, SOURCES, SPLITS, Row, rating_value
from rl.datasets.reward_records import pending_with_evidence
from rl.datasets.rows import RowRules, make_rows, rows_with_prompts, source_opened
from rl.models import RewardRecord, Snapshot
from rl.statistics import wilson_interval

BINS = 10
"""Bars of the score histogram over [0, 1]; 1 belongs to the last bar."""


@dataclass
class _Rater:
    ratings: int = 0
    comparisons: int = 0
    simulated: bool = False
    values: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ratings": self.ratings,
            "comparisons": self.comparisons,
            "simulated": self.simulated,
            "mean_value": _mean(self.values),
        }


def feedback_stats(agent: str) -> dict[str, object]:
    """Counts of feedback, balance and histogram of verdicts, figures per rater, duplicate responses."""
    counts = selectors.feedback_counts(agent)
    raters: dict[str, _Rater] = {}
    values: list[float] = []
    for rating in selectors.rating_facts(agent):
        rater = raters.setdefault(rating.rater, _Rater())
        rater.ratings += 1
        rater.simulated |= rating.rater_kind == SIMULATED_RATER
        value = rating_value(rating.thumb, rating.stars, rating.score)
        if value is not None:
            rater.values.append(value)
            values.append(value)
    for comparison in selectors.comparison_facts(agent):
        rater = raters.setdefault(comparison.rater, _Rater())
        rater.comparisons += 1
        rater.simulated |= comparison.rater_kind == SIMULATED_RATER
    good, bad = sum(value > NEUTRAL for value in values), sum(value < NEUTRAL for value in values)
    return {
        "decisions": counts.decisions,
        "ratings": counts.ratings,
        "comparisons": counts.comparisons,
        "corrections": counts.corrections,
        "simulated_share": counts.simulated / counts.feedback if counts.feedback else 0.0,
        "balance": {
            "good": good,
            "bad": bad,
            "neutral": len(values) - good - bad,
            "good_share": wilson_interval(good, good + bad).as_dict(),
        },
        "scores": score_stats(values),
        "raters": {name: raters[name].as_dict() for name in sorted(raters)},
        "duplicate_responses": _duplicates(agent),
    }


def _duplicates(agent: str) -> int:
    """Judged decisions that repeat an earlier response to the same prompt."""
    seen: set[tuple[str, str]] = set()
    judged_count = 0
    for fact in selectors.response_facts(agent):
        if fact.judged:
            judged_count += 1
            seen.add((fact.prompt_hash, fact.response))
    return judged_count - len(seen)


def pair_stats(rows: Iterable[Row]) -> dict[str, object]:
    """Pairs per split and source, and lengths in characters."""
    counts: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    prompts: set[str] = set()
    lengths: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": []}
    longer = 0
    for row in rows:
        counts[row["split"]] += 1
        sources[row["source"]] += 1
        prompts.add(row["prompt_hash"])
        for side, found in lengths.items():
            found.append(_characters(row[side]))
        longer += lengths["chosen"][-1] > lengths["rejected"][-1]
    return {
        "pairs": {split: counts[split] for split in SPLITS},
        "sources": {source: sources[source] for source in SOURCES if sources[source]},
        "prompts": len(prompts),
        "length_chars": {side: _spread(found) for side, found in lengths.items()},
        # A policy that only writes longer answers would win this share of the pairs.
        "chosen_longer": wilson_interval(longer, len(lengths["chosen"])).as_dict(),
    }


def example_stats(rows: Iterable[Row]) -> dict[str, object]:
    """Counts, lengths in characters and duplicates of rows of any kind, and what the kind adds.

    Labels add their balance, scores their spread. A duplicate is a response equal to one in an earlier row, to
    whatever prompt: many of them teach one answer for everything.
    """
    counts: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    prompts: set[str] = set()
    lengths: dict[str, list[int]] = {"prompt": [], "completion": []}
    words: Counter[str] = Counter()
    labels: Counter[tuple[bool, str]] = Counter()
    scores: list[float] = []
    for row in rows:
        counts[row["split"]] += 1
        sources[row["source"]] += 1
        prompts.add(row["prompt_hash"])
        lengths["prompt"].append(_characters(row["prompt"]))
        responses = [row[side] for side in ("completion", "chosen", "rejected") if side in row]
        for completion in responses:
            lengths["completion"].append(_characters(completion))
            words[json.dumps(completion)] += 1
        if "label" in row:
            labels[row["label"], row["source"]] += 1
        if "score" in row:
            scores.append(row["score"])
    stats: dict[str, object] = {
        "rows": {split: counts[split] for split in SPLITS},
        "sources": dict(sorted(sources.items())),
        "prompts": len(prompts),
        "length_chars": {side: _spread(length) for side, length in lengths.items()},
        "duplicates": sum(words.values()) - len(words),
    }
    if labels:
        stats["balance"] = label_balance(labels)
    if scores:
        stats["scores"] = score_stats(scores)
    return stats


def label_balance(labels: Counter[tuple[bool, str]]) -> dict[str, object]:
    """Good and bad labels, the share of good ones with its 95 % interval, and how many a reward decided.

    labels: (is good, source of the row) -> count.
    """
    good = sum(n for (label, _), n in labels.items() if label)
    return {
        "good": good,
        "bad": labels.total() - good,
        "good_share": wilson_interval(good, labels.total()).as_dict(),
        "by_reward": {"good": labels[True, "reward"], "bad": labels[False, "reward"]},
    }


def score_stats(values: list[float]) -> dict[str, object]:
    histogram = Counter(min(int(value * BINS), BINS - 1) for value in values)
    return {
        "n": len(values),
        "mean": _mean(values),
        "std": _std(values),
        "histogram": [histogram[bar] for bar in range(BINS)],
    }


def _characters(said: str | list[Message]) -> int:
    if isinstance(said, str):
        return len(said)
    return sum(len(message.get("content") or "") for message in said)


def _spread(found: list[int]) -> dict[str, int] | None:
    if not found:
        return None
    order = sorted(found)
    # Nearest-rank percentiles.
    at = {q: order[max(math.ceil(q / 100 * len(order)) - 1, 0)] for q in (50, 95)}
    return {"min": order[0], "median": at[50], "p95": at[95], "max": order[-1]}


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std(values: list[float]) -> float | None:
    """Sample standard deviation (n - 1); None below two values."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def get_training_stats(agent: str | None = None) -> dict[str, object]:
    """Statistics of an agent's feedback and of the datasets it would give; None: {"agents": {slug: ...}} of all.

    Keys: decisions, ratings, comparisons, corrections, simulated_share, balance (verdicts above and below neutral),
    scores (mean, std, histogram over [0, 1]), rewards (as scores, with `pending` decisions), raters,
    duplicate_responses, pairs per split, sources, prompts, length_chars, chosen_longer, left_out, and `kinds`, the same
    for each other kind of dataset (`example_stats`). Raises DatasetRefused for an unknown agent.
    """
    if agent is None:
        return {"agents": {slug: get_training_stats(slug) for slug in selectors.agent_slugs()}}
    given = source_opened(agent)
    left_out: Counter[str] = Counter()
    knobs = RowRules().knobs(agent, Snapshot.Kind.PAIRS)
    pairs = make_rows(given, Snapshot.Kind.PAIRS, left_out, knobs, dry_run=True)
    left_out.update(pairs.left_out)
    found = {
        "agent": agent,
        **feedback_stats(agent),
        **pair_stats(rows_with_prompts(agent, given, pairs, left_out)),
        "rewards": reward_stats(agent),
    }
    return {
        **found,
        "left_out": dict(left_out),
        "kinds": {kind: kind_stats(agent, kind) for kind in OTHER_KINDS},
    }


def reward_stats(agent: str) -> dict[str, object]:
    """`score_stats` of an agent's stored rewards, and `pending`: decisions with evidence but no reward yet."""
    standing = RewardRecord.objects.filter(agent=agent, superseded_by__isnull=True, value__isnull=False)
    values = [value for value in standing.values_list("value", flat=True) if value is not None]
    return {**score_stats(values), "pending": pending_with_evidence(agent).count()}


OTHER_KINDS = tuple(
    str(kind)
    for kind in Snapshot.Kind.values
    if kind not in (Snapshot.Kind.PAIRS, Snapshot.Kind.PAIRS_AND_SCORES)
)
"""Kinds besides pairs, except the one that repeats their rows."""


def kind_stats(agent: str, kind: str) -> dict[str, object]:
    """`example_stats` of the dataset that an agent's feedback would give."""
    given = source_opened(agent)
    left_out: Counter[str] = Counter()
    knobs = RowRules().knobs(agent, kind)
    made = make_rows(given, kind, left_out, knobs, dry_run=True)
    left_out.update(made.left_out)
    stats = example_stats(rows_with_prompts(agent, given, made, left_out))
    threshold = {"reward_threshold": knobs["threshold"]} if "threshold" in knobs else {}
    return {**stats, **threshold, "left_out": dict(left_out)}


TIMES_AT_ONCE = 20
"""Points in time per pass over the ratings."""

# rl.datasets.feedback_types.rating_value in SQL.
VALUE = Case(
    When(score__isnull=False, then=F("score")),
    When(stars__isnull=False, then=(F("stars") - 1.0) / 4.0),
    When(thumb="up", then=Value(1.0)),
    When(thumb="down", then=Value(0.0)),
    output_field=FloatField(),
)


class ScoreSummary(NamedTuple):
    """Number of ratings with a verdict, their mean in [0, 1] and sample standard deviation (None if too few)."""

    n: int
    mean: float | None
    std: float | None


def score_summaries(agent: str, until: Sequence[datetime]) -> list[ScoreSummary]:
    """For each time, a summary of the ratings that stand today and were given by then."""
    summaries: list[ScoreSummary] = []
    for times in chunks(until, TIMES_AT_ONCE):
        aggregates: dict[str, Aggregate] = {}
        for index, time in enumerate(times):
            by_then = Q(created_at__lte=time)
            aggregates[f"n{index}"] = Count("value", filter=by_then)
            aggregates[f"sum{index}"] = Sum("value", filter=by_then)
            aggregates[f"squares{index}"] = Sum(F("value") * F("value"), filter=by_then)
        row = ratings_standing(agent).order_by().annotate(value=VALUE).aggregate(**aggregates)
        summaries += [
            _score_summary(row[f"n{index}"], row[f"sum{index}"], row[f"squares{index}"])
            for index in range(len(times))
        ]
    return summaries


def _score_summary(n: int, total: float | None, squares: float | None) -> ScoreSummary:
    # Not the database's deviation: SQLite has none, and Django's replacement fails on a single value.
    if not n or total is None or squares is None:
        return ScoreSummary(0, None, None)
    mean = total / n
    std = math.sqrt(max(squares - n * mean * mean, 0.0) / (n - 1)) if n > 1 else None
    return ScoreSummary(n, mean, std)
