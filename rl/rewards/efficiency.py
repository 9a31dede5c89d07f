"""Reward for doing it with little: tokens and tool calls against a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.rewards.base import RAW_HIGH, RAW_LOW, RewardSample, RewardValue
from rl.rewards.traces import steps_of


@dataclass(frozen=True)
class EfficiencyReward:
    """2 up to half the budget, 0 at the budget, -2 at one and a half times it and beyond, straight in between.

    Tokens are `facts["tokens"]` (else a quarter of the characters), calls are the trace's tool calls; the worse of the
    two counts.
    """

    token_budget: int = 256
    call_budget: int = 10
    name: str = "efficiency"

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.call_budget < 1:
            raise ValueError("a budget is at least 1")

    def score(self, samples: Sequence[RewardSample]) -> list[RewardValue]:
        values = []
        for sample in samples:
            told = sample.facts.get("tokens")
            tokens = float(told) if isinstance(told, (int, float)) else len(sample.response) / 4
            calls = len(steps_of(sample, "tool_call"))
            used = max(tokens / self.token_budget, calls / self.call_budget)
            raw = min(RAW_HIGH, max(RAW_LOW, RAW_HIGH - 4 * (used - 0.5)))
            values.append(RewardValue(raw, {"tokens": tokens, "calls": calls, "of_budget": round(used, 4)}))
        return values
