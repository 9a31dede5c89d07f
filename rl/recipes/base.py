"""The knobs every method has, checked when a recipe is made, those of the methods that train an adapter, and Method:
what is known of a way to learn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

MOST_PASSES = 12
"""Passes over the same rows that `min_steps` may ask for where they are judgements: beyond them a policy learns the
rows, not the taste."""

MOST_WARM_UP_PASSES = 6
"""Passes over the judged responses in a warm-up, at most: their wording is wanted, not which one went with what."""


class RecipeError(ValueError):
    """A knob that does not exist or a value outside its range; the message names the knob and what is allowed."""


@dataclass(frozen=True)
class BasicRecipe:
    """Knobs of every method, those that train no adapter included. Ranges are checked on construction, so no run starts
    on a typo."""

    seed: int = 42
    replay_share: float = 1.0
    """Share of the prompts with older feedback (learnt from by an earlier run) that are trained on again, in [0, 1];
    1 trains on all there is."""

    @property
    def constrains(self) -> bool:
        """True if a method samples its own answers, within the form that their agent serves."""
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
        """Optimiser steps of a run on so many training rows; none where a method makes no steps."""
        return 0

    def fit_to_rows(self, rows: int) -> Self:
        """A copy whose passes fit so many training rows."""
        return self

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


@dataclass(frozen=True)
class Recipe(BasicRecipe):
    """Knobs of every method that trains an adapter."""

    most_passes: ClassVar[int] = MOST_PASSES
    """Passes over the same rows that `min_steps` may ask for."""
    many_rows_factor: ClassVar[int] = 1
    """Factor on `min_steps` where that takes MOST_PASSES passes at most: many rows need more steps than few."""
    supports_full_finetuning: ClassVar[bool] = False
    """True where its trainer can do full fine-tuning (`lora_r` 0)."""
    epochs: float = 3.0
    """Passes over the training pairs; fractions allowed."""
    max_steps: int = -1
    """Optimiser steps; -1 means as many as `epochs` asks for."""
    min_steps: int = 0
    """Least optimiser steps: few rows are passed over again until there are so many (at most `most_passes` times). 0
    never adds a pass. Has no say where `epochs` or `max_steps` is given."""
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
    """Rank of the LoRA adapter. 0 is full fine-tuning: every weight is trained but those of the embeddings and the
    output head."""
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
    patience: int = 0
    """Evaluations on the eval split without a better one after which training stops; the weights are then those of the
    best evaluation. 0 makes every step and takes the last weights; so does an eval split too small to tell
    (`rl.training.early_stopping`)."""
    checkpoints: str = "newest"
    """`newest` keeps what a stopped run goes on from; `epoch` also keeps the adapter of each whole epoch, which can be
    exported (`export_model --checkpoint`)."""
    minutes: float = 0.0
    """Most minutes of a run with all its stages; 0 sets no limit. Passes and rows are fitted to it before training
    (`rl.recipes.fit`), and training ends at it with the weights it has. Base models other than the bundled one have 20
    on a machine without an accelerator, where neither preset, passes nor steps are named."""
    curriculum: str = "none"
    """Training rows easy to hard in each epoch: by `margin` (pairs), `length` or number of `steps`; `none` shuffles."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._above_zero(
            "epochs",
            "batch_size",
            "gradient_accumulation",
            "learning_rate",
            "lora_alpha",
            "max_length",
            "max_completion_length",
            "save_steps",
            "logging_steps",
            "max_grad_norm",
        )
        self._not_negative(
            "lora_r", "weight_decay", "eval_steps", "micro_tokens", "min_steps", "patience", "minutes"
        )
        for knob in ("warmup_ratio", "lora_dropout"):
            if not 0 <= getattr(self, knob) < 1:
                raise RecipeError(f"{knob} must be in [0, 1), found {getattr(self, knob)!r}")
        if self.whole and not self.supports_full_finetuning:
            raise RecipeError(
                "lora_r 0, full fine-tuning: this method trains LoRA adapters only; expected a rank above 0"
            )
        if self.whole and (self.quantization != "none" or self.lora_dropout):
            raise RecipeError(
                "lora_r 0, full fine-tuning, trains the weights themselves: expected --set quantization=none and "
                f"--set lora_dropout=0, found {self.quantization} and {self.lora_dropout:g}"
            )
        if self.max_steps == 0 or self.max_steps < -1:
            raise RecipeError(
                f"max_steps must be above 0, or -1 for as many as epochs asks for; found {self.max_steps}"
            )
        self._one_of("curriculum", ORDERS)
        self._one_of("checkpoints", ("newest", "epoch"))
        self._one_of("quantization", ("none", "4bit"))
        self._one_of("lr_scheduler", ("cosine", "linear", "constant", "constant_with_warmup"))

    @property
    def whole(self) -> bool:
        """True for full fine-tuning: the base model's weights are trained, without LoRA."""
        return self.lora_r == 0

    @property
    def trained_copies(self) -> int:
        """Sets of weights that are trained at once: the policy's; an actor-critic method has a second."""
        return 1

    @property
    def has_adapter_reference(self) -> bool:
        """True if the reference is an adapter, kept in memory beside the policy's; False where it is the base."""
        return False

    def steps(self, rows: int) -> int:
        """Optimiser steps of a run on so many training rows, in one process."""
        if rows == 0 or self.max_steps > 0:
            return self.max_steps if rows else 0
        return max(1, math.ceil(self.fit_to_rows(rows).epochs * self._steps_per_epoch(rows)))

    def _steps_per_epoch(self, rows: int) -> float:
        return math.ceil(math.ceil(rows / self.batch_size) / self.gradient_accumulation)

    def fit_to_rows(self, rows: int) -> Self:
        """A copy whose `epochs` give at least `min_steps` optimiser steps on so many training rows."""
        if rows == 0 or self.max_steps > 0 or self.min_steps == 0:
            return self
        steps = self._steps_per_epoch(rows)
        passes = max(
            min(math.ceil(self.min_steps / steps), self.most_passes),
            min(math.ceil(self.many_rows_factor * self.min_steps / steps), MOST_PASSES),
        )
        return dataclasses.replace(self, epochs=max(self.epochs, float(passes)))


