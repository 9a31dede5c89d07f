"""Hyperparameters of group relative policy optimisation, and their presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from rl.recipes.base import (
    HIGH_QUALITY,
    SAMPLING_OPTIONS,
    SMALL_GPU,
    Method,
    RecipeError,
    SampledRecipe,
    divisor_of,
    positive_number,
)


@dataclass(frozen=True)
class GRPORecipe(SampledRecipe):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): answers to one prompt compete.

    `batch_size` is responses per micro-batch, whole groups of `num_generations`.
    """

    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 24}

    batch_size: int = 16
    num_generations: int = 8
    """Answers per prompt that are compared, at least 2."""
    learning_rate: float = 1e-5
    beta: float = 0.04
    """Penalty per nat of KL to the reference (k3, per token); 0 leaves it out."""
    loss: str = "dapo"
    """Averaging of tokens: `dapo` over the step, `grpo` within each response first, `bnpo` over a micro-batch,
    `dr_grpo` by a constant."""
    scale_rewards: str = "group"
    """Divisor of a reward's distance from its group's mean: standard deviation of the `group`, of the `batch`, or
    `none`."""
    num_iterations: int = 1
    """Passes over each batch of responses."""
    epsilon: float = 0.2
    """Clip range of the probability ratio around 1."""
    vllm: str = "off"
    """Sampling engine: `off` this process, `colocate` vLLM beside it, `server` a vLLM server (TRL's settings apply)."""

    @property
    def constrains(self) -> bool:
        return self.constrained_decoding and self.vllm == "off"

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        group, step = self.num_generations, self.batch_size * self.gradient_accumulation
        groups = divisor_of(step // group, int(room / (tokens + group * self.max_new_tokens)))
        return {"batch_size": groups * group, "gradient_accumulation": step // (groups * group)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("num_iterations", "epsilon")
        self._not_negative("beta")
        self._one_of("loss", ("dapo", "grpo", "bnpo", "dr_grpo"))
        self._one_of("scale_rewards", ("group", "batch", "none"))
        self._one_of("vllm", ("off", "colocate", "server"))
        if self.num_generations < 2 or self.batch_size % self.num_generations:
            raise RecipeError(
                f"batch_size ({self.batch_size}) must be a multiple of num_generations ({self.num_generations}), and "
                "that at least 2: answers are compared within their group"
            )

    @property
    def groups(self) -> int:
        """Prompts of a micro-batch."""
        return max(1, self.batch_size // self.num_generations)

    def with_knobs(self, **knobs: object) -> Self:
        """A copy with knobs changed; a new `batch_size` adapts the size of groups, unless it is named."""
        size = positive_number(knobs.get("batch_size"))
        if size is not None:
            group = divisor_of(size, self.num_generations)
            knobs.setdefault("num_generations", group if group > 1 else size)  # a prime is one group
        return super().with_knobs(**knobs)

    def _steps_per_epoch(self, rows: int) -> float:
        return math.ceil(rows / (self.groups * self.gradient_accumulation)) * self.num_iterations


GRPO_CONFIG: dict[str, GRPORecipe] = {
    "default": GRPORecipe(),
    "small_gpu": GRPORecipe(**SMALL_GPU, batch_size=8, gradient_accumulation=2),
    "high_quality": GRPORecipe(**HIGH_QUALITY, batch_size=32, num_generations=16, max_new_tokens=256),
    # a laptop and a small model
    "cpu": GRPORecipe(
        epochs=2.0,
        min_steps=150,
        batch_size=64,
        learning_rate=5e-4,
        max_new_tokens=48,
        save_steps=5,
        top_k=20,
        top_p=0.95,
    ),
}
"""GRPO presets by name, for `train_grpo --config`."""

METHOD = Method(
    "grpo",
    "prompts",
    GRPO_CONFIG,
    "rl.training.grpo:GRPOTrainer",
    "rl.training.estimates:grpo",
    help="Train a policy by group relative policy optimisation (GRPO): sample several responses per "
    "prompt, reward them, and favour those above their group's mean; register it. Example: manage.py "
    "train_grpo --agent filer --reward agent",
    options={
        "num_generations": "Sampled responses per prompt (the group). Example: --num-generations 8",
    }
    | SAMPLING_OPTIONS,
    rewarded=True,
    kl_knob="beta",
)
