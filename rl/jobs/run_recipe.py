"""Recipe of a training: preset, operator's file and the order's knobs, fitted to agent, method and machine."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.bundled_models import is_bundled
from rl.jobs import linear as linear_runs
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.jobs.memory_estimate import memory_estimate
from rl.jobs.method_selection import REWARD_MODEL, method_chosen
from rl.jobs.warm_start import start_resolved
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused
from rl.recipes import Recipe, RewardModelRecipe, recipe_named
from rl.recipes.base import AnswerRecipe
from rl.recipes.methods import METHODS, method_named
from rl.reward_models.specs import rewards_located

if TYPE_CHECKING:
    from rl.training.hardware import Hardware

WHOLE_RATE = 0.1
"""Learning rate of full fine-tuning by a preset's, which is LoRA's: the best rates differ by about ten (Schulman et al.
2025, "LoRA Without Regret")."""

MOST_OF_MEMORY = 0.9
"""Share of a machine's memory that a training may take."""


def recipe_for(order: TrainOrder, hardware: Hardware | None) -> tuple[str, Any]:
    """The preset's name and the recipe: preset, then the RATCHET_CONFIG file, then the order's own knobs. hardware:
    None for a method that trains no adapter."""
    preset = hardware.preset if hardware is not None else "default"
    name = order.config or method_named(order.method).preset(preset)
    configuration = settings.RATCHET_CONFIG.get(order.method) or {}
    knobs = dict(order.knobs)
    if "epochs" in knobs or "epochs" in configuration:
        knobs.setdefault("min_steps", 0)  # who names the passes gets them
    if order.method == REWARD_MODEL:
        knobs = _judge_knobs(order, {*knobs, *configuration}) | knobs
    recipe = recipe_named(order.method, name, settings.RATCHET_CONFIG.get(order.method)).with_knobs(**knobs)
    recipe = _with_lengths(recipe, order.agent, {*knobs, *configuration})
    recipe = _with_general_prompts(recipe, order, {*knobs, *configuration})
    if not method_named(order.method).adapter:
        return name, linear_runs.feedback_resolved(order, recipe)
    if method_named(order.method).rewarded:
        rewards_located(recipe.reward, order.agent)  # refused now rather than when the run has begun
    recipe = start_resolved(order, recipe)
    if (
        recipe.whole
        and hardware is not None
        and not (isinstance(recipe, RewardModelRecipe) and recipe.is_linear)
    ):
        recipe = _with_whole_rates(recipe, {*knobs, *configuration})
        _memory_check(order, recipe, hardware)
    return name, recipe


GENERAL_WEIGHT = 1.0
"""Weight of the general prompts of base models that can do something beside their tasks."""


def _with_general_prompts(recipe: Any, order: TrainOrder, named: Collection[str]) -> Any:
    """The recipe with a rehearsal of general prompts, where nobody named the knob: not of the bundled model."""
    known = isinstance(recipe, AnswerRecipe) and "general_weight" not in named
    if not known or is_bundled(base_model_for(order)):
        return recipe
    return recipe.with_knobs(general_weight=GENERAL_WEIGHT)


def _judge_knobs(order: TrainOrder, named: Collection[str]) -> dict[str, Any]:
    """Objective and architecture that fit the feedback, where nobody named them."""
    if {"objective", "architecture"} <= set(named):
        return {}
    chosen = method_chosen(
        order.agent, REWARD_MODEL, base_model=base_model_for(order), **order.feedback_source
    )
    return {knob: value for knob, value in chosen.knobs.items() if knob not in named}


RATES = ("learning_rate", "value_learning_rate", "warm_up_learning_rate")
"""Knobs that are learning rates of weights; 0 stands for the first."""


def _with_whole_rates(recipe: Recipe, named: Collection[str]) -> Recipe:
    """The recipe with learning rates of full fine-tuning in place of a preset's, but those somebody named."""
    rates = {knob: rate for knob, rate in recipe.as_dict().items() if knob in RATES and knob not in named}
    return recipe.with_knobs(**{knob: rate * WHOLE_RATE for knob, rate in rates.items()})


def _memory_check(order: TrainOrder, recipe: Recipe, hardware: Hardware) -> None:
    """Raises RunRefused for full fine-tuning of a base model that the machine has no memory for, one row at a time."""
    base_model = base_model_for(order)
    least = recipe.as_dict() | {"batch_size": 1, "mini_batch_size": 1, "gradient_checkpointing": True}
    needed = memory_estimate(base_model, least, 2 if METHODS[order.method].kind in ("pairs", "labels") else 1)
    if needed.gb is not None and needed.gb > MOST_OF_MEMORY * hardware.memory_gb:
        raise RunRefused(
            f"--lora-r 0 trains every weight of {base_model}, which takes {needed.gb:g} GB ({needed.source}); this "
            f"machine has {hardware.memory_gb:g} GB, of which a tenth is left to others. Train a LoRA adapter "
            f"(--lora-r 16), or a smaller base model{_value_shared(recipe)}"
        )


def _value_shared(recipe: Recipe) -> str:
    """Advice where a value of its own takes a second copy of the weights; empty where none does."""
    if recipe.trained_copies == 1:
        return ""
    return "; --set value_backbone=shared saves the second trained copy, that of the value"


def _with_lengths(recipe: Any, agent: str, named: Collection[str]) -> Any:
    """The recipe with lengths for prompts and answers of an agent that says how long its are, in knobs nobody named."""
    known = agent_served(agent)
    if known.max_prompt_tokens is None or not isinstance(recipe, Recipe):
        return recipe
    room = {
        "max_length": known.max_prompt_tokens + known.max_new_tokens,
        "max_new_tokens": known.max_new_tokens,
    }
    knobs = recipe.as_dict()
    return recipe.with_knobs(
        **{knob: n for knob, n in room.items() if knob not in named and knobs.get(knob, n) < n}
    )
