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


def baseline_words(figures: Mapping[str, Any]) -> str:
    """What a simple classifier of the same training rows gets on the same evidence, in a sentence; empty where an
    evaluation has none."""
    found = figures.get("baseline") or {}
    if "refused" in found:
        return f"No simple classifier beside it: {found['refused']}."
    leading = headline(found)
    if leading is None or "trained_on" not in found:
        return ""
    rows = found["trained_on"]["rows"]
    words = (
        f"A simple classifier of the same {rows:,} training rows gets {_amount(leading)} "
        f"{TITLES[leading['kind']].lower()}"
    )
    if (own := headline(found.get("policy") or {})) is not None:
        words += f", the policy by the same measure {_amount(own)}"
    reward, apart = found.get("average_reward"), found.get("average_reward_difference")
    if reward and reward.get("low") is not None and apart and apart.get("low") is not None:
        words += (
            f". Its answers are worth {reward['value']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}] on average (1 "
            f"liked, 0.5 not rated, 0 disliked), the policy's {apart['value']:+.3f} from that "
            f"[{apart['low']:+.3f}, {apart['high']:+.3f}]"
        )
    return f"{words}."


def _amount(found: Mapping[str, Any]) -> str:
    scale, form = (100.0, ".1f") if found["unit"] == "points" else (1.0, ".3f")
    unit = " %" if found["unit"] == "points" else ""
    value = f"{format(scale * found['value'], form)}{unit}"
    if found.get("low") is None:
        return value
    return f"{value} [{format(scale * found['low'], form)}, {format(scale * found['high'], form)}]"
