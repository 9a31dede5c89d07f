"""Recipes: the hyperparameters of every method, checked on construction, and `Method`, the description of a method."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

MOST_PASSES = 12
"""Most passes over the same judged rows for `min_steps`; with more a policy memorises the rows."""

MOST_WARM_UP_PASSES = 6
"""Most passes over the judged responses in a warm-up, which teaches their wording."""


class RecipeError(ValueError):
    """An unknown knob or a value outside its range; the message names the knob and what is allowed."""

    code = "invalid"


@dataclass(frozen=True)
class BasicRecipe:
    """Knobs of every method, including those without an adapter. Ranges are checked on construction."""

    seed: int = 42
    replay_share: float = 1.0
    """Share in [0, 1] of the prompts that earlier runs learnt from to train on again; 1 trains on all."""

    @property
    def constrains(self) -> bool:
        """True if the method samples answers within the format that the agent serves."""
        return False

    def __post_init__(self) -> None:
        if not 0 <= self.replay_share <= 1:
            raise RecipeError(f"replay_share must be in [0, 1], found {self.replay_share!r}")

    def _above_zero(self, *knobs: str) -> None:
        for knob in knobs:
            if not getattr(self, knob) > 0:
                raise RecipeError(f"{knob} must be above 0, found {getattr(self, knob)!r}")

    def _not_negative(self, *knobs: str) -> None:
        for knob in knobs:
            if getattr(self, knob) < 0:
                raise RecipeError(f"{knob} must not be negative, found {getattr(self, knob)!r}")

    def _one_of(self, knob: str, allowed: Sequence[str]) -> None:
        if getattr(self, knob) not in allowed:
            choice = " or ".join(allowed) if len(allowed) == 2 else f"one of {', '.join(allowed)}"
            raise RecipeError(f"{knob} must be {choice}; found {getattr(self, knob)!r}")

    def steps(self, rows: int) -> int:
        """Optimiser steps on `rows` training rows; 0 for methods without steps."""
        return 0

    def fit_to_rows(self, rows: int) -> Self:
        """A copy whose passes fit `rows` training rows."""
        return self

    def with_knobs(self, **knobs: object) -> Self:
        """A copy with knobs replaced; text is converted to the knob's type, `2x` is twice the present number.

        Raises RecipeError.
        """
        types = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        converted: dict[str, Any] = {}
        for name, value in knobs.items():
            if name not in types:
                raise RecipeError(
                    f"no knob {name!r} in {type(self).__name__}; knobs: {', '.join(sorted(types))}"
                )
            if types[name] is float and isinstance(value, str) and value.endswith("x"):
                value = getattr(self, name) * _convert(name, value.removesuffix("x"), float)
            converted[name] = _convert(name, value, types[name])
        return dataclasses.replace(self, **converted)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, knobs: dict[str, object]) -> Self:
        return cls().with_knobs(**knobs)


PADDING = 2.0
"""Most tokens computed at once with their padding, by those that fit into memory without."""


@dataclass(frozen=True)
class Recipe(BasicRecipe):
    """Knobs of every method that trains an adapter."""

    most_passes: ClassVar[int] = MOST_PASSES
    """Most passes over the same rows for `min_steps`."""
    many_rows_factor: ClassVar[int] = 1
    """Factor on `min_steps` if that takes at most MOST_PASSES passes: many rows need more steps."""
    makes_policy: ClassVar[bool] = True
    """False for a reward model, which answers nobody."""
    eval_metric: ClassVar[str] = "eval_loss"
    """Figure of the eval split by which weights are compared; the least is the best."""
    least_steps: ClassVar[Mapping[str, int]] = {}
    """Knob of steps -> its least value on few rows (`rl.recipes.fit`)."""
    epochs: float = 3.0
    """Passes over the training rows; fractions allowed."""
    max_steps: int = -1
    """Optimiser steps; -1: as many as `epochs` gives."""
    min_steps: int = 0
    """Least optimiser steps: few rows are repeated, at most `most_passes` times. 0 adds no pass. Ignored if `epochs` or
    `max_steps` is given."""
    batch_size: int = 4
    """Pairs per micro-batch."""
    gradient_accumulation: int = 1
    """Micro-batches per optimiser step."""
    learning_rate: float = 5e-5
    warmup_ratio: float = 0.1
    """Share of the steps over which the learning rate rises, in [0, 1)."""
    lr_scheduler: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora_r: int = 16
    """Rank of the LoRA adapter."""
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    max_length: int = 1024
    """Tokens of prompt and response together; longer rows lose their oldest prompt tokens and are counted."""
    max_completion_length: int = 512
    """Most tokens of a response."""
    quantization: str = "none"
    """`4bit` loads the frozen base model in NF4 if the hardware supports it; `none` never does."""
    gradient_checkpointing: bool = False
    """Trades compute for memory; for rows that do not fit otherwise."""
    micro_tokens: int = 0
    """Most tokens computed at once, padding included; larger batches are split. 0 splits only when memory runs out."""
    save_steps: int = 100
    """Optimiser steps between checkpoints."""
    logging_steps: int = 5
    """Optimiser steps between metric rows."""
    eval_steps: int = 0
    """Optimiser steps between evaluations on the eval split; 0 evaluates once, at the end."""
    patience: int = 0
    """Training stops after this many evaluations without improvement and keeps the best weights. 0 makes every step and
    keeps the last weights, as does an eval split that is too small (`rl.training.adapter_trainer`)."""
    checkpoints: str = "newest"
    """`newest` keeps the checkpoint to resume from; `epoch` also keeps each epoch's adapter for `export_model
    --checkpoint`."""
    minutes: float = 0.0
    """Most minutes of a run with all its stages; 0 sets no limit. Passes and rows are fitted to it before training
    (`rl.recipes.fit`), and training stops at it. Without an accelerator the default is 20 for base models other than
    the bundled one, unless a preset, passes or steps are named."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero(
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
        self._not_negative("weight_decay", "eval_steps", "micro_tokens", "min_steps", "patience", "minutes")
        for knob in ("warmup_ratio", "lora_dropout"):
            if not 0 <= getattr(self, knob) < 1:
                raise RecipeError(f"{knob} must be in [0, 1), found {getattr(self, knob)!r}")
        if self.max_steps == 0 or self.max_steps < -1:
            raise RecipeError(
                f"max_steps must be above 0, or -1 for as many as epochs asks for; found {self.max_steps}"
            )
        self._one_of("checkpoints", ("newest", "epoch"))
        self._one_of("quantization", ("none", "4bit"))
        self._one_of("lr_scheduler", ("cosine", "linear", "constant", "constant_with_warmup"))

    @property
    def trained_copies(self) -> int:
        """Sets of weights trained at once; actor-critic methods have two."""
        return 1

    @property
    def has_adapter_reference(self) -> bool:
        """True if the reference is an adapter in memory beside the policy's; False if it is the base model."""
        return False

    def steps(self, rows: int) -> int:
        """Optimiser steps on `rows` training rows, in one process."""
        if rows == 0 or self.max_steps > 0:
            return self.max_steps if rows else 0
        return max(1, math.ceil(self.fit_to_rows(rows).epochs * self._steps_per_epoch(rows)))

    def _steps_per_epoch(self, rows: int) -> float:
        return math.ceil(math.ceil(rows / self.batch_size) / self.gradient_accumulation)

    def micro_batch(self, tokens: float, longest: int, room: float) -> dict[str, int]:
        """Knobs of micro-batches of `room` tokens that keep the step's rows; a row has `tokens`, at most `longest`."""
        # the rows of a micro-batch are padded to its longest
        return self._split(max(tokens, longest / PADDING), room)

    def _split(self, tokens: float, room: float, least: int = 1) -> dict[str, int]:
        step = self.batch_size * self.gradient_accumulation
        rows = max(least, divisor_of(step, int(room / tokens)))
        return {
            "batch_size": rows,
            "gradient_accumulation": max(1, step // rows),
            "micro_tokens": round(PADDING * room),
        }

    def fit_to_rows(self, rows: int) -> Self:
        """A copy whose `epochs` give at least `min_steps` optimiser steps on `rows` training rows."""
        if rows == 0 or self.max_steps > 0 or self.min_steps == 0:
            return self
        steps = self._steps_per_epoch(rows)
        passes = max(
            min(math.ceil(self.min_steps / steps), self.most_passes),
            min(math.ceil(self.many_rows_factor * self.min_steps / steps), MOST_PASSES),
        )
        return dataclasses.replace(self, epochs=max(self.epochs, float(passes)))


def positive_number(value: Any) -> int | None:
    """A knob given as a number above 0 or its text; None for anything else, which is refused later."""
    try:
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def divisor_of(size: int, most: int) -> int:
    """The largest divisor of a size that is at most `most`; 1 if `most` is below 1."""
    return next((part for part in range(min(size, most), 0, -1) if size % part == 0), 1)


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


BASE, CHAMPION, START = "base", "champion", "start"

SFT_STAGE = "sft"
"""Start of a run from an SFT policy that it trains first, on what people wrote and liked."""

DISTIL = "distil"
"""Learning from the unrated answers of one policy: a method's name, a start, and SFT's `sources`."""

STAGE_STARTS: dict[str, dict[str, str]] = {SFT_STAGE: {}, DISTIL: {"sources": DISTIL}}
"""Start that a run trains first -> the knobs of that SFT."""

DATASET_KINDS = {
    "pairs": "pairs",
    "labels": "judged answers",
    "corrections": "answers that people wrote or liked",
    "scores": "scored answers",
    "prompts": "prompts",
    "pairs_and_scores": "pairs and scored answers",
}
"""Kind of dataset, as in `rl.models.Snapshot` -> what its rows are."""


@dataclass(frozen=True)
class Method:
    """One way to learn from feedback: all that commands, REST, pages and jobs know of it."""

    slug: str
    """Its command is `train_<slug>`, its section of RATCHET_CONFIG `<slug>`."""
    kind: str
    """Its dataset, one of DATASET_KINDS."""
    presets: Mapping[str, BasicRecipe] = field(repr=False)
    """Preset -> recipe, all of one class; includes `default`."""
    trainer: str
    """`module:Class`, imported when a run is trained, with the interface of `rl.training.dpo.DPOTrainer`."""
    estimate: str
    """`module:function` that estimates steps, minutes and memory, as `rl.training.estimates.dpo` does."""
    help: str = field(repr=False)
    """Text of `train_<slug> --help`: what it learns from, and an example."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Knob that is an option of the command -> its help."""
    policy: bool = True
    """True if its result answers and enters the registry; a reward model only judges."""
    rewarded: bool = False
    """True if it needs reward functions (`--reward`), stored in its recipe's knob `reward`."""
    kl_knob: str = ""
    """Knob that `--kl-coef` sets, for rewarded methods."""
    adapter: bool = True
    """True if it trains an adapter of a base model, which needs torch."""

    @property
    def recipe(self) -> type[BasicRecipe]:
        return type(self.presets["default"])

    def preset(self, wanted: str) -> str:
        """The preset of that name; `default` if the method lacks it."""
        return wanted if wanted in self.presets else "default"


SMALL_GPU: dict[str, Any] = {
    "lora_r": 8,
    "lora_alpha": 16,
    "max_length": 768,
    "quantization": "4bit",
    "gradient_checkpointing": True,
}
"""Knobs of every preset for 8 to 12 GB of accelerator memory; `default` is for 16 GB and more."""

SMALL_GPU_ROWS: dict[str, Any] = SMALL_GPU | {"batch_size": 1, "gradient_accumulation": 4}

HIGH_QUALITY: dict[str, Any] = {"lora_r": 64, "lora_alpha": 128, "max_length": 2048}
"""Knobs of every preset for 24 GB of accelerator memory and more."""


@dataclass(frozen=True)
class AdapterRecipe(Recipe):
    """Knobs of the methods that may start from an existing policy."""

    start_from: str = BASE
    """`base`: a fresh adapter; `champion`: the agent's champion (the base without one on this base model); `sft`: SFT
    on what people wrote and liked, trained first; else a policy's name. The reference stays the base model, so that
    generations cannot drift from it unnoticed."""
    warm_up_steps: int = 0
    """Steps of supervised fine-tuning on all judged responses, liked or not, before a preference loss (DPO, KTO), in at
    most six passes. Its result replaces the base as reference (`rl.training.preference`). For answers that the base
    model would not write by itself."""
    warm_up_learning_rate: float = 0.0
    """Learning rate of the warm-up; 0 uses `learning_rate`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("warm_up_steps", "warm_up_learning_rate")
        if not self.start_from:
            raise RecipeError("start_from must be base, champion or the name of a policy, found nothing")

    def warm_up(self, responses: int) -> int:
        """Optimiser steps of the warm-up on this many judged responses."""
        return min(self.warm_up_steps, MOST_WARM_UP_PASSES * math.ceil(self._steps_per_epoch(responses)))


@dataclass(frozen=True)
class SampledRecipe(AdapterRecipe):
    """Knobs of the methods whose policy samples answers that rewards judge."""

    epochs: float = 1.0
    lr_scheduler: str = "constant"
    warmup_ratio: float = 0.0
    logging_steps: int = 1
    reward: str = "agent"
    """Reward specs separated by commas (see `--reward`); their mean is the reward."""
    missing_eos_penalty: float = 1.0
    """Penalty on the score of a response that did not end within `max_new_tokens`."""
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    constrained_decoding: bool = True
    """Sample among the listed responses or within the agent's JSON schema, as served; probabilities are over allowed
    tokens. vLLM samples freely."""
    eval_prompts: int = 64
    """Most held-out prompts answered in an evaluation."""
    reference: str = START
    """Reference policy of the KL penalty and of `max_kl`: `start`, the policy training starts from (Ouyang et al. 2022,
    arXiv 2203.02155), or `base`."""
    max_kl: float = 30.0
    """Nats per response from the reference at which the run stops as diverged (or half a nat per token, if that is
    more); 0 turns off this and the checks of length, repetition and validity."""
    allow_constant_reward: bool = False
    """Train even if every answer, or every valid one, earns the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero("max_new_tokens", "temperature", "top_p", "eval_prompts")
        self._not_negative("max_kl", "missing_eos_penalty", "top_k")
        self._one_of("reference", (START, BASE))
        if self.top_p > 1:
            raise RecipeError(f"top_p must be at most 1, found {self.top_p!r}")
        if self.max_new_tokens >= self.max_length:
            raise RecipeError(
                f"max_length ({self.max_length}) must leave room for a prompt beside max_new_tokens "
                f"({self.max_new_tokens})"
            )
        if self.checkpoints == "epoch":
            raise RecipeError(
                "checkpoints epoch is for methods that pass over rows; this one counts steps: see save_steps"
            )
        if self.lora_dropout:
            raise RecipeError("lora_dropout must be 0: the ratio of an unchanged policy must be 1")

    @property
    def has_adapter_reference(self) -> bool:
        """True if the reference is the adapter that training starts from."""
        return self.reference == START and self.start_from != BASE


SAMPLING_OPTIONS = {
    "max_new_tokens": "Most tokens of a sampled response. Example: --max-new-tokens 64",
    "temperature": "Sampling temperature, above 0. Example: --temperature 0.9",
}
"""Options of the commands of these methods."""


DROP, KEEP = "drop", "keep"

ROWS_PER_REHEARSED = 4
"""Training rows of a step per rehearsed general prompt."""


@dataclass(frozen=True)
class AnswerRecipe(AdapterRecipe):
    """Knobs of the methods that learn from recorded answers, which may have recorded reasoning."""

    reasoning: str = DROP
    """Recorded reasoning: `drop` trains on answers alone, `keep` also on the reasoning before them, in the base model's
    chat template. Reasoning of earlier turns is never trained."""
    general_weight: float = 0.0
    """Weight of the KL to the base model on its own answers to general prompts, one per four training rows of a step.
    Keeps the base model's other abilities. 0 leaves it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("general_weight")
        self._one_of("reasoning", (DROP, KEEP))

    @property
    def rehearsed_rows(self) -> int:
        """General prompts rehearsed per step."""
        return max(1, self.batch_size * self.gradient_accumulation // ROWS_PER_REHEARSED)
