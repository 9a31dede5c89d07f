"""The ledger: per agent and month what was paid, what the incumbent alone would have cost, and the quality beside it.

The incumbent is the hosted policy with the most priced answers. Its mean cost of an answer prices the answers that came
from this machine: of the same month where it answered then, else of the newest month before.
"""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

from feedback.cache import CostAwareCache
from feedback.explorer.bulk_readers import MonthAnswers, months_answered, months_rated
from rl.datasets.feedback_types import rating_value
from rl.models import Policy, UnrecordedCost
from rl.statistics import Difference, mean_interval
from rl.statistics.assignment import BASE

FEWEST_RATED = 10
"""Fewest rated answers of each side for a difference of quality."""


@dataclass(frozen=True)
class MonthLedger:
    """One agent's month. Money in US dollars."""

    agent: str
    month: datetime
    answers: int
    """Answers that users got from here or through here; those that an app only recorded are left out."""
    local: int
    """Answers of the base model and of policies trained here."""
    paid: float
    """Cost of the providers' answers, to graders, judges and evaluations too."""
    unpriced: int
    """Answers of providers whose price or tokens are not known; they are in no sum."""
    incumbent: str = ""
    """Hosted policy that would have answered alone; empty without one."""
    alone: float | None = None
    """Cost if the incumbent had answered alone; None if none of its answers has a price."""
    quality: Difference | None = None
    """Mean rating of local answers minus the incumbent's, in [0, 1], 95 % interval; None with too few ratings."""
    latency_ms: float | None = None
    """Mean of local answers."""
    incumbent_latency_ms: float | None = None

    @property
    def local_share(self) -> float:
        return self.local / self.answers if self.answers else 0.0

    @property
    def saved(self) -> float | None:
        return None if self.alone is None else self.alone - self.paid

    @property
    def paid_share(self) -> float:
        """Share of what the incumbent alone would have cost that was paid, 0 to 1; 1 where it is unknown or more."""
        return min(1.0, self.paid / self.alone) if self.alone else 1.0

    @property
    def local_percent(self) -> str:
        return f"{100 * self.local_share:.0f}"

    @property
    def quality_text(self) -> str:
        """The difference in points with its interval; empty without one."""
        if self.quality is None:
            return ""
        value, low, high = (100 * one for one in (self.quality.value, self.quality.low, self.quality.high))
        return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"

    @property
    def words(self) -> str:
        """The month in one sentence."""
        parts = [f"{self.local_percent} % of {self.answers:,} answers came from your own machine"]
        if self.quality is not None:
            parts.append(f"quality {self.quality_text}")
        if self.saved is not None:
            parts.append(f"{self.saved:,.2f} USD of {self.alone:,.2f} saved")
        elif self.paid:
            parts.append(f"{self.paid:,.2f} USD paid")
        return "; ".join(parts) + "."


@dataclass(frozen=True)
class Savings:
    """An agent's months together, of those in which the incumbent's price is known. Money in US dollars."""

    months: Sequence[MonthLedger]
    """Newest first."""

    @property
    def priced(self) -> list[MonthLedger]:
        """Oldest first."""
        return [one for one in reversed(self.months) if one.alone is not None]

    @property
    def alone(self) -> float:
        return sum(one.alone or 0.0 for one in self.priced)

    @property
    def saved(self) -> float:
        return sum(one.saved or 0.0 for one in self.priced)


COLUMNS = (
    "agent",
    "month",
    "answers",
    "local",
    "local_share",
    "paid_usd",
    "incumbent",
    "alone_usd",
    "saved_usd",
    "unpriced",
    "quality",
    "quality_low",
    "quality_high",
    "latency_ms",
    "incumbent_latency_ms",
)


@dataclass
class _Sums:
    """Counts of some answers."""

    answers: int = 0
    unpriced: int = 0
    priced: int = 0
    priced_shadow: int = 0
    cost: float = 0.0
    latency: float = 0.0
    timed: int = 0

    def add(self, row: MonthAnswers) -> None:
        self.answers += 0 if row.shadow else row.answers
        self.unpriced += row.answers - row.priced
        self.priced += row.priced
        self.priced_shadow += row.priced if row.shadow else 0
        self.cost += row.cost
        self.latency += (row.latency_ms or 0.0) * row.timed
        self.timed += row.timed

    @property
    def mean_ms(self) -> float | None:
        return self.latency / self.timed if self.timed else None


_ledgers: CostAwareCache[list[MonthLedger]] = CostAwareCache()


