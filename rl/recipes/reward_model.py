"""Hyperparameters of a reward model, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from rl.recipes.base import HIGH_QUALITY, SMALL_GPU, Method, Recipe, RecipeError

LINEAR, CAUSAL, AUTO = "linear", "causal", "auto"
"""Architectures: without a base model; a score head on a base model; the better of both on the eval split."""


FACTS = "reward_model.json"
"""File beside a reward model's weights: objective, architecture, base, scale of its scores."""


@dataclass(frozen=True)
class RewardModelRecipe(Recipe):
    """A model that scores responses."""

    makes_policy: ClassVar[bool] = False
    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 36}

    objective: str = "pairwise"
    """`pairwise` ranks (Bradley-Terry), `regression` predicts scores in [0, 1], `binary` thumbs."""
    architecture: str = CAUSAL
    """`causal`: a score head on the base model. `encoder`: an encoder such as DeBERTa (`--model`). `linear`:
    regularised logistic regression on features of prompt and response (`rl.linear`), fitted in seconds, for answers
    that are a choice or JSON. `auto` trains `linear` and `causal` and keeps the one that ranks the eval split better.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("objective", ("pairwise", "regression", "binary"))
        self._one_of("architecture", (CAUSAL, "encoder", LINEAR, AUTO))
        if self.checkpoints == "epoch":
            raise RecipeError("checkpoints epoch keeps adapters that answer; a reward model only judges")

    @property
    def is_linear(self) -> bool:
        """True of a judge without a base model."""
        return self.architecture == LINEAR

    def steps(self, rows: int) -> int:
        """Optimiser steps on `rows` training rows; a linear fit counts as one."""
        return min(rows, 1) if self.is_linear else super().steps(rows)

    def fit_to_rows(self, rows: int) -> Self:
        """A copy whose passes fit `rows` training rows; unchanged for a linear fit."""
        return self if self.is_linear else super().fit_to_rows(rows)


REWARD_MODEL_CONFIG: dict[str, RewardModelRecipe] = {
    "default": RewardModelRecipe(learning_rate=1e-4),
    "small_gpu": RewardModelRecipe(
        **SMALL_GPU | {"quantization": "none"}, learning_rate=1e-4, batch_size=1, gradient_accumulation=8
    ),
    "high_quality": RewardModelRecipe(**HIGH_QUALITY, batch_size=16, learning_rate=5e-5, epochs=5.0),
    "cpu": RewardModelRecipe(epochs=2.0, min_steps=150, patience=6, batch_size=16, learning_rate=1e-3),
}
"""Reward model presets by name, for `train_reward_model --config`."""

METHOD = Method(
    "reward_model",
    "pairs",
    REWARD_MODEL_CONFIG,
    "rl.training.reward_model:RewardModelTrainer",
    "rl.training.estimates:reward_model",
    help="Train a reward model on preferences, scores or thumbs; later runs use it as --reward model:RUN. "
    "Example: manage.py train_reward_model --agent widgets --objective pairwise",
    options={
        "objective": (
            "Objective: pairwise (preferences), regression (scores) or binary (thumbs). Example: "
            "--objective binary"
        ),
        "architecture": "causal (a score head on the base model), encoder (such as DeBERTa, given by --model), "
        "linear (a logistic regression, without a base) or auto (the better of causal and linear on the eval split). "
        "Example: --architecture encoder",
    },
    policy=False,
)
