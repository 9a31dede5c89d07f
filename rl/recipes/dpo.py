"""Hyperparameters of direct preference optimisation, and their presets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from rl.recipes.base import HIGH_QUALITY, SMALL_GPU_ROWS, AnswerRecipe, Method, RecipeError

DPO_LOSSES = (
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
)


@dataclass(frozen=True)
class DPORecipe(AnswerRecipe):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    eval_metric: ClassVar[str] = "eval_ranking_loss"
    """Has no scale, so beta does not change it."""
    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 30, "warm_up_steps": 24}
    """131 pairs were learnt in 12 steps."""

    beta: float = 0.1
    """Strength of the pull towards the reference; smaller lets the policy move further."""
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    """Assumed share of flipped preferences in [0, 0.5), for `sigmoid` (conservative DPO) and `robust`."""
    sft_weight: float = 0.0
    """Weight of the chosen responses' negative log-likelihood (nats per token) beside the preference loss (RPO, Pang et
    al. 2024, arXiv 2404.19733). Preference losses alone may lower the chosen response too, as long as the rejected one
    falls more."""
    implied_pairs: bool = False
    """Also train on pairs implied by one rating: a liked answer over a listed, unrated one, for prompts without another
    pair (docs/datasets.md). Evaluations use none."""
    group_prompts: bool = True
    """Keep pairs of one prompt in one batch, where the prompt is computed once."""
    precompute_reference: bool = True
    """Compute the reference's log-probabilities once instead of every step."""

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        return self._split(tokens, room)  # a few long rows are computed by themselves

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise RecipeError(f"label_smoothing must be in [0, 0.5), found {self.label_smoothing!r}")
        self._not_negative("sft_weight")
        self._one_of("loss", DPO_LOSSES)
        if self.warm_up_steps and not self.precompute_reference:
            raise RecipeError(
                "warm_up_steps needs precompute_reference: the warm-up is not kept while training"
            )
        if self.loss == "exo_pair" and self.label_smoothing == 0:
            raise RecipeError("loss exo_pair needs label_smoothing above 0; its paper uses 0.001")


DPO_CONFIG: dict[str, DPORecipe] = {
    "default": DPORecipe(),
    "small_gpu": DPORecipe(**SMALL_GPU_ROWS),
    "high_quality": DPORecipe(**HIGH_QUALITY, batch_size=8, learning_rate=2e-5, epochs=5.0),
    # a laptop and a small model, tuned on worlds of benchmarks/world_tastes.py (docs/decisions/24): the
    # warm-up trains the reference on judged answers, and the weight on chosen answers keeps them likely: at
    # beta 0.1 and weight 0.2 the courier's desk no longer ended its turns, far beyond the gate's max_kl
    "cpu": DPORecipe(
        batch_size=16,
        learning_rate=1e-3,
        beta=0.5,
        sft_weight=1.0,
        warm_up_steps=80,
        warm_up_learning_rate=2e-3,
        epochs=2.0,
        min_steps=250,
        patience=10,
    ),
}
"""DPO presets by name, for `train_dpo --config`."""

METHOD = Method(
    "dpo",
    "pairs",
    DPO_CONFIG,
    "rl.training.dpo:DPOTrainer",
    "rl.training.estimates:dpo",
    help="Train a policy on preference pairs by direct preference optimisation (DPO) and register it. "
    "Example: manage.py train_dpo --agent widgets",
    options={
        "beta": "Weight of staying near the reference policy, above 0. Example: --beta 0.1",
        "loss": (
            "Loss: sigmoid, ipo, hinge, robust, ... (docs/training-reference.md lists all). Example: --loss ipo"
        ),
    },
)
