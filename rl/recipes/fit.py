"""Fits recipes to rows, base model and minutes, in the knobs that nobody named. Pure.

The preset `cpu` was tuned on the bundled 3M-parameter model, which learns language and task at once: many passes at a
high rate. A real base model needs fewer and smaller steps, and each takes longer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from rl.recipes.base import AdapterRecipe, Recipe

MINUTES = 20.0
"""Default time limit without an accelerator, for base models other than the bundled one."""

RATES = ("learning_rate", "warm_up_learning_rate", "value_learning_rate")

SMALL = 1e9
"""Base models below so many parameters are trained by the preset `cpu` on an accelerator too: its rates and steps were
measured on models of 3M to 270M, and those of the other presets are for models of some billions."""

LARGE = 2e9
"""Base models of at least this many parameters get a LoRA of rank 8, enough for some thousand rows."""

ACTIVATION_BYTES = 2e9
"""Memory for the activations of one micro-batch."""

TOKEN_BYTES = 1.2e6
"""Activation bytes per token in float32 at REFERENCE_PARAMETERS (30 layers, width 576); they grow with the square root
of the parameters (2.9e6 at 1B, 10.7e6 at 8B)."""

REFERENCE_PARAMETERS = 135e6

SHORTEST, LONGEST = 256, 2048
"""Limits of the fitted `max_length`, in tokens."""

OVERHEAD = 0.12
"""Share of the minutes for loading, sampling answers before and after training, and saving."""

WARM_UP_SHARE = 0.3
"""Largest share of the minutes for a warm-up."""


@dataclass(frozen=True)
class Workload:
    """What a recipe is fitted to: training rows and base model."""

    rows: int
    tokens: float
    """Mean tokens of a row: its prompt and all its responses."""
    longest: int
    """Upper bound of the longest row's tokens."""
    parameters: int
    """Parameters of the base model."""
    device: str = "cpu"


@dataclass(frozen=True)
class Speed:
    """Measured seconds of a run."""

    step_s: float
    """Per optimiser step, with its share of the evaluations."""
    once_s: float
    """Passes over the rows before the first step: reference, warm-up."""
    warm_up_s: float = 0.0
    """Part of `once_s` for the warm-up."""


def rate_scale(parameters: int) -> float:
    """Factor on the learning rates of the preset `cpu`: 1 up to 135M parameters (docs/models.md), then falling.

    The best LoRA rate falls with model width as width^-0.78 (Schulman et al. 2025, "LoRA Without Regret"), about the
    fourth root of the parameters: 0.61 at 1B, 0.36 at 8B.
    """
    return min(1.0, (REFERENCE_PARAMETERS / parameters) ** 0.25)


def recipe_fitted(recipe: Recipe, work: Workload, named: Collection[str] = ()) -> Recipe:
    """The recipe with steps, batch, rate, rank and length fitted to the rows and the base model, except `named` knobs.

    Unchanged for a larger base model on an accelerator, where the preset was chosen by the device's memory.
    """
    if not work.rows or (work.device != "cpu" and work.parameters >= SMALL):
        return recipe
    knobs: dict[str, Any] = dict(_steps_of(recipe))
    scale = rate_scale(work.parameters)
    values = recipe.as_dict()
    knobs |= {rate: float(f"{values[rate] * scale:.2g}") for rate in RATES if values.get(rate)}
    if work.parameters >= LARGE:
        knobs |= {"lora_r": 8, "lora_alpha": 16}
    length = min(max(64 * math.ceil(work.longest / 64), SHORTEST), LONGEST)
    knobs["max_length"] = length + values.get("max_new_tokens", 0)
    knobs |= _batch_knobs(recipe, work)
    knobs = {knob: value for knob, value in knobs.items() if knob not in named}
    if {"batch_size", "mini_batch_size", "gradient_accumulation", "num_generations"} & set(named):
        knobs.pop("batch_size", None)
        knobs.pop("gradient_accumulation", None)
    return dataclasses.replace(recipe, **knobs)


def _steps_of(recipe: Recipe) -> dict[str, int]:
    values = recipe.as_dict()
    return {knob: min(least, values[knob]) for knob, least in recipe.least_steps.items() if values[knob]}


def _batch_knobs(recipe: Recipe, work: Workload) -> dict[str, int]:
    """Rows of a micro-batch that fit in memory, and micro-batches that keep the step's number of rows."""
    token_bytes = TOKEN_BYTES * math.sqrt(work.parameters / REFERENCE_PARAMETERS)
    return recipe.micro_batch(work.tokens, work.longest, ACTIVATION_BYTES / token_bytes)


