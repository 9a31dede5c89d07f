"""Estimates of a run before it is started: steps, minutes, peak memory. One function per method."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from packed_forward.micro_batches import micro_batches
from rl.linear.fit import MEMORY_GB, SECONDS_PER_ROW
from rl.recipes import DPORecipe, GRPORecipe, KTORecipe, PPORecipe, Recipe, RewardModelRecipe, SFTRecipe
from rl.recipes.base import AnswerRecipe
from rl.recipes.fit import Speed
from rl.recipes.memory import GB, NF4_BYTES, ModelShape, trained_bytes, weights_bytes
from rl.rewards.catalogue import reward_models_named
from rl.training.adapter_trainer import evaluation_interval, stops_early
from rl.training.constrained_generation import AnswerForms
from rl.training.dpo import LengthGroupedSampler
from rl.training.encoding import EncodedResponse, Encoder, parts_alike, prompt_messages, response_text
from rl.training.hardware import Hardware, detect
from rl.training.loading import load_shape
from rl.training.policy import LoadedPolicy
from rl.training.profiler import (
    ASKABLE,
    MeasuredBase,
    MicroBatchProfile,
    SampledBatches,
    answers_sampled,
    profile_base,
    profile_micro_batches,
)
from rl.training.reward_model import SCALE_ROWS
from rl.training.rewarding import Prompts, answer_forms
from rl.training.run import training_hardware

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
    answers: SampledBatches | None = None,
    base: MeasuredBase | None = None,
) -> Estimate:
    """Time and memory of some work, from a profile of its micro-batches: on the `base`, where it is given and small
    enough to be loaded, else on random layers of its shape.

    `answers` are those that were sampled; where their seconds are not known, they are sampled while profiling.
    """
    config, encoder, parameters = shape
    sample_s = None if answers is None else answers.sample_s
    generation = answers.generation if answers is not None and sample_s is None else None
    hardware = training_hardware(hardware, recipe)
    if base is not None and causal and not recipe.whole and generation is None and parameters <= ASKABLE:
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
    memory, memory_note = memory_measured(
        config.get_text_config(),
        recipe,
        hardware,
        parameters,
        profile,
        packed=packed or work.scores_packed,
        rehearsed=general_share(recipe, micros),
    )
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
    """Largest number of evaluations in a run of so many steps on so many rows: see `rl.training.trl_trainer`."""
    eval_rows = round(rows * HELD_OUT_SHARE)
    if not stops_early(recipe, eval_rows) and recipe.eval_steps == 0:
        return 1
    return -(-steps // evaluation_interval(recipe, steps, eval_rows))


def estimate_zero(what: str) -> Estimate:
    return Estimate(0, 0.0, 0.0, {"steps": f"no {what} is left to train on"})


def memory_measured(
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
    shape = ModelShape(parameters, hidden, layers, middle)
    four_bit = recipe.quantization == "4bit" and hardware.supports_4bit
    size = NF4_BYTES if four_bit else 4 if hardware.dtype == "float32" else 2
    judges = reward_models_named(str(recipe.as_dict().get("reward", "")))
    weights, lora = weights_bytes(shape, recipe, size, judges=judges), trained_bytes(shape, recipe)
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
    whole = batches([pairs[i] for i in order], recipe.batch_size)
    parts = [part for batch in whole for part in micro_batches(batch, recipe.micro_tokens)]
    micros = [
        [
            EncodedResponse(pair["prompt_ids"], pair[side])
            for pair in part
            for side in ("chosen_ids", "rejected_ids")
        ]
        for part in parts
    ]
    cut = len(parts) / len(whole)
    count = round(len(rows) * len(pairs) / len(sample))
    steps = recipe.steps(count)
    once = cut * count / recipe.batch_size
    held_out = once * HELD_OUT_SHARE
    looked = evaluations(recipe, steps, count) * held_out
    reference = (
        once + held_out
        if recipe.precompute_reference
        else cut * steps * recipe.gradient_accumulation + looked
    )
    warm_up = _warm_up_passes(recipe, 2 * count, micros, cut)
    work = ExtraWork(
        count,
        steps,
        reference + looked + warm_up,
        micros=cut * steps * recipe.gradient_accumulation,
        once=(once + held_out if recipe.precompute_reference else 0.0) + warm_up,
        warm_up=warm_up,
        note="the reference counted in full: what earlier runs computed is kept",
    )
    return estimate_from_profile(shape, recipe, hardware, micros, work, packed=True, base=base)


def _warm_up_passes(
    recipe: AnswerRecipe, responses: int, micros: Sequence[Sequence[EncodedResponse]], cut: float = 1.0
) -> float:
    """Passes forward that a warm-up takes as long as: three for each micro-batch, `cut` into so many, and for the
    general prompts of each step."""
    a_step = cut * recipe.gradient_accumulation + general_share(recipe, micros)
    return 3.0 * recipe.warm_up(responses) * a_step


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
    warm_up = _warm_up_passes(recipe, len(rows), micros)
    reference = once * (1 + HELD_OUT_SHARE)
    looked = evaluations(recipe, steps, len(rows)) * once * HELD_OUT_SHARE
    work = ExtraWork(
        len(rows),
        steps,
        reference + looked + warm_up,
        once=reference + warm_up,
        warm_up=warm_up,
        note="the reference counted in full: what earlier runs computed is kept",
    )
    return estimate_from_profile(shape, recipe, hardware, micros, work, packed=True, base=base)


def sft(
    base_model: str,
    recipe: SFTRecipe,
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
    whole = batches(items, recipe.batch_size)
    micros = [part for micro in whole for part in _parts(micro, recipe.micro_tokens)]
    cut = len(micros) / len(whole)
    work = ExtraWork(
        len(rows),
        steps,
        cut * (reference + looked),
        once=cut * reference,
        micros=cut * steps * recipe.gradient_accumulation,
        scores_packed=True,
    )
    return estimate_from_profile(shape, recipe, hardware, micros, work, packed=False, base=base)


def _parts(micro: list[EncodedResponse], most: int) -> list[list[EncodedResponse]]:
    """The parts of a micro-batch that SFT computes at once."""
    lengths = [len(item.prompt_ids) + len(item.response_ids) for item in micro]
    if not 0 < most < len(micro) * max(lengths):
        return [micro]
    return [[micro[place] for place in places] for places in parts_alike(lengths, most)]


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


def ppo(
    base_model: str,
    recipe: PPORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    agent: str = "",
    base: MeasuredBase | None = None,
) -> Estimate:
    """Steps, minutes and peak memory of `PPOTrainer.train(rows)`, training nothing.

    A base of at most ASKABLE parameters is loaded and answers one step's prompts; of a larger one nothing is loaded and
    half of `max_new_tokens` taken for an answer. What rewards take that are not models is not counted. Raises
    PolicyLoadError, ValueError for rows of another shape.
    """
    hardware = training_hardware(hardware or detect(), recipe)
    shape = load_shape(base_model)
    prompts = _prompts(shape[1], rows, recipe)
    if not prompts.ids:
        return estimate_zero("prompt")
    samples = recipe.samples_per_prompt
    answers = answers_sampled(
        base_model,
        shape,
        recipe,
        prompts.ids,
        recipe.batch_size // samples,
        samples,
        hardware,
        base,
        _forms(recipe, agent, prompts),
    )
    size = recipe.mini_batch_size // recipe.gradient_accumulation
    micros = batches(answers.items, size)
    steps = recipe.steps(len(rows))
    networks = 2 if recipe.value_backbone == "adapter" else 1
    per_step = recipe.batch_size / size
    looked_at = _held_out_answers(recipe, len(rows), steps)
    models = reward_models_named(recipe.reward)
    work = ExtraWork(
        rows=len(rows),
        steps=steps,
        micros=steps * per_step * recipe.ppo_epochs * networks,
        forwards=steps * per_step * (networks + 1 + models) + looked_at / size * (2 + models),
        samplings=steps + looked_at / recipe.batch_size,
        note="rewards that are no models not counted",
    )
    return estimate_from_profile(
        shape, recipe, hardware, micros, work, packed=True, answers=answers, base=base
    )


def grpo(
    base_model: str,
    recipe: GRPORecipe,
    rows: Sequence[Any],
    *,
    hardware: Hardware | None = None,
    agent: str = "",
    base: MeasuredBase | None = None,
) -> Estimate:
    """The same of `GRPOTrainer.train(rows)`, of both modes."""
    hardware = training_hardware(hardware or detect(), recipe)
    shape = load_shape(base_model)
    prompts = _prompts(shape[1], rows, recipe)
    if not prompts.ids:
        return estimate_zero("prompt")
    steps = recipe.steps(len(rows))
    micro_count = steps * recipe.gradient_accumulation
    if recipe.mode == "logged":
        sample, _ = shape[1].written(list(rows)[:SAMPLE])
        texts = [
            [(prompt_messages(row, n), response_text({"a": said}, "a", n)) for said in row["completions"]]
            for n, row in enumerate(sample)
        ]
        encoded = [
            shape[1].responses(group, recipe.max_length, recipe.max_completion_length) for group in texts
        ]
        micros = [[item for group in batch for item in group] for batch in batches(encoded, recipe.groups)]
        # the base's pass, once for each micro-batch
        return estimate_from_profile(
            shape, recipe, hardware, micros, ExtraWork(len(rows), steps, micro_count), packed=True, base=base
        )
    at_once = recipe.groups * recipe.gradient_accumulation
    answers = answers_sampled(
        base_model,
        shape,
        recipe,
        prompts.ids,
        at_once,
        recipe.num_generations,
        hardware,
        base,
        _forms(recipe, agent, prompts),
    )
    micros = batches(answers.items, recipe.batch_size)
    looked_at = _held_out_answers(recipe, len(rows), steps)
    models = reward_models_named(recipe.reward)
    fresh = micro_count / recipe.num_iterations
    alone = sum(len(i.prompt_ids) + len(i.response_ids) for i in micros[0])
    packed = sum(map(len, {tuple(i.prompt_ids) for i in micros[0]})) + sum(
        len(i.response_ids) for i in micros[0]
    )
    work = ExtraWork(
        rows=len(rows),
        steps=steps,
        forwards=fresh * ((recipe.beta > 0) + (recipe.num_iterations > 1) + models * alone / packed)
        + looked_at / recipe.batch_size * (2 + models) * alone / packed,
        samplings=steps / recipe.num_iterations
        + looked_at / (recipe.batch_size * recipe.gradient_accumulation),
        note="rewards that are no models not counted",
    )
    return estimate_from_profile(
        shape, recipe, hardware, micros, work, packed=True, answers=answers, base=base
    )


def _held_out_answers(recipe: PPORecipe | GRPORecipe, rows: int, steps: int) -> float:
    """Held-out prompts answered over a run: before the first step too."""
    return (1 + evaluations(recipe, steps, rows)) * min(recipe.eval_prompts, rows * HELD_OUT_SHARE)


def _prompts(encoder: Encoder, rows: Sequence[Any], recipe: PPORecipe | GRPORecipe) -> Prompts:
    some, _ = encoder.written(list(rows)[:SAMPLE])
    messages = [prompt_messages(row, number) for number, row in enumerate(some)]
    ids = encoder.prompts(messages, recipe.max_new_tokens, recipe.max_length)[0] if messages else []
    return Prompts(some, ids, truncated=0, duplicates=0)


def _forms(
    recipe: PPORecipe | GRPORecipe, agent: str, prompts: Prompts
) -> Callable[[LoadedPolicy], AnswerForms] | None:
    return (lambda policy: answer_forms(policy, agent, prompts)) if recipe.constrains else None
