"""The off-policy estimate of a policy as its page shows it, from its newest evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rl.charts.forest import Forest, ForestLine, forest_of
from rl.models import Evaluation

METHODS = {
    "doubly_robust": "doubly robust",
    "snips": "self-normalised",
    "ips": "inverse propensity",
    "clipped_ips": "clipped",
}
"""Estimator -> what the page calls it; the first is the one that the gate asks."""


@dataclass(frozen=True)
class OffPolicySummary:
    """Either why nothing can be said, or the estimates, drawn, with what they rest on."""

    refusal: str = ""
    forest: Forest | None = None
    decisions: int = 0
    mean_reward: str = ""
    ess: str = ""
    max_weight: str = ""
    difference: str = ""
    against: str = ""
    warnings: tuple[str, ...] = ()


def off_policy_summary(evaluations: Iterable[Evaluation]) -> OffPolicySummary | None:
    """Of the newest evaluation that asked the log; None where none did."""
    for evaluation in evaluations:
        found = evaluation.figures.get("off_policy")
        if isinstance(found, dict) and evaluation.split != "file":  # a file is not asked what the log says
            return _summary(found, evaluation.against)
    return None


def _summary(found: dict[str, Any], against: str) -> OffPolicySummary:
    if "refused" in found:
        return OffPolicySummary(refusal=str(found["refused"]))
    lines = [_line(title, found[name]) for name, title in METHODS.items() if name in found]
    if other := found.get("against"):
        lines.append(_line(against or "the other", other["doubly_robust"], "level"))
    overlap, difference = found["overlap"], found.get("difference")
    return OffPolicySummary(
        forest=forest_of("Estimated reward", lines, lambda v: f"{v:.4g}", zero=False, share=True),
        decisions=int(found["decisions"]),
        mean_reward=f"{found['logged']:.3f}",
        ess=f"{overlap['ess']:,.0f}",
        max_weight=f"{overlap['max_weight']:.3g}",
        difference=f"{difference['value']:+.3f} [{difference['low']:+.3f} to {difference['high']:+.3f}]"
        if difference
        else "",
        against=against,
        warnings=tuple(overlap["warnings"]),
    )


def _line(label: str, figure: dict[str, float], state: str = "") -> ForestLine:
    words = f"{figure['value']:.3f} [{figure['low']:.3f} to {figure['high']:.3f}]"
    return ForestLine(label, words, figure["value"], figure["low"], figure["high"], state)