@dataclass(frozen=True)
class MinutesFit:
    """A recipe that fits its minutes."""

    recipe: Recipe
    steps: int
    rows: int
    """Training rows it reads."""
    note: str = ""
    """What did not fit, in one sentence; empty if everything fits."""


def minutes_fitted(recipe: Recipe, rows: int, minutes: float, speed: Speed) -> MinutesFit:
    """The recipe with as many passes over `rows` as fit into `minutes`; below one pass, with fewer rows and at least
    one step."""
    wanted = recipe.steps(rows)
    once_s = speed.once_s
    seconds = 60 * minutes * (1 - OVERHEAD)
    if (
        isinstance(recipe, AdapterRecipe)
        and speed.warm_up_s > WARM_UP_SHARE * seconds
        and recipe.warm_up_steps
    ):
        kept = WARM_UP_SHARE * seconds / speed.warm_up_s
        fewer = max(1, math.floor(kept * recipe.warm_up(2 * rows)))
        recipe = dataclasses.replace(recipe, warm_up_steps=fewer)
        once_s -= (1 - kept) * speed.warm_up_s
    if not rows or once_s + wanted * speed.step_s <= seconds:
        return MinutesFit(recipe, wanted, rows)
    one_pass = dataclasses.replace(recipe, epochs=1.0, min_steps=0, max_steps=-1).steps(rows)
    steps = math.floor((seconds - once_s) / speed.step_s)
    if steps >= one_pass:
        fitted = _passes(recipe, steps, one_pass)
        shown = rows
        note = (
            f"{minutes:g} minutes are enough for {steps:,} of {wanted:,} steps: {fitted.epochs:.2g} passes over "
            f"{rows:,} rows"
        )
    else:
        share = seconds / (once_s + one_pass * speed.step_s)
        shown = min(rows, max(1, math.floor(share * rows)))
        steps = max(1, math.floor(share * one_pass))
        fitted = _passes(recipe, steps, one_pass)
        what = f"{shown:,} of {rows:,} rows, once each: {steps:,} of {wanted:,} steps"
        note = f"{minutes:g} minutes are enough for {what}"
    return MinutesFit(fitted, steps, shown, f"{note}; --minutes allows more")


def _passes(recipe: Recipe, steps: int, one_pass: int) -> Recipe:
    # rounded down, so that it is no step more
    passes = math.floor(1e4 * steps / one_pass) / 1e4
    return dataclasses.replace(recipe, epochs=max(passes, 1e-4), min_steps=0)


# --- Peak memory of a training by arithmetic ---

GB = 1e9

NF4_BYTES = 4.127 / 8
"""Bytes of a weight in NF4 with double quantisation (Dettmers et al. 2023)."""

HALF_BYTES = 2
"""Bytes of a weight of the embedding and the head, which stay as they are beside weights in NF4."""

FLOAT32_BYTES = 4
"""Bytes of a number on a CPU; on an accelerator it is half of that, so an estimate with it is an upper bound."""

PROCESS_GB = 1.5
"""Python with torch and transformers, with the kernels a CPU compiles for the shapes of a run."""


@dataclass(frozen=True)
class ModelShape:
    """Numbers of a model that decide its memory."""

    parameters: int
    hidden_size: int
    layers: int
    middle: int
    """Width within an MLP."""
    vocabulary: int = 0
    tied: bool = False
    """True if the head is the embedding."""

    def weight_bytes(self, number: float, *, four_bit: bool) -> float:
        """Bytes of the frozen weights, with `number` bytes each or in NF4."""
        if not four_bit:
            return self.parameters * number
        whole = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return (self.parameters - whole) * NF4_BYTES + whole * HALF_BYTES

    @classmethod
    def of(cls, config: Mapping[str, Any], parameters: int) -> Self:
        """The shape in a model's configuration (config.json)."""
        text = config.get("text_config") or config
        hidden = int(text.get("hidden_size") or text["n_embd"])
        return cls(
            parameters=parameters,
            hidden_size=hidden,
            layers=int(text.get("num_hidden_layers") or text["n_layer"]),
            middle=int(text.get("intermediate_size") or text.get("ffn_dim") or 4 * hidden),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", True))),
        )


