"""Rows of a dataset and answers to them, as reward functions see them. Pure: what trains and what judges share it.

A row holds `prompt` (chat messages), and where they are known `state` and `facts`: what a verifiable reward needs
(`tests`, `answer`, ...). To judge answers:

    rewards = rows_rewarded(rewards_named(["answer"]), rows, answers, agent="tutor")
    [reward.passed for reward in rewards]       # True, False, or None where no function applies to the row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.rewards import answers as right_answers
from rl.rewards import code_tests
from rl.rewards.base import RAW_HIGH, RewardFunction, RewardSample, reward_normalise
from rl.rewards.engine import Component, RewardEngine
from rl.rewards.validity import reward_with_validity

FACTS = "facts"
"""Key of a row and of a decision's metadata under which its facts stand."""

COLUMNS = (*code_tests.COLUMNS, *right_answers.COLUMNS)
"""Facts that may also stand beside `facts` in a decision's metadata, as imports keep them."""


@dataclass(frozen=True)
class RowReward:
    """Reward of an answer to a row."""

    raw: float | None
    """In [-2, 2], the plain mean of the functions that apply, -2 for an answer its agent cannot act on; None where no
    function applies."""
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Function -> {"raw", "weight", "detail"}."""

    @property
    def value(self) -> float | None:
        """In [0, 1]."""
        return None if self.raw is None else reward_normalise(self.raw)

    @property
    def passed(self) -> bool | None:
        """True if it earned all there is (every test passed, the right answer); None where no function
        applies."""
        return None if self.raw is None else self.raw >= RAW_HIGH - 1e-9


def row_sample(row: Mapping[str, Any], response: str, agent: str, **more: Any) -> RewardSample:
    """An answer to a row as reward functions take it; `more`: facts of the answer (tokens, ended)."""
    facts = {**(row.get(FACTS) or {}), "state": row.get("state"), **more}
    return RewardSample(prompt=row["prompt"], response=response, agent=agent, facts=facts)


def rows_rewarded(
    functions: Sequence[RewardFunction],
    rows: Sequence[Mapping[str, Any]],
    answers: Sequence[str],
    *,
    agent: str,
) -> list[RowReward]:
    """Reward of each answer to the row of its place, in order. Runs no model, and no code outside the
    sandbox."""
    engine = RewardEngine([Component(function) for function in functions])
    samples = [row_sample(row, answer, agent) for row, answer in zip(rows, answers, strict=True)]
    return [
        RowReward(
            None if rewarded.raw is None else reward_with_validity(rewarded.raw, sample), rewarded.components
        )
        for rewarded, sample in zip(engine.reward(samples), samples, strict=True)
    ]


def facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The facts among a decision's metadata: what stands under `facts`, and columns of tests and answers beside it."""
    found = {name: metadata[name] for name in COLUMNS if metadata.get(name) not in (None, "")}
    held = metadata.get(FACTS)
    return {**found, **held} if isinstance(held, Mapping) else found
