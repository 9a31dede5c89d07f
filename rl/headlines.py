"""The one figure of an evaluation that leads: of the kind of evidence that carries the comparison. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.evidence_kinds import CORRECTIONS, LABELS, OUTCOMES, PAIRS, REWARDS, TESTS

TITLES = {
    PAIRS: "Preference accuracy",
    LABELS: "Concordance with ratings",
    CORRECTIONS: "Agreement with what people wrote",
    TESTS: "Tests passed",
    OUTCOMES: "Concordance with outcomes",
    REWARDS: "Reward of its answers",
}
"""Kind of evidence -> what its figure is called."""

EXPLANATIONS = {
    PAIRS: "share of held-out pairs where the preferred answer is held more likely",
    LABELS: (
        "how often it moved probability towards the better rated of two held-out answers; 50 % is a coin, and where "
        "whom it is compared with stands"
    ),
    CORRECTIONS: "how its answers agree with held-out answers that people wrote",
    TESTS: "share of held-out prompts whose tests its answers pass",
    OUTCOMES: "how often it moved probability towards the one of two held-out answers that earned more; 50 % is a coin",
    REWARDS: "mean reward of its answers to held-out prompts",
}
"""Kind of evidence -> what its figure means."""


def headline(figures: Mapping[str, Any]) -> dict[str, Any] | None:
    """{"kind", "title", "unit", "value", "low", "high", "n", "against": {...}} out of an evaluation's figures; None
    where nothing was judged. unit: `points` for a share in [0, 1], else the unit of the figure."""
    kind = figures.get("carried_by", PAIRS)
    comparison = figures.get("comparison") or {}
    found = (figures.get("evidence") or {}).get(kind, {})
    against: Mapping[str, Any] | None
    if kind == PAIRS:
        figure, against = figures.get("preference_accuracy"), comparison.get("preference_accuracy")
    elif kind in (LABELS, OUTCOMES):
        figure, against = found.get("concordance"), {"value": 0.5} if comparison else None
    else:
        figure = found.get("own")
        against = {"value": found["against_value"]} if "against_value" in found else None
    if not isinstance(figure, Mapping) or figure.get("value") is None:
        return None
    return {
        "kind": kind,
        "title": TITLES[kind],
        "unit": found.get("unit", "points"),
        **figure,
        **({"against": dict(against)} if against else {}),
    }
