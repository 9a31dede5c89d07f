"""Estimates of a run before it is started: steps, minutes, peak memory. One function per method."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rl.bundled_models import BUNDLED
from rl.linear.fit import MEMORY_GB, SECONDS_PER_ROW
from rl.recipes import AdapterRecipe, DPORecipe, KTORecipe, Recipe, RewardModelRecipe
from rl.recipes.base import AnswerRecipe
from rl.recipes.fit import Speed
from rl.training.early_stopping import evaluation_interval, stops_early
from rl.training.encoding import EncodedResponse, Encoder
from rl.training.hardware import Hardware, detect
from rl.training.loading import load_shape
from rl.training.machine import GB
from rl.training.profiler import (
    ASKABLE,
    GenerationLoad,
    MeasuredBase,
    MicroBatchProfile,
    profile_base,
    profile_micro_batches,
)
from rl.training.reward_model import SCALE_ROWS
from rl.training.run_context import training_hardware
from rl.training.sampling import LengthGroupedSampler

T = TypeVar("T")

SAMPLE = 512
"""Rows whose lengths are sampled."""

HELD_OUT_SHARE = 1 / 8
"""Held-out rows for each training row: the split's own 10 to 80."""


@dataclass(frozen=True)
class Estimate:
    """Steps, time and memory of a run on this machine; `reasons` says how each figure was made."""

    steps: int
    minutes: float
    memory_gb: float
    reasons: dict[str, str] = field(default_factory=dict)
    speed: Speed = field(default_factory=lambda: Speed(0.0, 0.0))


@dataclass(frozen=True)
class ExtraWork:
    """Work of a run beside its training micro-batches."""

    rows: int
    """Rows that are trained on in an epoch."""
    steps: int
    forwards: float = 0.0
    """Passes forward alone, in micro-batches, over the whole run."""
    once: float = 0.0
    """Those of `forwards` that are made before the first step, however many steps follow."""
    warm_up: float = 0.0
    """Those of `once` that a warm-up takes."""
    samplings: float = 0.0
    """Batches of prompts answered over the whole run."""
    micros: float | None = None
    """Training micro-batches over the whole run; None: `gradient_accumulation` to a step."""
    scores_packed: bool = False
    """True if responses are scored on packed rows beside what is trained."""
    note: str = ""