def positive_number(value: Any) -> int | None:
    """A knob that was given as a number above 0 or as its text; None for anything else, which is refused later."""
    try:
        number = int(float(value))
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number > 0 else None


def divisor_of(size: int, most: int) -> int:
    """The largest divisor of a size that is at most `most`."""
    return next(part for part in range(min(size, most), 0, -1) if size % part == 0)


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
"""Start of a run from an SFT policy that it trains first, as a stage, on what people wrote and liked."""

DATASET_KINDS = ("pairs", "labels", "corrections", "scores", "groups", "prompts", "pairs_and_scores")
"""Kinds of datasets that feedback is made into: those of `rl.models.Snapshot`."""


@dataclass(frozen=True)
class Method:
    """One way to learn from feedback: all that commands, REST, pages and jobs know of it."""

    slug: str
    """Its command is `train_<slug>`, its section of RATCHET_CONFIG `<slug>`."""
    kind: str
    """The dataset it is fed, one of DATASET_KINDS."""
    presets: Mapping[str, BasicRecipe] = field(repr=False)
    """Preset -> recipe, all of one class; `default` is among them."""
    trainer: str
    """`module:Class`, imported where a run is trained; the class has the constructor, load_base_model and train of
    `rl.training.dpo.DPOTrainer`."""
    estimate: str
    """`module:function` that foresees steps, minutes and memory for a dry run, as `rl.training.estimates.dpo` does."""
    help: str = field(repr=False)
    """Text of `train_<slug> --help`: what it learns from, and an example."""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Knobs of the recipe that are options of the command -> what `--help` says of each."""
    flags: Mapping[str, Flag] = field(default_factory=dict, repr=False)
    """Options without a value, by name."""
    policy: bool = True
    """True if what comes out can answer, and enters the registry; a reward model only judges."""
    rewarded: bool = False
    """True if it needs reward functions (`--reward`), which stand in its recipe's knob `reward`."""
    kl_knob: str = ""
    """Knob that `--kl-coef` sets, of rewarded methods."""
    adapter: bool = True
    """True of a method that trains an adapter of a base model, which needs torch; a linear policy needs neither."""

    @property
    def recipe(self) -> type[BasicRecipe]:
        """Class of its recipes."""
        return type(self.presets["default"])

    def preset(self, wanted: str) -> str:
        """The preset of that name, which fits the hardware; `default` where the method has none."""
        return wanted if wanted in self.presets else "default"


@dataclass(frozen=True)
class Flag:
    """Option of a training command that sets one knob to one value."""

    knob: str
    value: Any
    help: str


