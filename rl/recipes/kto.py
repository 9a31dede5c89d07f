"""Hyperparameters of Kahneman-Tversky optimisation, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl.recipes.base import HIGH_QUALITY, PADDING, SMALL_GPU_ROWS, AnswerRecipe, Method, RecipeError


@dataclass(frozen=True)
class KTORecipe(AnswerRecipe):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): single responses, good or bad."""

    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 36, "warm_up_steps": 24}

    beta: float = 0.1
    """Strength of the pull towards the base policy, above 0."""
    loss: str = "kto"
    """`kto`; `apo_zero_unpaired` (D'Oosterlinck et al. 2024), without the reference point; `logistic`, the log-loss of
    a thumb given the log-ratio, which keeps a gradient where the others saturate (`rl.training.kto.logistic_loss`)."""
    desirable_weight: float = 0.0
    """Weight of good responses; 0 sets it by their number (the paper's eq. 9)."""
    undesirable_weight: float = 0.0
    """Weight of bad responses; 0 sets it by their number."""
    sft_weight: float = 0.0
    """Weight of the good responses' negative log-likelihood (nats per token), as in DPO: the loss alone never teaches
    an answer format that the base model does not write."""
    reward_threshold: float = 0.0
    """Reward in (0, 1) from which an unrated response counts as good, below it as bad; 0 uses the agent's reward
    settings (0.5 by default)."""

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        # each prompt is computed with the response to another too, and the rows of a micro-batch are compared
        return self._split(2 * max(tokens, longest / PADDING), room, least=4)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("beta")
        self._not_negative("desirable_weight", "undesirable_weight", "sft_weight")
        self._one_of("loss", ("kto", "apo_zero_unpaired", "logistic"))
        if not 0 <= self.reward_threshold < 1:
            raise RecipeError(
                f"reward_threshold must be between 0 and 1, or 0 for the agent's own; found {self.reward_threshold!r}"
            )
        if self.batch_size < 2:
            raise RecipeError(
                f"batch_size must be at least 2, found {self.batch_size}: KTO's reference point compares each prompt "
                "with the response to another"
            )


KTO_CONFIG: dict[str, KTORecipe] = {
    "default": KTORecipe(batch_size=8),
    "small_gpu": KTORecipe(**SMALL_GPU_ROWS | {"batch_size": 2}),
    "high_quality": KTORecipe(**HIGH_QUALITY, batch_size=16, learning_rate=2e-5, epochs=5.0),
    # a laptop and a small model, tuned like DPO's: log-loss on thumbs against a reference warmed up on judged answers
    "cpu": KTORecipe(
        epochs=2.0,
        min_steps=250,
        warm_up_steps=80,
        warm_up_learning_rate=2e-3,
        batch_size=16,
        learning_rate=5e-4,
        beta=1.0,
        loss="logistic",
    ),
}
"""KTO presets by name, for `train_kto --config`."""

METHOD = Method(
    "kto",
    "labels",
    KTO_CONFIG,
    "rl.training.kto:KTOTrainer",
    "rl.training.estimates:kto",
    help="Train a policy on thumbs, stars and scores of single responses by Kahneman-Tversky optimisation "
    "(KTO) and register it. Example: manage.py train_kto --agent widgets",
    options={
        "beta": "Weight of staying near the reference policy, above 0. Example: --beta 0.1",
        "loss": "Loss: kto, apo_zero_unpaired or logistic. Example: --loss kto",
    },
)
