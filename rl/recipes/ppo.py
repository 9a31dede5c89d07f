"""Hyperparameters of proximal policy optimisation, and their presets."""

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
class PPORecipe(SampledRecipe):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) against a frozen reference.

    One step is a batch of sampled responses and `ppo_epochs` passes over them; `max_steps`, `save_steps`,
    `logging_steps` and `eval_steps` count these steps. `batch_size` is responses per step.
    """

    most_passes: ClassVar[int] = 60
    """More than other methods: each pass samples new responses."""

    least_steps: ClassVar[Mapping[str, int]] = {"min_steps": 16}

    batch_size: int = 8
    mini_batch_size: int = 4
    """Responses per optimiser step. `gradient_accumulation` splits them to save memory; the step stays the same."""
    ppo_epochs: int = 4
    """Passes over each batch of responses."""
    samples_per_prompt: int = 1
    """Responses sampled per prompt; the prompt is computed once."""
    learning_rate: float = 1.41e-5
    value_learning_rate: float = 0.0
    """Learning rate of the value's adapter and head; 0 uses `learning_rate`."""
    init_kl_coef: float = 0.2
    """Penalty per nat of KL to the reference, in units of reward; initial value of `kl_controller`."""
    kl_controller: str = "adaptive"
    """`adaptive` steers the KL of a response towards `target_kl` (Ziegler et al. 2019), `fixed` keeps the penalty."""
    target_kl: float = 6.0
    """Target of the adaptive controller, nats per response."""
    kl_horizon: float = 10_000.0
    """Responses over which the controller corrects; fewer correct faster."""
    kl_estimator: str = "k1"
    """Per-token estimate of the KL in the reward: `k1` (log-ratio) or `k3` (never negative), Schulman 2020."""
    early_stop_kl: float = 0.0
    """Most nats per response that one step may move the policy; beyond, the rest of the step is skipped. 0 uses
    `target_kl`."""
    gamma: float = 1.0
    """Discount per token, in (0, 1]."""
    lam: float = 0.95
    """GAE's lambda, in [0, 1]: 1 uses rewards alone, 0 the value alone."""
    cliprange: float = 0.2
    """Clip range of the probability ratio around 1."""
    cliprange_value: float = 0.2
    """Clip range of the value, in units of reward; 0 does not clip."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation over the batch before estimating advantages."""
    value_backbone: str = "adapter"
    """`adapter` gives the value its own LoRA , `shared` puts its head on the
    policy's."""
    top_k: int = 50
    top_p: float = 0.95
    vllm_server: str = ""
    """URL of a vLLM server that samples (docs/hardware.md); empty samples in this process."""

    @property
    def constrains(self) -> bool:
        return self.constrained_decoding and not self.vllm_server

    @property
    def trained_copies(self) -> int:
        return 2 if self.value_backbone == "adapter" else 1

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        rows = divisor_of(self.mini_batch_size, int(room / (tokens + self.max_new_tokens)))
        return {"gradient_accumulation": self.mini_batch_size // rows}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero(
            "mini_batch_size",
            "ppo_epochs",
            "samples_per_prompt",
            "target_kl",
            "kl_horizon",
            "gamma",
            "cliprange",
        )
        self._not_negative(
            "init_kl_coef", "early_stop_kl", "cliprange_value", "vf_coef", "entropy_coef", "lam"
        )
        self._not_negative("value_learning_rate")
        for knob in ("gamma", "lam"):
            if getattr(self, knob) > 1:
                raise RecipeError(f"{knob} must be at most 1, found {getattr(self, knob)!r}")
        self._one_of("kl_controller", ("adaptive", "fixed"))
        self._one_of("kl_estimator", ("k1", "k3"))
        self._one_of("value_backbone", ("adapter", "shared"))
        if self.batch_size % self.mini_batch_size:
            raise RecipeError(
                f"batch_size ({self.batch_size}) must be a multiple of mini_batch_size ({self.mini_batch_size})"
            )
        if self.mini_batch_size % self.gradient_accumulation:
            raise RecipeError(
                f"mini_batch_size ({self.mini_batch_size}) must be a multiple of gradient_accumulation "
                f"({self.gradient_accumulation})"
            )
        if self.batch_size % self.samples_per_prompt:
            raise RecipeError(
                f"batch_size ({self.batch_size}) must be a multiple of samples_per_prompt ({self.samples_per_prompt})"
            )

    def with_knobs(self, **knobs: object) -> Self:
        """A copy with knobs changed; a new `batch_size` adapts the sizes that must divide it, unless they are named."""
        size = positive_number(knobs.get("batch_size"))
        if size is not None:
            mini = positive_number(
                knobs.setdefault("mini_batch_size", divisor_of(size, self.mini_batch_size))
            )
            knobs.setdefault("gradient_accumulation", math.gcd(mini or 1, self.gradient_accumulation))
            knobs.setdefault("samples_per_prompt", divisor_of(size, self.samples_per_prompt))
        return super().with_knobs(**knobs)

    def _steps_per_epoch(self, rows: int) -> float:
        return rows * self.samples_per_prompt / self.batch_size  # a batch may end one pass and begin the next


PPO_CONFIG: dict[str, PPORecipe] = {
    "default": PPORecipe(),
    "small_gpu": PPORecipe(**SMALL_GPU, gradient_accumulation=4),
    "high_quality": PPORecipe(**HIGH_QUALITY, batch_size=32, mini_batch_size=8, max_new_tokens=256),
    # a laptop and a small model, measured on the bundled base: agents that order or list learn nothing in 16 steps and
    # beat chance by 23 points after 40. With constrained sampling four kinds of agents learn more at 1e-3 than at
    # 2.5e-4 and one that lists passages less; 5e-4 equals the better of both on the two agents tried
    "cpu": PPORecipe(
        epochs=2.0,
        min_steps=40,
        batch_size=64,
        mini_batch_size=32,
        ppo_epochs=3,
        learning_rate=5e-4,
        value_learning_rate=1e-3,
        init_kl_coef=0.1,
        kl_controller="fixed",
        max_new_tokens=48,
        save_steps=5,
    ),
    # agents that read a long list and explain their order: 1,024 tokens of context and 256 of answer
    "prioritizer": PPORecipe(max_length=1280, max_new_tokens=256, gradient_accumulation=2),
}
"""PPO presets by name, for `train_ppo --config`."""

METHOD = Method(
    "ppo",
    "prompts",
    PPO_CONFIG,
    "rl.training.ppo:PPOTrainer",
    "rl.training.estimates:ppo",
    help="Train a policy by proximal policy optimisation (PPO): sample responses, reward them, and update "
    "towards higher reward; register it. Example: manage.py train_ppo --agent filer --reward agent",
    options={
        "mini_batch_size": "Responses per optimiser step. Example: --mini-batch-size 4",
        "ppo_epochs": "Passes over each batch of responses. Example: --ppo-epochs 4",
        "samples_per_prompt": "Sampled responses per prompt of a batch. Example: --samples-per-prompt 4",
    }
    | SAMPLING_OPTIONS,
    rewarded=True,
    kl_knob="init_kl_coef",
)