@dataclass(frozen=True)
class AdapterRecipe(Recipe):
    """Knobs of the methods that may go on from a policy there is."""

    start_from: str = BASE
    """`base` begins with a fresh adapter, `champion` with the weights of the agent's champion (the base where there is
    none on this base model), `sft` with those of SFT on what people wrote and liked, trained first as a stage, a
    policy's name with that policy's. The reference stays the base model in each case, so
    that generations cannot walk away from it unnoticed."""
    warm_up_steps: int = 0
    """Steps of supervised fine-tuning on all responses that were judged, liked or not, before a preference loss (DPO,
    KTO), in six passes at most; what comes of it is the reference in the base's place (`rl.training.warm_up`). For
    answers that the base model would not write by itself."""
    warm_up_learning_rate: float = 0.0
    """Learning rate of the warm-up; 0 takes `learning_rate`."""
    search: int = 0
    """Recipes that are tried on the eval split, this one first; the best is kept (`rl.training.search`). 0 and 1 train
    this one alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("warm_up_steps", "warm_up_learning_rate", "search")
        if not self.start_from:
            raise RecipeError("start_from must be base, champion or the name of a policy, found nothing")

    def warm_up(self, responses: int) -> int:
        """Optimiser steps of the warm-up on so many judged responses."""
        return min(self.warm_up_steps, MOST_WARM_UP_PASSES * math.ceil(self._steps_per_epoch(responses)))


DROP, KEEP = "drop", "keep"

ROWS_PER_REHEARSED = 4
"""Training rows of a step for each general prompt that is rehearsed beside them."""


@dataclass(frozen=True)
class AnswerRecipe(AdapterRecipe):
    """Knobs of the methods that learn from recorded answers, beside which a model's reasoning may be recorded."""

    reasoning: str = DROP
    """Reasoning recorded beside answers: `drop` trains on the answers alone; `keep` also on the reasoning before them,
    as the base model's chat template writes it. Reasoning of earlier turns is never trained."""
    general_weight: float = 0.0
    """Weight, beside the loss, of the KL to the base model on its own answers to general prompts: one for every four
    training rows of a step. It keeps what the base can do outside the task. 0 leaves it out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._not_negative("general_weight")
        self._one_of("reasoning", (DROP, KEEP))

    @property
    def rehearsed_rows(self) -> int:
        """General prompts that a step rehearses."""
        return max(1, self.batch_size * self.gradient_accumulation // ROWS_PER_REHEARSED)


SEARCH = {
    "search": "Number of recipes (learning rate, epochs, beta) to try; the best on the eval split is kept. "
    "Example: --search 8"
}
"""The option of the methods whose recipes can be compared on the eval split."""


# --- Order of the training rows ---


ORDERS = ("none", "margin", "length", "steps")
"""`margin`: pairs whose sides people saw furthest apart first. `length`: short prompts and responses first. `steps`:
few messages, tool calls and steps of a trace first."""


def curriculum_order(rows: Sequence[Mapping[str, Any]], by: str) -> list[int]:
    """Places of the rows, easiest first; rows alike stay in their order, and `none` is the order given.

    Raises ValueError for another name, and for `margin` where a row has none.
    """
    if by not in ORDERS:
        raise ValueError(f"an order is one of {', '.join(ORDERS)}; found {by!r}")
    if by == "none":
        return list(range(len(rows)))
    hard = [difficulty(row, by) for row in rows]
    return sorted(range(len(rows)), key=lambda i: hard[i])


def difficulty(row: Mapping[str, Any], by: str) -> float:
    """Difficulty of a row; only the order of these numbers means something."""
    if by == "margin":
        margin = row.get("margin")
        if not isinstance(margin, (int, float)):
            raise ValueError(
                "curriculum=margin needs rows with a margin, which preference pairs have; use length or steps"
            )
        return -float(margin)
    said = [row[side] for side in ("completion", "chosen", "rejected") if side in row]
    said += row.get("completions") or []
    if by == "length":
        return float(sum(_characters(part) for part in [row.get("prompt") or [], *said]))
    steps = len(row.get("prompt") or []) + sum(_calls(part) for part in said)
    state = row.get("state")
    if isinstance(state, Mapping):
        steps += len(state.get("steps") or [])
    return float(steps)


def _characters(said: Any) -> int:
    if isinstance(said, str):
        return len(said)
    return sum(len(message.get("content") or "") for message in said)


def _calls(said: Any) -> int:
    """Messages and tool calls of a response; a text is one message."""
    if isinstance(said, str):
        return 1
    return sum(1 + len(message.get("tool_calls") or []) for message in said)
