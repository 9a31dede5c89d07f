"""A decision's reward over time: known at once, reported later, known in the end. Pure."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rl.agents.base import HORIZONS, OutcomeScale, RewardFacts
from rl.rewards.base import (
    RAW_HIGH,
    RAW_LOW,
    Component,
    RewardEngine,
    RewardFunction,
    RewardPart,
    RewardSample,
    combine,
    reward_normalise,
)
from rl.rewards.traces import TaskCompletionReward, share_to_raw

FORM = ("agent", "format", "syntax", "efficiency")
"""Reward functions of validity and cost, not of results."""

PREFERENCES = {"preferred": 1.0, "not preferred": 0.0, "tie": 0.5, "both bad": 0.0}
"""Result of a comparison for a decision -> its value in [0, 1]."""


HUMAN_PARTS = ("ratings", "comparisons")
"""Parts of the delayed reward that come from people."""


@dataclass(frozen=True)
class DecisionFeedback:
    """Feedback and outcomes of a decision so far."""

    verdicts: Sequence[float] = ()
    """Current ratings, each in [0, 1]."""
    comparisons: Sequence[str] = ()
    """Current comparisons by their result, keys of PREFERENCES."""
    outcomes: Mapping[str, float] = field(default_factory=dict)
    """Outcome name -> newest value."""
    simulated: bool = False
    """True if a simulated rater contributed."""


@dataclass(frozen=True)
class HorizonPlan:
    """How an agent's decisions are rewarded."""

    functions: Sequence[RewardFunction]
    """Reward functions of the immediate horizon."""
    facts: RewardFacts

    def __post_init__(self) -> None:
        weights = weights_checked(self.facts.weights)
        if not any(weights.values()):
            raise ValueError("at least one of the weights must be above 0")


class HorizonReward(TypedDict):
    """Reward of one horizon, as it is stored."""

    raw: float | None
    weight: float
    parts: dict[str, RewardPart]


@dataclass(frozen=True)
class RewardBreakdown:
    """A reward with all its parts."""

    raw: float | None
    """In [-2, 2]; None without any evidence."""
    horizons: Mapping[str, float | None]
    """Each of HORIZONS -> its raw value, None if unknown."""
    components: Mapping[str, HorizonReward]
    """Each of HORIZONS -> {"raw", "weight", "parts": {name: {"raw", "weight", "detail"}}}."""
    simulated: bool = False

    @property
    def measured(self) -> bool:
        """True if it holds more than people's feedback and the answer's form: an outcome, a trace, a named reward
        function. Only such a reward can replace a rating."""
        return any(
            name not in (*FORM, *HUMAN_PARTS)
            for horizon in self.components.values()
            for name in horizon["parts"]
        )

    @property
    def value(self) -> float | None:
        """In [0, 1]."""
        return None if self.raw is None else reward_normalise(self.raw)

    @property
    def basis(self) -> str:
        """SHA-256 of its numbers without explanations, to detect changes."""
        numbers = [
            [name, horizon["raw"], horizon["weight"]]
            + [[part, found["raw"], found["weight"]] for part, found in sorted(horizon["parts"].items())]
            for name, horizon in self.components.items()
        ]
        return hashlib.sha256(json.dumps([self.raw, self.simulated, numbers]).encode()).hexdigest()


