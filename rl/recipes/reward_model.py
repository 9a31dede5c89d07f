"""The knobs of a reward model, and their presets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rl.recipes.base import Method, Recipe, RecipeError


@dataclass(frozen=True)
class RewardModelRecipe(Recipe):
    """A model that scores responses."""

    supports_full_finetuning: ClassVar[bool] = True

    objective: str = "pairwise"
    """`pairwise` ranks (Bradley-Terry), `regression` foretells scores in [0, 1], `binary` thumbs."""
    architecture: str = "causal"
    """`causal` puts a score head on the base model, `encoder` takes an encoder such as DeBERTa (`--model`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._one_of("objective", ("pairwise", "regression", "binary"))
        self._one_of("architecture", ("causal", "encoder"))
        if self.checkpoints == "epoch":
            raise RecipeError("checkpoints epoch keeps adapters that answer; a reward model only judges")


REWARD_MODEL_CONFIG: dict[str, RewardModelRecipe] = {
    "default": RewardModelRecipe(learning_rate=1e-4),
    "small_gpu": RewardModelRecipe(
        learning_rate=1e-4, lora_r=8, lora_alpha=16, batch_size=1, gradient_accumulation=8, max_length=768,
        gradient_checkpointing=True,
    ),
    "high_quality": RewardModelRecipe(
        lora_r=64, lora_alpha=128, batch_size=16, max_length=2048, learning_rate=5e-5,
        epochs=5.0,
    ),
    "cpu": RewardModelRecipe(
        epochs=2.0, min_steps=150, patience=6, batch_size=16, learning_rate=1e-3, lora_r=16, lora_alpha=32,
    ),
}  # fmt: skip
"""Reward model presets by name: what `train_reward_model --config` takes."""

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
        "architecture": "causal (a score head on the base model) or encoder (such as DeBERTa, given by "
        "--model). Example: --architecture encoder",
    },
    policy=False,
)