def estimate_from_profile(
    shape: tuple[Any, Encoder, int],
    recipe: Recipe,
    hardware: Hardware,
    micros: Sequence[Sequence[EncodedResponse]],
    work: ExtraWork,
    *,
    packed: bool,
    causal: bool = True,
    generation: GenerationLoad | None = None,
    sample_s: float | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """Time and memory of some work, from a profile of its micro-batches: on the `base`, where it is given and small
    enough to be loaded, else on random layers of its shape.

    `sample_s` are the seconds of a sampling where they are known; else `generation` is sampled while profiling.
    """
    config, encoder, parameters = shape
    hardware = training_hardware(hardware, recipe)
    if (
        base is not None
        and causal
        and not recipe.whole
        and generation is None
        and parameters <= ASKABLE
        and base.base_model != BUNDLED
    ):
        profile = profile_base(base, recipe, micros, packed=packed)
    else:
        profile = profile_micro_batches(
            config, encoder, recipe, hardware, micros, packed=packed, causal=causal, generation=generation
        )
    micro_count = work.steps * recipe.gradient_accumulation if work.micros is None else work.micros
    sampling_s = profile.sample_s if sample_s is None else sample_s
    recomputed = profile.forward_s if recipe.gradient_checkpointing else 0.0
    seconds = (
        micro_count * (profile.train_s + recomputed)
        + work.forwards * profile.forward_s
        + work.samplings * sampling_s
        + work.steps * profile.train_s * general_share(recipe, micros)
        + profile.setup_s
    )
    memory, memory_note = memory_estimate(
        config.get_text_config(), recipe, hardware, parameters, profile,
        packed=packed or work.scores_packed, rehearsed=general_share(recipe, micros),
    )  # fmt: skip
    tokens = sum(len(i.prompt_ids) + len(i.response_ids) for micro in micros for i in micro) / len(micros)
    parts = [
        f"{micro_count:,.0f} micro-batches of {len(micros[0])} responses, {tokens:,.0f} tokens before anything is "
        f"shared, at {1000 * profile.train_s:,.0f} ms ({profile.strategy} forward and backward, measured)"
    ]
    if work.forwards:
        parts.append(f"{work.forwards:,.0f} forward at {1000 * profile.forward_s:,.0f} ms")
    if work.samplings:
        parts.append(f"{work.samplings:,.0f} samplings at {sampling_s:.2f} s")
    parts += [work.note] if work.note else []
    once_s = work.once * profile.forward_s + profile.setup_s
    return Estimate(
        steps=work.steps,
        minutes=seconds / 60,
        memory_gb=memory,
        speed=Speed((seconds - once_s) / max(work.steps, 1), once_s, work.warm_up * profile.forward_s),
        reasons={
            "steps": f"{work.rows:,} rows, {recipe.batch_size} to a micro-batch, "
            f"{recipe.gradient_accumulation} micro-batches to a step",
            "minutes": "; ".join(parts),
            "memory_gb": memory_note,
        },
    )


GENERAL_TOKENS = 90
"""Tokens of a general prompt with the answer that is rehearsed, padding included."""


def general_share(recipe: Recipe, micros: Sequence[Sequence[EncodedResponse]]) -> float:
    """Tokens of the general prompts that a step rehearses, by those of a micro-batch; 0 where it rehearses none."""
    if not isinstance(recipe, AnswerRecipe) or not recipe.general_weight:
        return 0.0
    tokens = sum(len(i.prompt_ids) + len(i.response_ids) for micro in micros for i in micro) / len(micros)
    return GENERAL_TOKENS * recipe.rehearsed_rows / tokens


def evaluations(recipe: Recipe, steps: int, rows: int) -> int:
    """Largest number of evaluations in a run of so many steps on so many rows: see `rl.training.early_stopping`."""
    if not stops_early(recipe, round(rows * HELD_OUT_SHARE)) and recipe.eval_steps == 0:
        return 1
    return -(-steps // evaluation_interval(recipe, steps))


def warm_up_forwards(recipe: AdapterRecipe, responses: int) -> float:
    """The steps of a warm-up on so many responses, each as long as three passes forward."""
    return 3.0 * recipe.warm_up(responses)


def estimate_zero(what: str) -> Estimate:
    return Estimate(0, 0.0, 0.0, {"steps": f"no {what} is left to train on"})


def memory_estimate(
    text: Any,
    recipe: Recipe,
    hardware: Hardware,
    parameters: int,
    found: MicroBatchProfile,
    *,
    packed: bool,
    rehearsed: float = 0.0,
) -> tuple[float, str]:
    """Peak memory: weights, LoRA with its optimiser, what the largest micro-batch keeps, the process itself.
    rehearsed: share of it that the general prompts keep beside it."""
    hidden, layers = int(text.hidden_size), int(text.num_hidden_layers)
    middle = getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden
    number = 4 if hardware.dtype == "float32" else 2
    four_bit = recipe.quantization == "4bit" and hardware.supports_4bit
    # NF4 with double quantisation takes 4.127 bits a weight (Dettmers et al. 2023); embeddings stay as they are
    bases = (
        2 if isinstance(recipe, AdapterRecipe) and recipe.warm_up_steps else 1
    )  # a warm-up is trained on its own
    weights = bases * parameters * (0.65 if four_bit else number)
    trained = parameters if recipe.whole else layers * recipe.lora_r * (8 * hidden + 3 * (hidden + middle))
    # float32 weight, gradient, two moments; of a reference the weight alone
    lora = trained * (16 * recipe.trained_copies + 4 * recipe.has_adapter_reference)
    what = "LoRA" if not recipe.whole else "trained copy" if recipe.trained_copies == 1 else "trained copies"
    saved_bytes = found.checkpoint_bytes if recipe.gradient_checkpointing else found.saved_bytes
    # one layer's gradients on the way back are about what it kept
    activations = (1 + rehearsed) * saved_bytes + found.saved_bytes / max(layers, 1)
    process = PROCESS_GB["cuda" if hardware.device == "cuda" else "cpu"] * GB
    kernels = KERNELS_GB[packed] * GB if hardware.device == "cpu" else 0.0
    total = (weights + lora + activations + process + kernels) / GB
    how = (
        f"{weights / GB:.2f} weights, {lora / GB:.2f} {what} and optimiser, {activations / GB:.2f} activations of the "
        f"longest micro-batch (counted), {(process + kernels) / GB:.1f} the process itself with its compiled kernels"
    )
    return total, how


PROCESS_GB = {"cpu": 0.8, "cuda": 0.6}
"""Python with torch, transformers and Django; on a GPU, the CUDA context there."""

KERNELS_GB = {True: 0.7, False: 0.2}
"""oneDNN compiles a kernel for each shape of product it meets and keeps 64 of them (`backend.settings`): with rows of
many lengths a run on a CPU grows in its first steps, then levels off. Packed rows (true) have more."""


# --- Per method ---------------------------------------------------------------------------------------------


def dpo(
    base_model: str,
    recipe: DPORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """Steps, minutes and peak memory of `DPOTrainer.train(rows)`, training nothing and loading no weights.

    Lengths come from the first rows; time from a profile of random layers of the architecture here and now, so a busy
    machine gives a longer estimate. Raises PolicyLoadError for a base that cannot be read, ValueError for rows of
    another shape.
    """
    hardware = hardware or detect()
    shape = load_shape(base_model)
    sample = list(rows)[:SAMPLE]
    pairs = shape[1].pairs(sample, recipe.max_length, recipe.max_completion_length).rows
    if not pairs:
        return estimate_zero("pair")
    order = LengthGroupedSampler(
        [len(p["prompt_ids"]) + max(len(p["chosen_ids"]), len(p["rejected_ids"])) for p in pairs],
        recipe.batch_size,
        recipe.seed,
        lambda: 0,
        [hash(tuple(p["prompt_ids"])) for p in pairs] if recipe.group_prompts else None,
    )
    items = [
        [EncodedResponse(pairs[i]["prompt_ids"], pairs[i][side]) for side in ("chosen_ids", "rejected_ids")]
        for i in order
    ]
    micros = [[item for pair in batch for item in pair] for batch in batches(items, recipe.batch_size)]
    count = round(len(rows) * len(pairs) / len(sample))
    steps = recipe.steps(count)
    once = count / recipe.batch_size
    held_out = once * HELD_OUT_SHARE
    looked = evaluations(recipe, steps, count) * held_out
    reference = (
        once + held_out if recipe.precompute_reference else steps * recipe.gradient_accumulation + looked
    )
    warm_up = warm_up_forwards(recipe, 2 * count)
    work = ExtraWork(
        count,
        steps,
        reference + looked + warm_up,
        once=(once + held_out if recipe.precompute_reference else 0.0) + warm_up,
        warm_up=warm_up,
        note="the reference counted in full: what earlier runs computed is kept",
    )
    return estimate_from_profile(shape, recipe, hardware, micros, work, packed=True, base=base)


def kto(
    base_model: str,
    recipe: KTORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """The same of `KTOTrainer.train(rows)`."""
    hardware = hardware or detect()
    shape = load_shape(base_model)
    items = (
        shape[1]
        .column(_sample(rows, recipe), "completion", recipe.max_length, recipe.max_completion_length)
        .items
    )
    if not items:
        return estimate_zero("response")
    steps = recipe.steps(len(rows))
    mismatched = [
        EncodedResponse(item.prompt_ids, other.response_ids)
        for item, other in zip(items, [*items[1:], items[0]], strict=True)
    ]
    cut = zip(batches(items, recipe.batch_size), batches(mismatched, recipe.batch_size), strict=True)
    micros = [[*own, *others] for own, others in cut]
    once = len(rows) / recipe.batch_size
    warm_up = warm_up_forwards(recipe, len(rows))
    reference = once * (1 + HELD_OUT_SHARE)
    looked = evaluations(recipe, steps, len(rows)) * once * HELD_OUT_SHARE
    work = ExtraWork(
        len(rows),
        steps,
        reference + looked + warm_up,
        once=reference + warm_up,
        warm_up=warm_up,
        note="the reference counted in full: what earlier runs computed is kept",
    )  # fmt: skip
    return estimate_from_profile(shape, recipe, hardware, micros, work, packed=True, base=base)


def sft(
    base_model: str,
    recipe: Recipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """The same of `SFTTrainer.train(rows)`."""
    hardware = hardware or detect()
    shape = load_shape(base_model)
    items = (
        shape[1]
        .column(
            _sample(rows, recipe), "completion", recipe.max_length, recipe.max_completion_length, turns=True
        )
        .items
    )
    if not items:
        return estimate_zero("demonstration")
    steps = recipe.steps(len(rows))
    once = len(rows) / recipe.batch_size
    looked = evaluations(recipe, steps, len(rows)) * once * HELD_OUT_SHARE
    reference = once * (1 + HELD_OUT_SHARE)
    work = ExtraWork(len(rows), steps, reference + looked, once=reference, scores_packed=True)
    return estimate_from_profile(
        shape, recipe, hardware, batches(items, recipe.batch_size), work, packed=False, base=base
    )


def reward_model(
    base_model: str,
    recipe: RewardModelRecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """The same of `RewardModelTrainer.train(rows)`."""
    if recipe.is_linear:
        minutes = len(rows) * SECONDS_PER_ROW / 60
        return Estimate(
            recipe.steps(len(rows)), minutes, MEMORY_GB, {"minutes": "one fit, without a base model"}
        )
    hardware = hardware or detect()
    causal = recipe.architecture != "encoder"
    shape = load_shape(base_model, causal=causal)
    sides = ("chosen", "rejected") if recipe.objective == "pairwise" else ("completion",)
    sample, _ = shape[1].written(_sample(rows, recipe))
    columns = [
        shape[1].column(sample, side, recipe.max_length, recipe.max_completion_length).items for side in sides
    ]
    if not columns[0]:
        return estimate_zero("row")
    cut = [batches(column, recipe.batch_size) for column in columns]
    micros = [[item for column in parts for item in column] for parts in zip(*cut, strict=True)]
    steps = recipe.steps(len(rows))
    # its scale is read off the training responses at the end, its accuracy off the held-out ones beside their loss
    once = min(len(rows), SCALE_ROWS) / recipe.batch_size
    looked = (1 + evaluations(recipe, steps, len(rows))) * len(rows) / recipe.batch_size * HELD_OUT_SHARE
    work = ExtraWork(len(rows), steps, once + looked, once=once)
    return estimate_from_profile(
        shape, recipe, hardware, micros, work, packed=causal, causal=causal, base=base
    )


def _sample(rows: Sequence[T], recipe: Recipe) -> list[T]:
    """Some rows in the order of training: those of one prompt that lie together here are parted by its shuffle."""
    if recipe.curriculum != "none":
        return list(rows)[:SAMPLE]
    return random.Random(recipe.seed).sample(list(rows), min(SAMPLE, len(rows)))


def batches(items: Sequence[T], size: int) -> list[list[T]]:
    """Whole batches of the items; one of all of them where there are fewer."""
    return [list(items[start : start + size]) for start in range(0, max(len(items) - size, 0) + 1, size)]
