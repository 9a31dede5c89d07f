"""Reward functions: a sample in, a raw value in [-2, 2] and its detail out. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from rl.agents import get_agent
from rl.agents.base import Agent, Row

RAW_LOW, RAW_HIGH = -2.0, 2.0
"""Range of a raw reward. The stored reward is its position in that range, in [0, 1]."""


@dataclass(frozen=True)
class RewardSample:
    """One response to reward.

    `prompt`: chat messages (role, content). `facts`: what else is known of the decision, such as state, candidates,
    action, trace, outcomes, tokens. A function reads what it needs and reports what is missing.
    """

    prompt: Sequence[Row]
    response: str
    agent: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def definition(self) -> Agent:
        return get_agent(self.agent)


@dataclass(frozen=True)
class RewardValue:
    """A raw reward in [-2, 2], or None if the function does not apply; `detail` says why."""

    raw: float | None
    detail: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.raw is not None and not RAW_LOW <= self.raw <= RAW_HIGH:
            raise ValueError(f"a raw reward lies in [{RAW_LOW:g}, {RAW_HIGH:g}], found {self.raw!r}")


class RewardFunction(Protocol):
    """Scores samples in batches, one value per sample, in order."""

    @property
    def name(self) -> str:
        """Name in reports and metrics."""
        ...

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]: ...


def reward_normalise(raw: float) -> float:
    """A raw reward in [0, 1]: -2 is 0, 0 is 0.5, 2 is 1."""
    return (raw - RAW_LOW) / (RAW_HIGH - RAW_LOW)


# --- Combines reward functions ---


class RewardPart(TypedDict):
    """Value of one reward function, as it is stored."""

    raw: float | None
    """In [-2, 2]; None if it does not apply."""
    weight: float
    detail: Mapping[str, object]


@dataclass(frozen=True)
class Component:
    """A reward function with its weight; `binary`: 2 above `threshold`, else -2."""

    function: RewardFunction
    weight: float = 1.0
    binary: bool = False
    threshold: float = 0.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"the weight of {self.function.name} must be above 0, found {self.weight!r}")


@dataclass(frozen=True)
class RewardResult:
    """Reward of a sample: the weighted mean of the functions that apply, and each part."""

    raw: float | None
    """In [-2, 2]; None if no function applies."""
    components: dict[str, RewardPart] = field(default_factory=dict)
    """Name -> {"raw", "weight", "detail"}; raw is None if it does not apply."""

    @property
    def value(self) -> float | None:
        """In [0, 1]."""
        return None if self.raw is None else reward_normalise(self.raw)


class RewardEngine:
    """A weighted mean of reward functions over those that apply to a sample."""

    def __init__(self, components: Sequence[Component]) -> None:
        names = [component.function.name for component in components]
        if not components:
            raise ValueError("an engine needs at least one reward function")
        if len(set(names)) != len(names):
            raise ValueError(f"each reward function has a name of its own, found {', '.join(names)}")
        self.components = tuple(components)

    def reward(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result per sample, in order."""
        columns = [component.function.score(samples) for component in self.components]
        for component, column in zip(self.components, columns, strict=True):
            if len(column) != len(samples):
                raise ValueError(
                    f"reward {component.function.name} gave {len(column)} values for {len(samples)} samples"
                )
        return [self._sum([column[i] for column in columns]) for i in range(len(samples))]

    def _sum(self, values: Sequence[RewardValue]) -> RewardResult:
        parts: dict[str, RewardPart] = {}
        total = weight = 0.0
        for component, value in zip(self.components, values, strict=True):
            raw = value.raw
            if raw is not None and component.binary:
                raw = RAW_HIGH if raw > component.threshold else RAW_LOW
            if raw is not None:
                total += component.weight * raw
                weight += component.weight
            parts[component.function.name] = {
                "raw": raw,
                "weight": component.weight,
                "detail": dict(value.detail),
            }
        return RewardResult(total / weight if weight else None, parts)


def combine(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Weighted mean of the known horizons (immediate, delayed, strategic), each raw in [-2, 2]."""
    known = {name: raw for name, raw in parts.items() if raw is not None and weights.get(name, 0.0) > 0}
    total = math.fsum(weights[name] for name in known)
    return math.fsum(weights[name] * raw for name, raw in known.items()) / total if total else None
