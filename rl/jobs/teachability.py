"""Teachability of a run by its figures: whether training can change what a policy answers, before and after. Pure."""

from __future__ import annotations

import math

from rl.recipes import Recipe, RewardModelRecipe
from rl.recipes.base import DATASET_KINDS

STILL = 2e-3
"""Sum of the learning rates of all steps, times the LoRA scale, up to which at most one answer in forty changes.

Adam moves a weight by about the learning rate with each step, and the adapter's second matrix begins at zero: so this
sum bounds what a run can do, whatever it is fed. Measured by `benchmarks/teaching.py`; see docs/methods.md."""

MOST_STEPS = 1_000_000
"""Optimiser steps that are never advised: at a learning rate that asks for more, the rate is what to raise."""

FEW_ROWS = 30
"""Training rows below which a policy learns these rows rather than what they have in common."""


def rate_sum(recipe: Recipe, steps: int) -> float:
    """The learning rates of so many optimiser steps, added up over warm-up and decay."""
    warm = math.ceil(steps * recipe.warmup_ratio) if recipe.lr_scheduler != "constant" else 0
    rest = steps - warm
    # sums of arithmetic series; of the half wave of a cosine all terms but the first cancel
    rising = (warm - 1) / 2 if warm else 0.0
    falling = (rest + 1) / 2 if rest and recipe.lr_scheduler in ("cosine", "linear") else float(rest)
    return recipe.learning_rate * (rising + falling)


def optimiser_steps(recipe: Recipe, rows: int) -> int:
    """Updates of the weights; PPO makes several of each of its steps."""
    steps = recipe.steps(rows)
    knobs = recipe.as_dict()
    if "ppo_epochs" in knobs:
        return steps * int(knobs["ppo_epochs"]) * int(knobs["batch_size"]) // int(knobs["mini_batch_size"])
    return steps


def teachability_warning(recipe: Recipe, rows: int, kind: str) -> str:
    """Reason why such a training teaches nothing, or little, with what to do; empty where nothing speaks against it.

    kind: of the dataset, one of DATASET_KINDS.
    """
    named = f"{rows:,} {DATASET_KINDS[kind]}"
    if isinstance(recipe, RewardModelRecipe) and recipe.is_linear:
        return _few_rows_warning(named, rows, "model")
    steps = optimiser_steps(recipe, rows)
    subject = "how it scores answers" if isinstance(recipe, RewardModelRecipe) else "what the policy answers"
    knobs = recipe.as_dict()
    scale = float(knobs["lora_alpha"]) / float(knobs["lora_r"])
    moved = rate_sum(recipe, steps) * scale
    amount = f"{named} and {steps:,} optimiser step{'' if steps == 1 else 's'}"
    if moved < STILL:
        more = _steps_needed(recipe, steps, scale)
        passes = math.ceil(float(knobs["epochs"]) * more / max(steps, 1))
        fewer_rows = max(FEW_ROWS - rows, 0)
        rate = f"rate about {math.ceil(fewer_rows * 1.7 / 10) * 10} more prompts, or " if fewer_rows else ""
        longer = f"--max-steps {more}" if knobs["max_steps"] > 0 else f"--epochs {passes}"
        longer = longer if more < MOST_STEPS else "a higher --learning-rate"
        return (
            f"{amount}: too little training to change {subject} (measured: at most 1 in 40); {rate}give "
            f"{longer}"
        )
    return _few_rows_warning(amount, rows, "policy")


def _few_rows_warning(amount: str, rows: int, what: str) -> str:
    if rows >= FEW_ROWS:
        return ""
    return (
        f"{amount}: the {what} may memorise them and generalise little; rate about "
        f"{math.ceil((FEW_ROWS - rows) * 1.7 / 10) * 10} more prompts"
    )


def _steps_needed(recipe: Recipe, steps: int, scale: float) -> int:
    """The fewest steps, an eighth more each time, that may change an answer; at most MOST_STEPS."""
    more = max(steps, 1)
    while rate_sum(recipe, more) * scale < STILL and more < MOST_STEPS:
        more += max(more // 8, 1)
    return more