def weights_checked(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights of all HORIZONS, 0 for missing ones. Raises ValueError."""
    unknown = set(weights) - set(HORIZONS)
    if unknown:
        raise ValueError(f"weights are of {', '.join(HORIZONS)}; found {', '.join(sorted(unknown))}")
    for name, weight in weights.items():
        if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight of {name} must be at least 0, found {weight!r}")
    return {name: float(weights.get(name, 0.0)) for name in HORIZONS}


def outcomes_parsed(given: object) -> dict[str, OutcomeScale]:
    """Outcome scales as an operator writes them: `{"ticket_reopened": {"good": 0, "bad": 1, "horizon": "delayed"}}`.
    Raises ValueError."""
    if not isinstance(given, Mapping):
        raise ValueError(f'expected {{"outcome": {{"good": 0, "bad": 1}}}}, found {given!r:.80}')
    scales = {}
    for name, scale in given.items():
        if not isinstance(scale, Mapping) or not {"good", "bad"} <= set(scale) <= {"good", "bad", "horizon"}:
            raise ValueError(
                f'{name}: expected {{"good": 0, "bad": 1, "horizon": "delayed"}}, found {scale!r:.80}'
            )
        try:
            scales[str(name)] = OutcomeScale(
                **{**scale, "good": float(scale["good"]), "bad": float(scale["bad"])}
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error
    return scales


def rewards_over_time(
    plan: HorizonPlan, samples: Sequence[RewardSample], known: Sequence[DecisionFeedback]
) -> list[RewardBreakdown]:
    """The rewards of decisions, in order.

    immediate: the plan's functions by weight. delayed: mean of the average rating, the average comparison and each
    delayed outcome. strategic: mean of the share of completed tasks and each strategic outcome. The whole is the
    weighted mean of the known horizons. If tasks failed and there is no delayed feedback, the immediate reward is
    capped at 0: a valid answer is no merit of a failed run.
    """
    weights = weights_checked(plan.facts.weights)
    at_once: list[dict[str, RewardPart]] = [{} for _ in samples]
    means: list[float | None] = [None] * len(samples)
    if plan.functions:
        engine = RewardEngine([Component(f, plan.facts.functions.get(f.name, 1.0)) for f in plan.functions])
        for i, rewarded in enumerate(engine.reward(samples)):
            at_once[i], means[i] = rewarded.components, rewarded.raw
    completed = TaskCompletionReward().score(samples)
    breakdowns = []
    for i, feedback in enumerate(known):
        later = _human_parts(feedback) | _outcome_details(feedback, plan.facts.outcomes, "delayed")
        strategic = {"task_completion": _part(completed[i].raw, completed[i].detail)}
        strategic |= _outcome_details(feedback, plan.facts.outcomes, "strategic")
        horizons = {"immediate": means[i], "delayed": _mean(later), "strategic": _mean(strategic)}
        at_once_raw, ended = horizons["immediate"], completed[i].raw
        if at_once_raw is not None and ended is not None and ended < 0 and horizons["delayed"] is None:
            horizons["immediate"] = min(at_once_raw, 0.0)
        parts = {"immediate": at_once[i], "delayed": later, "strategic": strategic}
        raw = combine(horizons, weights)
        breakdowns.append(
            RewardBreakdown(
                raw=None if raw is None else min(RAW_HIGH, max(RAW_LOW, raw)),
                horizons=horizons,
                components={
                    name: {
                        "raw": horizons[name],
                        "weight": weights[name],
                        "parts": {k: v for k, v in parts[name].items() if v["raw"] is not None},
                    }
                    for name in HORIZONS
                },
                simulated=feedback.simulated,
            )
        )
    return breakdowns


def _human_parts(known: DecisionFeedback) -> dict[str, RewardPart]:
    parts = {}
    for name, values in (
        ("ratings", list(known.verdicts)),
        ("comparisons", [PREFERENCES[ended] for ended in known.comparisons]),
    ):
        if values:
            mean = math.fsum(values) / len(values)
            parts[name] = _part(share_to_raw(mean), {"n": len(values), "mean": round(mean, 4)})
    return parts


def _outcome_details(
    feedback: DecisionFeedback, scales: Mapping[str, OutcomeScale], horizon: str
) -> dict[str, RewardPart]:
    return {
        name: _part(share_to_raw(scale.share(feedback.outcomes[name])), {"measured": feedback.outcomes[name]})
        for name, scale in sorted(scales.items())
        if scale.horizon == horizon and name in feedback.outcomes
    }


def _part(raw: float | None, detail: Mapping[str, object]) -> RewardPart:
    return {"raw": raw, "weight": 1.0, "detail": dict(detail)}


def _mean(parts: Mapping[str, RewardPart]) -> float | None:
    known = [part["raw"] for part in parts.values() if part["raw"] is not None]
    return math.fsum(known) / len(known) if known else None
