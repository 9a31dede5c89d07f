"""Figures of an evaluation as pages, cards and commands show them: shares with intervals, and the headline. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from rl.gates.evidence_kinds import PAIRS
from rl.gates.headlines import EXPLANATIONS, TITLES

BAR_WIDTH = 300
"""Width of a drawn interval, in the units of its drawing."""


class IntervalBar(NamedTuple):
    """A share with its interval, drawn: all in units of BAR_WIDTH."""

    dot: float
    start: float
    width: float


@dataclass(frozen=True)
class Share:
    """A share from 0 to 1 with its 95 % interval, where one is known."""

    value: float
    low: float | None = None
    high: float | None = None
    n: int | None = None

    @property
    def percent(self) -> str:
        return f"{100 * self.value:.1f}\u202f%"  # a narrow space that does not break

    @property
    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f"{100 * self.low:.1f} to {100 * self.high:.1f}"

    @property
    def bar(self) -> IntervalBar:
        """Value and interval on a scale of BAR_WIDTH from 0 to 1."""
        low, high = (self.low, self.high) if self.low is not None and self.high is not None else (0.0, 0.0)
        return IntervalBar(
            dot=round(BAR_WIDTH * self.value, 1),
            start=round(BAR_WIDTH * low, 1),
            width=round(BAR_WIDTH * (high - low), 1),
        )

    @property
    def points(self) -> str:
        """A difference of shares, in percentage points with its sign."""
        return f"{100 * self.value:+.1f}"

    @property
    def points_interval(self) -> str:
        """The interval of a difference of shares, in percentage points with signs."""
        if self.low is None or self.high is None:
            return ""
        return f"{100 * self.low:+.1f} to {100 * self.high:+.1f}"


def share_of(figures: Mapping[str, Any], name: str) -> Share | None:
    """A share out of stored figures, where it is a number or {value, low, high, n}; None where there is none."""
    found = figures.get(name)
    if isinstance(found, Mapping):
        if not is_number(found.get("value")):
            return None
        return Share(found["value"], found.get("low"), found.get("high"), found.get("n"))
    return Share(float(found)) if is_number(found) else None


@dataclass(frozen=True)
class Headline:
    """The figure that leads an evaluation, and what the policy gained by it."""

    kind: str
    title: str
    explanation: str
    unit: str
    """`points` for a share, else the unit of the figure."""
    figure: Share
    against: Share | None
    difference: Share | None
    confidence: float
    """Of the interval of the difference: the gate's, so that its lower end is the gate's bound."""

    @property
    def share(self) -> Share | None:
        """The figure where it is a share, as it can be drawn."""
        return self.figure if self.unit == "points" else None

    @property
    def text(self) -> str:
        return self._amount(self.figure.value)

    @property
    def of(self) -> str:
        """Evidence it was judged on."""
        return "held-out prompts"

    @property
    def interval(self) -> str:
        if self.figure.low is None or self.figure.high is None:
            return ""
        if self.unit == "points":
            return self.figure.interval
        return f"{self.figure.low:.3f} to {self.figure.high:.3f}"

    @property
    def against_text(self) -> str:
        return self._amount(self.against.value) if self.against else ""

    @property
    def gain(self) -> str:
        if self.difference is None:
            return ""
        if self.unit == "points":
            return f"{self.difference.points} points"
        return f"{self.difference.value:+.3f} {self.unit}"

    @property
    def gain_interval(self) -> str:
        """The interval of the gain, with its confidence where that is not 95 %."""
        found = self.difference
        if found is None or found.low is None or found.high is None:
            return ""
        both = found.points_interval if self.unit == "points" else f"{found.low:+.3f} to {found.high:+.3f}"
        if abs(self.confidence - 0.95) < 1e-9:
            return both
        return f"{both}, {100 * self.confidence:.1f}\u202f% interval"

    def _amount(self, value: float) -> str:
        return Share(value).percent if self.unit == "points" else f"{value:.3f} {self.unit}"


def headline_of(metrics: Mapping[str, Any]) -> Headline | None:
    """The leading figure out of a policy's metrics; of one judged before kinds were told apart, its preference
    accuracy."""
    found = metrics.get("headline")
    entry = found if isinstance(found, Mapping) else {}
    kind = entry.get("kind", PAIRS)
    figure = share_of(metrics, "headline") or share_of(metrics, "preference_accuracy")
    if figure is None:
        return None
    against = share_of(entry, "against") if entry else share_of(metrics, "against_preference_accuracy")
    gated = metrics.get("difference")
    confidence = gated.get("confidence", 0.95) if isinstance(gated, Mapping) else 0.95
    return Headline(
        kind=kind,
        title=TITLES[kind],
        explanation=EXPLANATIONS[kind],
        unit=entry.get("unit", "points"),
        figure=figure,
        against=against,
        difference=share_of(metrics, "difference"),
        confidence=confidence,
    )


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
