"""Rewards of answers to a dataset's rows, shared by training and evaluation. Pure.

A row holds `prompt` (chat messages) and, if known, `state` and `facts`: what a verifiable reward needs (`tests`,
`answer`, ...). To judge answers:

    rewards = rows_rewarded(rewards_named(["answer"]), rows, answers, agent="tutor")
    [reward.passed for reward in rewards]       # True, False, or None if no function applies

A reward function may have two more methods: `inapplicable(sample)`, why no sampled answer to its prompt can be judged,
and `constant(sample)`, why every valid answer earns the same; both return "" otherwise. They detect rewards that cannot
teach before a model is loaded. Functions without them are tried on sampled answers (`rl.training.rewarding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl.agents.base import Row
from rl.rewards import answers as right_answers
from rl.rewards import code_tests
from rl.rewards.base import (
    RAW_HIGH,
    Component,
    RewardEngine,
    RewardFunction,
    RewardPart,
    RewardSample,
    reward_normalise,
)
from rl.rewards.formats import reward_with_validity

FACTS = "facts"
"""Key of facts in a row and in a decision's metadata."""

COLUMNS = (*code_tests.COLUMNS, *right_answers.COLUMNS)
"""Facts that may also be outside `facts` in a decision's metadata, as imports keep them."""


@dataclass(frozen=True)
class RowReward:
    """Reward of an answer to a row."""

    raw: float | None
    """In [-2, 2]: the mean of the functions that apply, -2 for an invalid answer; None if none applies."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """Function -> {"raw", "weight", "detail"}."""

    @property
    def value(self) -> float | None:
        """In [0, 1]."""
        return None if self.raw is None else reward_normalise(self.raw)

    @property
    def passed(self) -> bool | None:
        """True if it earned the maximum (all tests, the right answer); None if no function applies."""
        return None if self.raw is None else self.raw >= RAW_HIGH - 1e-9


def row_sample(row: Row, response: str, agent: str, **more: Any) -> RewardSample:
    """An answer to a row for reward functions; `more`: facts of the answer (tokens, ended)."""
    facts = {**(row.get(FACTS) or {}), "state": row.get("state"), **more}
    return RewardSample(prompt=row["prompt"], response=response, agent=agent, facts=facts)


def rows_rewarded(
    functions: Sequence[RewardFunction],
    rows: Sequence[Row],
    answers: Sequence[str],
    *,
    agent: str,
) -> list[RowReward]:
    """Reward of each answer to its row, in order. Runs no model, and no code outside the sandbox."""
    engine = RewardEngine([Component(function) for function in functions])
    samples = [row_sample(row, answer, agent) for row, answer in zip(rows, answers, strict=True)]
    return [
        RowReward(
            None if rewarded.raw is None else reward_with_validity(rewarded.raw, sample), rewarded.components
        )
        for rewarded, sample in zip(engine.reward(samples), samples, strict=True)
    ]


def facts_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in a decision's metadata: those under `facts`, and columns of tests and answers beside it."""
    found = {name: metadata[name] for name in COLUMNS if metadata.get(name) not in (None, "")}
    held = metadata.get(FACTS)
    return {**found, **held} if isinstance(held, Mapping) else found


# --- Rewards that cannot teach ---

INSIST = "--set allow_constant_reward=true trains anyway"
"""Hint to override the check."""


def inapplicable_reason(function: RewardFunction, row: Row, agent: str) -> str:
    """Why a function cannot judge a sampled answer to a row; empty if it may."""
    check = getattr(function, "inapplicable", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def constant_reason(function: RewardFunction, row: Row, agent: str) -> str:
    """Why a function gives every valid answer to a row the same; empty if it may differ."""
    check = getattr(function, "constant", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def teaching_fault(functions: Sequence[RewardFunction], rows: Sequence[Row], agent: str) -> tuple[str, bool]:
    """(why none of the functions can teach on these rows, whether an operator may override); ("", False) if one can.

    A function can teach if on at least one row it applies and may tell valid answers apart.
    """
    never: list[str] = []
    constants: list[str] = []
    for function in functions:
        applies = [row for row in rows if not (why := inapplicable_reason(function, row, agent))]
        if not applies:
            never.append(f"{function.name} applies to none of {len(rows)} prompts: {why}")
            continue
        reasons = [constant_reason(function, row, agent) for row in applies]
        if not all(reasons):
            return "", False
        constants.append(f"{function.name} is constant over valid answers: {reasons[0]}")
    text = "; ".join([*constants, *never])
    if not constants:
        return (
            (
                f"no reward applies to sampled answers: {text}. Give prompts that it applies to, or another "
                "--reward"
            ),
            False,
        )
    return (
        f"{text}. Such a reward teaches the answer format only: give one that tells right from wrong "
        "(answer, code_execution, learned, model:RUN, your own function), or prompts whose right answer is "
        f"known; {INSIST}"
    ), True
