"""Rewards that an order names, asked before its model is loaded whether they can teach on its prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings

from rl.models.runs import RunRefused
from rl.rewards.catalogue import opened_in_training, rewards_named
from rl.rewards.teachability import teaching_fault

TEACHING_ROWS = 200
"""Prompts that rewards are looked at on."""


def teaching_check(knobs: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], agent: str) -> None:
    """Raises RunRefused for rewards that cannot tell one valid answer from another on any of the prompts.

    knobs: of the recipe, `reward` and `allow_constant_reward` among them.
    """
    specs = [spec.strip() for spec in str(knobs["reward"]).split(",") if spec.strip()]
    if any(opened_in_training(spec) for spec in specs):
        return  # what a trained model says is only known with the model
    functions = rewards_named(specs, code_execution=settings.ENABLE_CODE_EXECUTION)
    fault, may_insist = teaching_fault(functions, rows, agent)
    if fault and not (may_insist and knobs["allow_constant_reward"]):
        raise RunRefused(fault)