def ledger_cached() -> list[MonthLedger]:
    """`ledger`, cached for pages; a little old where there is much to read."""
    return _ledgers.get("all", ledger)


def ledger() -> list[MonthLedger]:
    """Every agent's months with answers, newest month first."""
    policies = Policy.objects.exclude(kind=Policy.Kind.RECORDED).values_list("agent", "name", "kind")
    kinds = {(agent, name): kind for agent, name, kind in policies}
    rows: dict[str, list[MonthAnswers]] = defaultdict(list)
    hosted: dict[str, set[str]] = defaultdict(set)
    for row in months_answered():
        kind = kinds.get((row.agent, row.policy))
        if kind is not None or row.policy == BASE:
            rows[row.agent].append(row)
        if kind == Policy.Kind.HOSTED:
            hosted[row.agent].add(row.policy)
    found = [one for agent, asked in hosted.items() for one in _of_agent(agent, rows[agent], asked)]
    return sorted(found, key=lambda one: (-one.month.timestamp(), one.agent))


def _of_agent(agent: str, rows: Sequence[MonthAnswers], asked: set[str]) -> Iterator[MonthLedger]:
    """The agent's months, oldest first; asked: its hosted policies that answered."""
    own = {row.policy for row in rows} - asked
    counts = {name: sum(row.priced for row in rows if row.policy == name) for name in sorted(asked)}
    incumbent = max(counts, key=counts.__getitem__)
    ratings = _ratings(agent)
    beside = dict(UnrecordedCost.objects.filter(agent=agent).values_list("month", "cost_usd"))
    price: float | None = None
    for month in sorted({row.month for row in rows} | beside.keys()):
        local, theirs, paid = _Sums(), _Sums(), _Sums()
        for row in rows:
            if row.month == month:
                of_provider = row.policy in asked
                for sums in (
                    [paid, *([theirs] if row.policy == incumbent else [])] if of_provider else [local]
                ):
                    sums.add(row)
        price = theirs.cost / theirs.priced if theirs.priced else price
        answers = local.answers + paid.answers
        yield MonthLedger(
            agent=agent,
            month=month,
            answers=answers,
            local=local.answers,
            paid=paid.cost + beside.get(month, 0.0),
            unpriced=paid.unpriced,
            incumbent=incumbent,
            # answers of unknown price are in no sum
            alone=None if price is None else price * (local.answers + paid.priced - paid.priced_shadow),
            quality=_quality(ratings.get(month, {}), incumbent, own),
            latency_ms=local.mean_ms,
            incumbent_latency_ms=theirs.mean_ms,
        )


def _ratings(agent: str) -> dict[datetime, dict[str, list[float]]]:
    """Month -> policy -> values of ratings by people."""
    found: dict[datetime, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in months_rated(agent):
        if (value := rating_value(row.thumb, row.stars, row.score)) is not None:
            found[row.month][row.policy].append(value)
    return found


def _quality(values: dict[str, list[float]], incumbent: str, local: set[str]) -> Difference | None:
    """Mean rating of local answers minus the incumbent's (the two means' intervals combined: MOVER, Newcombe 1998)."""
    theirs = values.get(incumbent, [])
    own = [value for name, some in values.items() if name in local for value in some]
    if min(len(own), len(theirs)) < FEWEST_RATED:
        return None
    value, low, high = _mean(own)
    other, other_low, other_high = _mean(theirs)
    below, above = math.hypot(value - low, other_high - other), math.hypot(high - value, other - other_low)
    gain = value - other
    return Difference(gain, max(gain - below, -1.0), min(gain + above, 1.0))


def _mean(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of several values in [0, 1] with its 95 % interval."""
    found = mean_interval(values, bounds=(0.0, 1.0))
    assert found.value is not None
    assert found.low is not None
    assert found.high is not None
    return found.value, found.low, found.high


def ledger_csv(rows: Iterable[MonthLedger]) -> str:
    """The ledger as CSV, one line per agent and month; unknown figures are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(COLUMNS)
    for row in rows:
        quality = row.quality
        ends = (None, None, None) if quality is None else (quality.value, quality.low, quality.high)
        counts = (row.agent, f"{row.month:%Y-%m}", row.answers, row.local, row.local_share)
        money = (row.paid, row.incumbent, row.alone, row.saved, row.unpriced)
        figures = (*counts, *money, *ends, row.latency_ms, row.incumbent_latency_ms)
        writer.writerow(
            "" if one is None else round(one, 6) if isinstance(one, float) else one for one in figures
        )
    return out.getvalue()