@dataclass(frozen=True)
class Memory:
    """Bytes that a training takes at its peak."""

    weights: float
    trained: float
    """Trained weights with their gradients and optimiser."""
    kept: float
    """Activations of the largest micro-batch, kept for the backward pass."""
    process: float

    @property
    def gb(self) -> float:
        return (self.weights + self.trained + self.kept + self.process) / GB

    def words(self) -> str:
        return (
            f"{self.weights / GB:.2f} GB weights, {self.trained / GB:.2f} trained weights and optimiser, "
            f"{self.kept / GB:.2f} activations, {self.process / GB:.1f} the process itself"
        )


def memory_of(
    shape: ModelShape,
    recipe: Recipe,
    *,
    number: float,
    four_bit: bool,
    kept: float,
    process: float = PROCESS_GB * GB,
) -> Memory:
    """Memory of a training: `number` is the bytes of a frozen weight that is not in 4 bits.

    A warm-up is trained on a base of its own.
    """
    bases = 2 if getattr(recipe, "warm_up_steps", 0) else 1
    weights = bases * shape.weight_bytes(number, four_bit=four_bit)
    return Memory(weights, trained_bytes(shape, recipe), kept, process)


def trained_bytes(shape: ModelShape, recipe: Recipe) -> float:
    """Bytes of what is trained, in float32: weight, gradient, two moments; of a reference the weight alone."""
    width = 8 * shape.hidden_size + 3 * (shape.hidden_size + shape.middle)
    trained = shape.layers * recipe.lora_r * width
    return trained * (16.0 * recipe.trained_copies + 4.0 * recipe.has_adapter_reference)


def kept_bytes(
    shape: ModelShape, tokens: int, answered: int, size: float, *, sparing: bool, fused: bool = False
) -> float:
    """Bytes that a micro-batch keeps for the backward pass, at most; logits of `answered` of its tokens.

    sparing: gradient checkpointing, which keeps one layer whole. fused: with the kernels of packed rows on a GPU, whose
    layers keep the inputs of norms and products, the rotated queries, and gate and up alone.
    """
    width = 7.5 * shape.hidden_size + 2 * shape.middle if fused else 10 * shape.hidden_size + 3 * shape.middle
    per_layer = tokens * width * size
    return per_layer * (1 if sparing else shape.layers) + answered * shape.vocabulary * size


def kept_at_most(shape: ModelShape, recipe: Recipe, responses: int, size: float, *, sparing: bool) -> float:
    """`kept_bytes` of so many responses at the recipe's full length."""
    knobs = recipe.as_dict()
    answered = knobs.get("max_new_tokens") or recipe.max_completion_length
    return kept_bytes(shape, responses * recipe.max_length, responses * answered, size, sparing=sparing)


SIZES = {
    "0.5B": ModelShape(494_000_000, 896, 24, 4864, 151_936, tied=True),
    "1.5B": ModelShape(1_544_000_000, 1536, 28, 8960, 151_936, tied=True),
    "3B": ModelShape(3_086_000_000, 2048, 36, 11_008, 151_936, tied=True),
    "7B": ModelShape(7_616_000_000, 3584, 28, 18_944, 152_064),
    "8B": ModelShape(8_030_000_000, 4096, 32, 14_336, 128_256),
}
"""Size -> shape of a model that is often trained: Qwen2.5 of each size, and Llama 3.1 8B."""


@dataclass(frozen=True)
class Fit:
    """Memory that training a model of a size takes, and whether the machine has it."""

    size: str
    quantization: str
    """`none` or `4bit`."""
    gb: float
    """At most, at the peak."""
    fits: bool


def sizes_that_fit(
    memory_gb: float, recipe: Recipe, *, on_accelerator: bool, supports_4bit: bool
) -> list[Fit]:
    """Every size of SIZES, as it is and in 4 bits, trained by a recipe one pair at a time.

    A tenth of `memory_gb` is left to others.
    """
    found = []
    number = FLOAT32_BYTES / 2 if on_accelerator else FLOAT32_BYTES
    for size, shape in SIZES.items():
        kept = kept_at_most(shape, recipe, 2, number, sparing=True)
        for quantization in ("none", *(["4bit"] if supports_4bit else [])):
            memory = memory_of(shape, recipe, number=number, four_bit=quantization == "4bit", kept=kept)
            gb = round(memory.gb, 1)
            found.append(Fit(size, quantization, gb, gb <= 0.9 * memory_gb))
    return found
