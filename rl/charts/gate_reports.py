"""A stored gate report as pages show it: intervals drawn, and details behind the words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.gates.evidence_kinds import Figures
from rl.gates.report import RULE_TITLES, StoredVerdict

WIDTH, REACH = 120, 0.5
"""Width of a drawn difference, and the difference at its ends; larger ones are drawn at the end."""


@dataclass(frozen=True)
class IntervalDrawing:
    """A difference with its interval in units of WIDTH; zero is in the middle."""

    dot: float
    start: float
    width: float
    summary: str
    zero: float = WIDTH / 2


@dataclass(frozen=True)
class RuleLine:
    """One rule of the report."""

    rule: str
    title: str
    outcome: str
    words: str
    drawing: IntervalDrawing | None
    details: list[tuple[str, str]]
    """(name, value) below the summary."""


def report_lines(verdicts: Sequence[StoredVerdict]) -> list[RuleLine]:
    """The stored verdicts, in their order."""
    return [
        RuleLine(
            rule=verdict["rule"],
            title=RULE_TITLES.get(verdict["rule"], verdict["rule"]),
            outcome=verdict["outcome"],
            words=verdict["words"],
            drawing=_interval_drawing(verdict["figures"]),
            details=_details(verdict["rule"], verdict["figures"]),
        )
        for verdict in verdicts
    ]


def _interval_drawing(figures: Figures) -> IntervalDrawing | None:
    value, low, high = (figures.get(name) for name in ("value", "low", "high"))
    if value is None or low is None or high is None:
        return None

    def position(difference: float) -> float:
        return round(WIDTH / 2 * (1 + min(max(difference, -REACH), REACH) / REACH), 1)

    return IntervalDrawing(
        position(value),
        position(low),
        round(position(high) - position(low), 1),
        f"{value:+.3f}, {low:+.3f} to {high:+.3f}",
    )


def _details(rule: str, figures: Figures) -> list[tuple[str, str]]:
    if rule == "slices":
        worst_first = sorted(figures.items(), key=lambda item: item[1]["value"])
        return [(name, f"{100 * f['value']:+.1f} points over {f['n']} prompts") for name, f in worst_first]
    if rule == "golden":
        return [(c["name"], f"{c['why'] or 'wrong'}: {c['answer'][:200]}") for c in figures.get("failed", [])]
    if rule == "raters":
        without = figures.get("without", {})
        return [(f"without {rater}", f"{100 * left:+.1f} points") for rater, left in without.items()]
    return []
