"""Frozen dataclasses of training knobs, one per method, and the named presets. Pure: no Django, no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rl.curriculum import ORDERS


class RecipeError(ValueError):
    """A knob that does not exist or a value outside its range; the message names the knob and what is allowed."""


@dataclass(frozen=True)
class Recipe:
    """Knobs every method has. Ranges are checked on construction, so no run starts on a typo."""

    epochs: float = 3.0
    """Passes over the training pairs; fractions allowed."""
    max_steps: int = -1
    """Optimiser steps; -1 means as many as `epochs` asks for."""
    batch_size: int = 4
    """Pairs per optimiser micro-batch."""
    gradient_accumulation: int = 1
    """Micro-batches per optimiser step."""
    learning_rate: float = 5e-5
    warmup_ratio: float = 0.1
    """Share of the steps over which the learning rate rises, in [0, 1)."""
    lr_scheduler: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    max_length: int = 1024
    """Tokens of prompt and response together; longer pairs lose the oldest prompt tokens, and are counted."""
    max_completion_length: int = 512
    """Tokens of a response kept, whatever the prompt."""
    quantization: str = "none"
    """`4bit` loads the frozen base in NF4 where the machine can, `none` never does."""
    gradient_checkpointing: bool = False
    """Trade compute for memory; only where one pair does not fit without."""
    micro_tokens: int = 0
    """Tokens computed at once, padding included: larger batches are cut. 0 cuts only when memory runs out."""
    save_steps: int = 100
    """Optimiser steps between checkpoints."""
    logging_steps: int = 5
    """Optimiser steps between metric rows."""
    eval_steps: int = 0
    """Optimiser steps between evaluations on the eval split; 0 evaluates once, at the end."""
    curriculum: str = "none"
    """Training rows easy to hard in each epoch: by `margin` (pairs), `length` or number of `steps`; `none` shuffles."""
    seed: int = 42
    replay_share: float = 1.0
    """Share of the prompts with older feedback (learnt from by an earlier run) that are trained on again, in [0, 1];
    1 trains on all there is."""

    def __post_init__(self) -> None:
        positive = (
            "epochs",
            "batch_size",
            "gradient_accumulation",
            "learning_rate",
            "lora_r",
            "lora_alpha",
            "max_length",
            "max_completion_length",
            "save_steps",
            "logging_steps",
            "max_grad_norm",
        )
        for knob in positive:
            if not getattr(self, knob) > 0:
                raise RecipeError(f"{knob} must be above 0, found {getattr(self, knob)!r}")
        for knob in ("warmup_ratio", "lora_dropout"):
            if not 0 <= getattr(self, knob) < 1:
                raise RecipeError(f"{knob} must be in [0, 1), found {getattr(self, knob)!r}")
        if not 0 <= self.replay_share <= 1:
            raise RecipeError(f"replay_share must be in [0, 1], found {self.replay_share!r}")
        if self.weight_decay < 0 or self.eval_steps < 0 or self.micro_tokens < 0:
            raise RecipeError("weight_decay, eval_steps and micro_tokens must not be negative")
        if self.max_steps == 0 or self.max_steps < -1:
            raise RecipeError(
                f"max_steps must be above 0, or -1 for as many as epochs asks for; found {self.max_steps}"
            )
        if self.curriculum not in ORDERS:
            raise RecipeError(f"curriculum must be one of {', '.join(ORDERS)}; found {self.curriculum!r}")
        if self.quantization not in ("none", "4bit"):
            raise RecipeError(f"quantization must be none or 4bit, found {self.quantization!r}")
        if self.lr_scheduler not in ("cosine", "linear", "constant", "constant_with_warmup"):
            raise RecipeError(
                f"lr_scheduler must be cosine, linear, constant or constant_with_warmup, found {self.lr_scheduler!r}"
            )

    def steps(self, rows: int) -> int:
        """Optimiser steps of a run on so many training rows, in one process."""
        if rows == 0 or self.max_steps > 0:
            return self.max_steps if rows else 0
        per_epoch = math.ceil(math.ceil(rows / self.batch_size) / self.gradient_accumulation)
        return max(1, math.ceil(self.epochs * per_epoch))

    def with_knobs(self, **knobs: Any) -> Self:
        """A copy with knobs replaced; text is converted to the knob's type. Raises RecipeError."""
        types = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        converted: dict[str, Any] = {}
        for name, value in knobs.items():
            if name not in types:
                raise RecipeError(
                    f"no knob {name!r} in {type(self).__name__}; knobs: {', '.join(sorted(types))}"
                )
            converted[name] = _convert(name, value, types[name])
        return dataclasses.replace(self, **converted)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, knobs: dict[str, Any]) -> Self:
        return cls().with_knobs(**knobs)


