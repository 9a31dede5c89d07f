"""A recipe by its method and the name of its preset, with an operator's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.recipes.base import RecipeError
from rl.recipes.dpo import DPO_CONFIG
from rl.recipes.grpo import GRPO_CONFIG
from rl.recipes.kto import KTO_CONFIG
from rl.recipes.linear import LINEAR_CONFIG
from rl.recipes.ppo import PPO_CONFIG
from rl.recipes.reward_model import REWARD_MODEL_CONFIG
from rl.recipes.sft import SFT_CONFIG

RECIPES: dict[str, Mapping[str, Any]] = {
    "dpo": DPO_CONFIG,
    "kto": KTO_CONFIG,
    "sft": SFT_CONFIG,
    "reward_model": REWARD_MODEL_CONFIG,
    "ppo": PPO_CONFIG,
    "grpo": GRPO_CONFIG,
    "linear": LINEAR_CONFIG,
}
"""Method -> its presets, each a BasicRecipe of the method's own class."""


def recipe_named(method: str, preset: str, overrides: Mapping[str, Any] | None = None) -> Any:
    """The preset of a method, with an operator's overrides (the method's section of RATCHET_CONFIG) laid over it.

    Raises RecipeError for a method, preset or knob that does not exist, naming those that do.
    """
    if method not in RECIPES:
        raise RecipeError(f"no method {method!r}; there are {', '.join(RECIPES)}")
    presets = RECIPES[method]
    if preset not in presets:
        raise RecipeError(f"no preset {preset!r}; there are {', '.join(presets)}")
    return presets[preset].with_knobs(**(overrides or {}))
