"""Rewards by name, as a recipe and `--reward` give them: reward functions, and reward models as `model:FOLDER`."""

from __future__ import annotations

from rl.rewards.base import RewardFunction
from rl.rewards.named import rewards_named
from rl.training.ppo.judge import Scorer
from rl.training.result import TrainingRefused


def rewards_of(specs: str) -> tuple[list[RewardFunction], list[Scorer]]:
    """The reward functions and reward models of specs separated by commas, in their order.

    Raises TrainingRefused for a name nobody knows, and for a model that cannot be used.
    """
    names = [name for name in (spec.strip() for spec in specs.split(",")) if name]
    models = [name.removeprefix("model:") for name in names if name.startswith("model:")]
    others = [name for name in names if not name.startswith("model:")]
    functions: list[RewardFunction] = []
    if others:
        try:
            # whoever names code_execution here means it; the commands ask the settings first
            functions = rewards_named(others, code_execution=True)
        except ValueError as error:
            raise TrainingRefused(str(error)) from error
    if models:
        raise TrainingRefused("reward models are not built yet")
    return functions, []
