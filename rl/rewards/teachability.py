"""Rewards that cannot teach, told before a model is loaded: what applies to no answer, or to all valid ones alike.

A reward function may have two methods beside `score`: `inapplicable(sample)`, why no sampled answer to the sample's
prompt can be judged, and `constant(sample)`, why every valid answer to it earns the same; both empty where that is not
so. Functions without them are tried on sampled answers (`rl.training.probe`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl.rewards.base import RewardFunction
from rl.rewards.rows import row_sample

INSIST = "--set allow_constant_reward=true trains anyway"
"""Hint for an operator who means it."""


def inapplicable_reason(function: RewardFunction, row: Mapping[str, Any], agent: str) -> str:
    """Reason why a function judges no sampled answer to a row; empty where it may."""
    check = getattr(function, "inapplicable", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def constant_reason(function: RewardFunction, row: Mapping[str, Any], agent: str) -> str:
    """Reason why a function gives every valid answer to a row the same; empty where it may tell them apart."""
    check = getattr(function, "constant", None)
    return str(check(row_sample(row, "", agent))) if callable(check) else ""


def teaching_fault(
    functions: Sequence[RewardFunction], rows: Sequence[Mapping[str, Any]], agent: str
) -> tuple[str, bool]:
    """(Why none of the functions can teach on these rows, whether an operator may insist); ("", False) where one may.

    A function teaches where on at least one row it applies and may tell valid answers apart.
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
