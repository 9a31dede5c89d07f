"""Frozen dataclasses of training knobs, one per method, and the named presets. Pure: no Django, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


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
    save_steps: int = 100
    """Optimiser steps between checkpoints."""
    logging_steps: int = 5
    """Optimiser steps between metric rows."""
    eval_steps: int = 0
    """Optimiser steps between evaluations on the eval split; 0 evaluates once, at the end."""
    seed: int = 42

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
        if self.weight_decay < 0 or self.eval_steps < 0:
            raise RecipeError("weight_decay and eval_steps must not be negative")
        if self.max_steps == 0 or self.max_steps < -1:
            raise RecipeError(
                f"max_steps must be above 0, or -1 for as many as epochs asks for; found {self.max_steps}"
            )
        if self.quantization not in ("none", "4bit"):
            raise RecipeError(f"quantization must be none or 4bit, found {self.quantization!r}")
        if self.lr_scheduler not in ("cosine", "linear", "constant", "constant_with_warmup"):
            raise RecipeError(
                f"lr_scheduler must be cosine, linear, constant or constant_with_warmup, found {self.lr_scheduler!r}"
            )

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


@dataclass(frozen=True)
class DPORecipe(Recipe):
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

RECIPES: dict[str, Mapping[str, Recipe]] = {"dpo": DPO_CONFIG}
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