def _convert(name: str, value: Any, kind: type) -> Any:
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            if str(value).lower() in ("1", "true", "yes", "on"):
                return True
            if str(value).lower() in ("0", "false", "no", "off"):
                return False
            raise ValueError(value)
        if kind is int:
            number = float(value)
            if number != int(number):
                raise ValueError(value)
            return int(number)
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise RecipeError(f"{name} must be {kind.__name__}, found {value!r}") from error


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


BASE, CHAMPION = "base", "champion"


@dataclass(frozen=True)
class AdapterRecipe(Recipe):
    """Knobs of the methods that may go on from a policy there is."""

    start_from: str = BASE
    """`base` begins with a fresh adapter, `champion` with the weights of the agent's champion (the base where there is
    none on this base model), a policy's name with that policy's. The reference stays the base model in each case, so
    that generations cannot walk away from it unnoticed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.start_from:
            raise RecipeError("start_from must be base, champion or the name of a policy, found nothing")


@dataclass(frozen=True)
class DPORecipe(AdapterRecipe):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv 2305.18290)."""

    beta: float = 0.1
    """Strength of the pull towards the reference policy; smaller lets the policy move further."""
    loss: str = "sigmoid"
    label_smoothing: float = 0.0
    """Assumed share of flipped preferences, in [0, 0.5); used by `sigmoid` (conservative DPO) and `robust`."""
    sft_weight: float = 0.0
    """Weight of the chosen responses' own negative log-likelihood (nats per token) beside the preference loss (RPO,
    Pang et al. 2024, arXiv 2404.19733). It holds on to answering at all: preference losses alone may make the chosen
    response less likely too, as long as the rejected one falls further."""
    group_prompts: bool = True
    """Keep pairs of one prompt in one batch, where the prompt is computed once for all of them."""
    precompute_reference: bool = True
    """Compute the reference's log-probabilities once instead of every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise RecipeError(f"beta must be above 0, found {self.beta!r}")
        if not 0 <= self.label_smoothing < 0.5:
            raise RecipeError(f"label_smoothing must be in [0, 0.5), found {self.label_smoothing!r}")
        if self.sft_weight < 0:
            raise RecipeError(f"sft_weight must not be negative, found {self.sft_weight!r}")
        if self.loss == "exo_pair" and self.label_smoothing == 0:
            raise RecipeError("loss exo_pair needs label_smoothing above 0; its paper uses 0.001")
        if self.loss not in DPO_LOSSES:
            raise RecipeError(f"loss must be one of {', '.join(DPO_LOSSES)}; found {self.loss!r}")


DPO_CONFIG: dict[str, DPORecipe] = {
    # 16 GB of accelerator memory and more
    "default": DPORecipe(),
    # 8-12 GB
    "small_gpu": DPORecipe(
        lora_r=8,
        lora_alpha=16,
        batch_size=1,
        gradient_accumulation=4,
        max_length=768,
        quantization="4bit",
        gradient_checkpointing=True,
    ),
    # 24 GB and more
    "high_quality": DPORecipe(lora_r=64, lora_alpha=128, batch_size=8, max_length=2048, learning_rate=2e-5),
    # a laptop and a small model, measured on the bundled base: one pass teaches the taste, and the weight on the chosen
    # answers keeps them valid (without it, 1e-3 at beta 0.1 learnt the taste in 30 steps and forgot to choose from the
    # list: 23 % valid answers instead of 100 %)
    "cpu": DPORecipe(
        lora_r=16,
        lora_alpha=32,
        batch_size=16,
        learning_rate=4e-4,
        beta=0.3,
        sft_weight=1.0,
        max_length=1024,
        epochs=1.0,
    ),
}
"""DPO presets by name: what `train_dpo --config` takes."""


@dataclass(frozen=True)
class KTORecipe(AdapterRecipe):
    """Kahneman-Tversky optimisation (Ethayarajh et al. 2024, arXiv 2402.01306): single responses, good or bad."""

    beta: float = 0.1
    """Strength of the pull towards the base policy, above 0."""
    loss: str = "kto"
    """`kto`, or `apo_zero_unpaired` (D'Oosterlinck et al. 2024), which leaves the reference point out."""
    desirable_weight: float = 0.0
    """Weight of good responses; 0 is settled by their number (the paper's eq. 9)."""
    undesirable_weight: float = 0.0
    """Weight of bad responses; 0 is settled by their number."""
    balance: str = "weights"
    """`weights` weighs the rarer kind more, `downsample` leaves out training rows of the other until four stand beside
    three."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta > 0:
            raise RecipeError(f"beta must be above 0, found {self.beta!r}")
        if self.loss not in ("kto", "apo_zero_unpaired"):
            raise RecipeError(f"loss must be kto or apo_zero_unpaired, found {self.loss!r}")
        if self.balance not in ("weights", "downsample"):
            raise RecipeError(f"balance must be weights or downsample, found {self.balance!r}")
        if self.desirable_weight < 0 or self.undesirable_weight < 0:
            raise RecipeError("desirable_weight and undesirable_weight must not be negative")
        if self.batch_size < 2:
            raise RecipeError(
                f"batch_size must be at least 2, found {self.batch_size}: KTO's reference point compares each prompt "
                "with the response to another"
            )


KTO_CONFIG: dict[str, KTORecipe] = {
    "default": KTORecipe(batch_size=8),
    "small_gpu": KTORecipe(
        lora_r=8, lora_alpha=16, batch_size=2, gradient_accumulation=4, max_length=768,
        quantization="4bit", gradient_checkpointing=True,
    ),
    "high_quality": KTORecipe(
        lora_r=64, lora_alpha=128, batch_size=16, max_length=2048, learning_rate=2e-5
    ),
    "cpu": KTORecipe(
        epochs=2.0, batch_size=16, learning_rate=4e-4, beta=0.3, lora_r=8, lora_alpha=16, save_steps=25
    ),
}  # fmt: skip
"""KTO presets by name: what `train_kto --config` takes."""


@dataclass(frozen=True)
class SFTRecipe(AdapterRecipe):
    """Supervised fine-tuning on what people wrote themselves or rated highly; the loss is on the response alone."""


SFT_CONFIG: dict[str, SFTRecipe] = {
    "default": SFTRecipe(learning_rate=1e-4),
    "small_gpu": SFTRecipe(
        learning_rate=1e-4, lora_r=8, lora_alpha=16, batch_size=1, gradient_accumulation=4, max_length=768,
        quantization="4bit", gradient_checkpointing=True,
    ),
    "high_quality": SFTRecipe(
        lora_r=64, lora_alpha=128, batch_size=8, max_length=2048, learning_rate=5e-5
    ),
    "cpu": SFTRecipe(epochs=4.0, batch_size=16, learning_rate=2e-3, lora_r=8, lora_alpha=16, save_steps=25),
}  # fmt: skip
"""SFT presets by name: what `train_sft --config` takes."""


@dataclass(frozen=True)
class RewardModelRecipe(Recipe):
    """A model that scores responses."""

    objective: str = "pairwise"
    """`pairwise` ranks (Bradley-Terry), `regression` foretells scores in [0, 1], `binary` thumbs."""
    architecture: str = "causal"
    """`causal` puts a score head on the base model, `encoder` takes an encoder such as DeBERTa (`--model`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.objective not in ("pairwise", "regression", "binary"):
            raise RecipeError(f"objective must be pairwise, regression or binary, found {self.objective!r}")
        if self.architecture not in ("causal", "encoder"):
            raise RecipeError(f"architecture must be causal or encoder, found {self.architecture!r}")


REWARD_MODEL_CONFIG: dict[str, RewardModelRecipe] = {
    "default": RewardModelRecipe(learning_rate=1e-4),
    "small_gpu": RewardModelRecipe(
        learning_rate=1e-4, lora_r=8, lora_alpha=16, batch_size=1, gradient_accumulation=8, max_length=768,
        gradient_checkpointing=True,
    ),
    "high_quality": RewardModelRecipe(
        lora_r=64, lora_alpha=128, batch_size=16, max_length=2048, learning_rate=5e-5
    ),
    "cpu": RewardModelRecipe(
        epochs=2.0, batch_size=16, learning_rate=1e-3, lora_r=16, lora_alpha=32, save_steps=25
    ),
}  # fmt: skip
"""Reward model presets by name: what `train_reward_model --config` takes."""


@dataclass(frozen=True)
class PPORecipe(AdapterRecipe):
    """Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) against a frozen reference.

    One step is a batch of sampled responses and `ppo_epochs` passes over them; `max_steps`, `save_steps`,
    `logging_steps` and `eval_steps` count these steps. `batch_size` is responses per step.
    """

    epochs: float = 1.0
    batch_size: int = 8
    mini_batch_size: int = 4
    """Responses per optimiser step. `gradient_accumulation` cuts a mini-batch into so many pieces, to save memory: the
    step is the same however it is cut."""
    ppo_epochs: int = 4
    """Passes over each batch of responses."""
    reward: str = "agent"
    """What is rewarded: reward specs separated by commas (see `--reward`); their mean counts."""
    samples_per_prompt: int = 1
    """Responses sampled for each prompt of a batch; their prompt is computed once."""
    learning_rate: float = 1.41e-5
    value_learning_rate: float = 0.0
    """Learning rate of the value's adapter and head; 0 takes `learning_rate`."""
    lr_scheduler: str = "constant"
    warmup_ratio: float = 0.0
    logging_steps: int = 1
    init_kl_coef: float = 0.2
    """Price of one nat of distance from the reference, in units of reward; where `kl_controller` starts."""
    kl_controller: str = "adaptive"
    """`adaptive` steers the KL of a response towards `target_kl` by changing its price (Ziegler et al. 2019), `fixed`
    leaves the price as it is."""
    target_kl: float = 6.0
    """Nats per response: the distance from the reference that the adaptive controller steers towards."""
    kl_horizon: float = 10_000.0
    """Responses over which the controller's correction acts; fewer correct faster."""
    kl_estimator: str = "k1"
    """Per-token estimate of the KL in the reward: `k1` (log-ratio) or `k3` (never negative), Schulman 2020."""
    early_stop_kl: float = 0.0
    """Nats per response that one step may move the policy from the one that sampled; beyond, the rest of the step is
    skipped. 0 takes `target_kl`."""
    gamma: float = 1.0
    """Discount per token, in (0, 1]."""
    lam: float = 0.95
    """GAE's lambda, in [0, 1]: 1 trusts the rewards alone, 0 the value alone."""
    cliprange: float = 0.2
    """How far the ratio of new to old probability may move from 1 before it gives no more gradient."""
    cliprange_value: float = 0.2
    """Likewise for the value, in units of reward; 0 does not clip."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of an entropy bonus."""
    whiten_rewards: bool = False
    """Divide rewards by their standard deviation over the batch before advantages are estimated."""
    missing_eos_penalty: float = 1.0
    """Taken from the score of a response that did not end its turn within `max_new_tokens`."""
    value_backbone: str = "adapter"
    """`adapter` gives the value a LoRA of its own, `shared` puts its head on the policy's: another algorithm."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 0.95
    vllm_server: str = ""
    """URL of a vLLM server that samples in this process's place (docs/cluster.md); empty samples here."""
    eval_prompts: int = 64
    """Most held-out prompts answered in an evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("mini_batch_size", "ppo_epochs", "samples_per_prompt", "target_kl", "kl_horizon", "gamma")
        for knob in (*positive, "cliprange", "max_new_tokens", "temperature", "top_p", "eval_prompts"):
            if not getattr(self, knob) > 0:
                raise RecipeError(f"{knob} must be above 0, found {getattr(self, knob)!r}")
        not_negative = (
            "init_kl_coef",
            "early_stop_kl",
            "cliprange_value",
            "vf_coef",
            "entropy_coef",
            "top_k",
        )
        for knob in (*not_negative, "lam", "value_learning_rate", "missing_eos_penalty"):
            if getattr(self, knob) < 0:
                raise RecipeError(f"{knob} must not be negative, found {getattr(self, knob)!r}")
        for knob in ("gamma", "lam", "top_p"):
            if getattr(self, knob) > 1:
                raise RecipeError(f"{knob} must be at most 1, found {getattr(self, knob)!r}")
        choices = {
            "kl_controller": ("adaptive", "fixed"),
            "kl_estimator": ("k1", "k3"),
            "value_backbone": ("adapter", "shared"),
        }
        for knob, allowed in choices.items():
            if getattr(self, knob) not in allowed:
                raise RecipeError(f"{knob} must be {' or '.join(allowed)}, found {getattr(self, knob)!r}")
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
        if self.max_new_tokens >= self.max_length:
            raise RecipeError(
                f"max_length ({self.max_length}) must leave room for a prompt beside max_new_tokens "
                f"({self.max_new_tokens})"
            )
        if self.lora_dropout:
            raise RecipeError("lora_dropout must be 0 with ppo: the ratio of an unchanged policy must be 1")

    def steps(self, rows: int) -> int:
        if rows == 0 or self.max_steps > 0:
            return self.max_steps if rows else 0
        return max(1, math.ceil(self.epochs * rows * self.samples_per_prompt / self.batch_size))


PPO_CONFIG: dict[str, PPORecipe] = {
    # 16 GB of accelerator memory and more
    "default": PPORecipe(),
    # 8-12 GB
    "small_gpu": PPORecipe(
        lora_r=8,
        lora_alpha=16,
        gradient_accumulation=4,
        max_length=768,
        quantization="4bit",
        gradient_checkpointing=True,
    ),
    # 24 GB and more
    "high_quality": PPORecipe(
        lora_r=64, lora_alpha=128, batch_size=32, mini_batch_size=8, max_length=2048, max_new_tokens=256
    ),
    # a laptop and a small model, measured on the bundled base: at 5e-4 and a KL price of 0.05 the answers got longer
    # and 6 % no longer ended after 10 steps; at 2.5e-4 and 0.1 all did, and the reward went on rising
    "cpu": PPORecipe(
        epochs=2.0,
        batch_size=64,
        mini_batch_size=32,
        ppo_epochs=3,
        learning_rate=2.5e-4,
        value_learning_rate=1e-3,
        init_kl_coef=0.1,
        kl_controller="fixed",
        max_new_tokens=48,
    ),
    # agents that read a long list and explain their order: 1,024 tokens of context and 256 of answer
    "prioritizer": PPORecipe(max_length=1280, max_new_tokens=256, gradient_accumulation=2),
}
"""PPO presets by name: what `train_ppo --config` takes."""


@dataclass(frozen=True)
class GRPORecipe(AdapterRecipe):
    """Group relative policy optimisation (Shao et al. 2024, arXiv 2402.03300): answers to one prompt compete.

    `batch_size` is responses per micro-batch, whole groups of `num_generations`.
    """

    epochs: float = 1.0
    batch_size: int = 16
    mode: str = "online"
    """`online` samples answers and has them rewarded; `logged` learns from several rated answers to one prompt."""
    num_generations: int = 8
    """Answers to each prompt that compete, at least 2; in `logged` mode what a group is taken to hold."""
    reward: str = "agent"
    """What is rewarded: reward specs separated by commas (see `--reward`); their mean counts."""
    learning_rate: float = 1e-5
    lr_scheduler: str = "constant"
    warmup_ratio: float = 0.0
    logging_steps: int = 1
    beta: float = 0.04
    """Price of one nat of distance from the base (k3, per token); 0 leaves the base out."""
    loss: str = "dapo"
    """How tokens are averaged: `dapo` over all of a step, `grpo` within each response first, `bnpo` over a
    micro-batch, `dr_grpo` by a constant."""
    scale_rewards: str = "group"
    """What a reward's distance from its group's mean is divided by: the deviation of its `group`, of the `batch`,
    `none`."""
    num_iterations: int = 1
    """Passes over each batch of responses."""
    epsilon: float = 0.2
    """How far the ratio of new to old probability may move from 1 before it gives no more gradient."""
    max_ratio: float = 2.0
    """In `logged` mode the importance weight against the base is cut off here (CISPO, arXiv 2506.13585)."""
    missing_eos_penalty: float = 1.0
    """Taken from the score of a response that did not end its turn within `max_new_tokens`."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vllm: str = "off"
    """Who samples: `off` this process, `colocate` vLLM beside it, `server` a vLLM server (TRL's settings apply)."""
    eval_prompts: int = 64
    """Most held-out prompts answered in an evaluation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("num_iterations", "epsilon", "max_ratio", "max_new_tokens", "temperature", "top_p")
        for knob in (*positive, "eval_prompts"):
            if not getattr(self, knob) > 0:
                raise RecipeError(f"{knob} must be above 0, found {getattr(self, knob)!r}")
        for knob in ("beta", "missing_eos_penalty", "top_k"):
            if getattr(self, knob) < 0:
                raise RecipeError(f"{knob} must not be negative, found {getattr(self, knob)!r}")
        choices = {
            "mode": ("online", "logged"),
            "loss": ("dapo", "grpo", "bnpo", "dr_grpo"),
            "scale_rewards": ("group", "none") if self.mode == "logged" else ("group", "batch", "none"),
            "vllm": ("off", "colocate", "server"),
        }
        for knob, allowed in choices.items():
            if getattr(self, knob) not in allowed:
                raise RecipeError(f"{knob} must be {' or '.join(allowed)}, found {getattr(self, knob)!r}")
        if self.num_generations < 2 or self.batch_size % self.num_generations:
            raise RecipeError(
                f"batch_size ({self.batch_size}) must be a multiple of num_generations ({self.num_generations}), and "
                "that at least 2: answers are compared within their group"
            )
        if self.top_p > 1:
            raise RecipeError(f"top_p must be at most 1, found {self.top_p!r}")
        if self.max_new_tokens >= self.max_length:
            raise RecipeError(
                f"max_length ({self.max_length}) must leave room for a prompt beside max_new_tokens "
                f"({self.max_new_tokens})"
            )
        if self.lora_dropout:
            raise RecipeError("lora_dropout must be 0 with grpo: the ratio of an unchanged policy must be 1")

    @property
    def groups(self) -> int:
        """Prompts of a micro-batch."""
        return max(1, self.batch_size // self.num_generations)

    def steps(self, rows: int) -> int:
        if rows == 0 or self.max_steps > 0:
            return self.max_steps if rows else 0
        if self.mode == "logged":
            per_epoch = math.ceil(math.ceil(rows / self.groups) / self.gradient_accumulation)
        else:
            per_epoch = math.ceil(rows / (self.groups * self.gradient_accumulation)) * self.num_iterations
        return max(1, math.ceil(self.epochs * per_epoch))


GRPO_CONFIG: dict[str, GRPORecipe] = {
    # 16 GB of accelerator memory and more
    "default": GRPORecipe(),
    # 8-12 GB
    "small_gpu": GRPORecipe(
        lora_r=8, lora_alpha=16, batch_size=8, gradient_accumulation=2, max_length=768,
        quantization="4bit", gradient_checkpointing=True,
    ),
    # 24 GB and more
    "high_quality": GRPORecipe(
        lora_r=64, lora_alpha=128, batch_size=32, num_generations=16, max_length=2048, max_new_tokens=256
    ),
    # a laptop and a small model
    "cpu": GRPORecipe(
        epochs=2.0, batch_size=64, learning_rate=5e-4, beta=0.04, max_new_tokens=48, lora_r=16, lora_alpha=32
    ),
}  # fmt: skip
"""GRPO presets by name: what `train_grpo --config` takes."""

RECIPES: dict[str, Mapping[str, Recipe]] = {
    "dpo": DPO_CONFIG,
    "kto": KTO_CONFIG,
    "sft": SFT_CONFIG,
    "reward_model": REWARD_MODEL_CONFIG,
    "ppo": PPO_CONFIG,
    "grpo": GRPO_CONFIG,
}
"""Method -> its presets."""


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


DATASET_CONFIG: dict[str, Any] = {
    "min_samples": 10,
    "rating_margin": 0.25,
    "max_pairs_per_prompt": 4,
}
"""How feedback becomes pairs: fewest samples to train on; smallest difference of mean rating (in [0, 1]) between two
responses that makes a pair; most training pairs one prompt may give (held-out prompts give one each, so that they
are independent)."""

ONLINE_LEARNING_CONFIG: dict[str, Any] = {
    "min_samples_to_retrain": 100,
    "max_buffer_size": 10_000,
    "retrain_interval_hours": 24.0,
    "method": "auto",
    "start_from": "base",
    "replay_share": 1.0,
    "gate": "champion",
    "auto_export": True,
    "auto_deploy": False,
    "auto_rollback": True,
    "keep_best": 3,
    "keep_newest": 5,
    "tick_seconds": 60,
}
"""When an agent learns by itself and what happens then (docs/online-learning.md); the section `continuous_learning` of
RATCHET_CONFIG lies over it, the agent's row in the admin over both."""
