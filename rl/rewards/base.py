"""Reward functions: a sample in, a raw value in [-2, 2] and its detail out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

RAW_LOW, RAW_HIGH = -2.0, 2.0
"""Range of a raw reward. The stored reward is its position in that range, in [0, 1]."""


@dataclass(frozen=True)
class RewardSample:
    """One response to reward.

    `prompt`: chat messages (role, content). `facts`: what else is known of the decision, such as state, candidates,
    action, trace, outcomes, tokens. A function reads what it needs and reports what is missing.
    """

    prompt: Sequence[Mapping[str, Any]]
    response: str
    agent: str
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardValue:
    """A raw reward in [-2, 2], or None if the function does not apply; `detail` says why."""

    raw: float | None
    detail: Mapping[str, Any] = field(default_factory=dict)

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
