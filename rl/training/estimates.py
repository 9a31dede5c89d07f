"""Estimates of a run before it is started: steps, minutes, peak memory. One function per method says its work."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from packed_forward.packing import micro_batches
from rl.agents import get_agent
from rl.agents.base import Row
from rl.linear.fit import MEMORY_GB, SECONDS_PER_ROW
from rl.recipes import DPORecipe, GRPORecipe, KTORecipe, PPORecipe, Recipe, RewardModelRecipe, SFTRecipe
from rl.recipes.base import AnswerRecipe, SampledRecipe
from rl.recipes.fit import GB, Memory, ModelShape, Speed, memory_of
from rl.rewards.catalogue import reward_models_named
from rl.training.chat_template import prompt_messages
from rl.training.encoding import EncodedColumn, EncodedResponse, Encoder, parts_alike
from rl.training.hardware import Hardware, detect
from rl.training.loading import model_shape
from rl.training.profiler import (
    ASKABLE,
    MeasuredBase,
    Micro,
    MicroBatchProfile,
    SampledBatches,
    answers_sampled,
    profile_base,
    profile_counted,
)
from rl.training.rows import SCALE_ROWS, LengthGroupedSampler, evaluation_interval, stops_early

if TYPE_CHECKING:
    from rl.training.constrained_generation import AnswerForms
    from rl.training.policy import LoadedPolicy
    from rl.training.rewarding import Prompts

T = TypeVar("T")
RecipeT = TypeVar("RecipeT", bound=Recipe)
SampledT = TypeVar("SampledT", bound=SampledRecipe)

SAMPLE = 512
"""Rows whose lengths are sampled."""

HELD_OUT_SHARE = 1 / 8
"""Held-out rows for each training row: the split's own 10 to 80."""

WARM_UP_PASSES = 3.0
"""Passes forward that a step of a warm-up takes as long as."""


@dataclass(frozen=True)
class Estimate:
    """Steps, time and memory of a run on this machine; `reasons` says how each figure was made."""

    steps: int
    minutes: float
    memory_gb: float
    reasons: dict[str, str] = field(default_factory=dict)
    speed: Speed = field(default_factory=lambda: Speed(0.0, 0.0))


@dataclass(frozen=True)
class Planned(Generic[RecipeT]):
    """A training that is only planned."""

    base: MeasuredBase
    recipe: RecipeT
    rows: Sequence[Row]
    agent: str

    @functools.cached_property
    def shape(self) -> ModelShape:
        causal = getattr(self.recipe, "architecture", "causal") != "encoder"
        return self.base.shape if causal else model_shape(self.base.base_model, causal=False)

    @property
    def encoder(self) -> Encoder:
        return self.base.encoder

    @property
    def steps(self) -> int:
        return self.recipe.steps(len(self.rows))

    @property
    def sample(self) -> list[Row]:
        """Some rows in the order of training: those of one prompt that lie together are parted by its shuffle."""
        count = min(SAMPLE, len(self.rows))
        return random.Random(self.recipe.seed).sample(list(self.rows), count)

    @property
    def batches_per_pass(self) -> float:
        return len(self.rows) / self.recipe.batch_size

    def column(self, rows: Sequence[Row], side: str, *, turns: bool = False) -> EncodedColumn:
        recipe = self.recipe
        return self.encoder.column(rows, side, recipe.max_length, recipe.max_completion_length, turns=turns)

    def evaluations(self, steps: int, rows: int) -> int:
        return evaluations(self.recipe, steps, rows)


@dataclass(frozen=True)
class Work:
    """Work of a run: sampled micro-batches, and how many passes it makes over such ones."""

    micros: Sequence[Micro]
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
    sample_s: float = 0.0
    """Seconds of one of them."""
    trained: float | None = None
    """Training micro-batches over the whole run; None: `gradient_accumulation` to a step."""
    packed: bool = True
    """True if micro-batches are trained on as rows that share their prompt."""
    note: str = ""

    @property
    def tokens(self) -> float:
        return tokens_mean(self.micros)


Estimator = Callable[..., Estimate]
"""(base_model, recipe, rows, *, hardware, agent, base) -> the estimate; `Method.estimate` names one."""


def estimated(what: str) -> Callable[[Callable[[Planned[RecipeT]], Work | None]], Estimator]:
    """Make an estimator of a function that says the work of a planned training; None: no `what` is left to train on.

    The base model is measured as `rl.training.profiler` has it; a busy machine gives a longer estimate. Raises
    PolicyLoadError for a base that cannot be read, ValueError for rows of another shape.
    """

    def decorate(work_of: Callable[[Planned[RecipeT]], Work | None]) -> Estimator:
        @functools.wraps(work_of)
        def estimate(
            base_model: str,
            recipe: Any,
            rows: Sequence[Row],
            *,
            hardware: Hardware | None = None,
            agent: str = "",
            base: MeasuredBase | None = None,
        ) -> Estimate:
            hardware = hardware or detect()
            base = base or MeasuredBase(base_model, hardware, quantization=recipe.quantization)
            planned = Planned(base, recipe, rows, agent)
            work = work_of(planned)
            if work is None:
                return Estimate(0, 0.0, 0.0, {"steps": f"no {what} is left to train on"})
            return _estimate(planned, work, hardware)

        return estimate

    return decorate


def _estimate(planned: Planned[RecipeT], work: Work, hardware: Hardware) -> Estimate:
    recipe, base = planned.recipe, planned.base
    shape = planned.shape
    causal = getattr(recipe, "architecture", "causal") != "encoder"
    if causal and shape.parameters <= ASKABLE and base.hardware.dtype == hardware.dtype:
        profile = profile_base(base, recipe, work.micros, packed=work.packed)
    else:
        profile = profile_counted(shape, hardware, work.micros, packed=work.packed)
    rehearsed = general_share(recipe, work.micros)
    memory = memory_measured(shape, recipe, hardware, profile, work, rehearsed)
    train_s = profile.train_s
    trained = work.steps * recipe.gradient_accumulation if work.trained is None else work.trained
    recomputed = profile.forward_s if recipe.gradient_checkpointing else 0.0
    seconds = (
        trained * (train_s + recomputed)
        + work.forwards * profile.forward_s
        + work.samplings * work.sample_s
        + work.steps * train_s * rehearsed
    )
    parts = [
        f"{trained:,.0f} micro-batches of {len(work.micros[0])} responses, {work.tokens:,.0f} tokens before anything "
        f"is shared, at {1000 * train_s:,.0f} ms ({profile.strategy} forward and backward)"
    ]
    if work.forwards:
        parts.append(f"{work.forwards:,.0f} forward at {1000 * profile.forward_s:,.0f} ms")
    if work.samplings:
        parts.append(f"{work.samplings:,.0f} samplings at {work.sample_s:.2f} s")
    parts += [work.note] if work.note else []
    once_s = work.once * profile.forward_s
    return Estimate(
        steps=work.steps,
        minutes=seconds / 60,
        memory_gb=memory.gb,
        speed=Speed((seconds - once_s) / max(work.steps, 1), once_s, work.warm_up * profile.forward_s),
        reasons={
            "steps": f"{work.rows:,} rows, {recipe.batch_size} to a micro-batch, "
            f"{recipe.gradient_accumulation} micro-batches to a step",
            "minutes": "; ".join(parts),
            "memory_gb": memory.words(),
        },
    )


GENERAL_TOKENS = 90
"""Tokens of a general prompt with the answer that is rehearsed, padding included."""


def tokens_mean(micros: Sequence[Micro]) -> float:
    """Mean tokens of a micro-batch."""
    return sum(len(i.prompt_ids) + len(i.response_ids) for micro in micros for i in micro) / len(micros)


def general_share(recipe: Recipe, micros: Sequence[Micro]) -> float:
    """Tokens of the general prompts that a step rehearses, by those of a micro-batch; 0 where it rehearses none."""
    if not isinstance(recipe, AnswerRecipe) or not recipe.general_weight:
        return 0.0
    return GENERAL_TOKENS * recipe.rehearsed_rows / tokens_mean(micros)


def evaluations(recipe: Recipe, steps: int, rows: int) -> int:
    """Largest number of evaluations in a run of so many steps on so many rows: see `rl.training.trl_trainer`."""
    eval_rows = round(rows * HELD_OUT_SHARE)
    if not stops_early(recipe, eval_rows) and recipe.eval_steps == 0:
        return 1
    return -(-steps // evaluation_interval(recipe, steps, eval_rows))


def memory_measured(
    shape: ModelShape,
    recipe: Recipe,
    hardware: Hardware,
    profile: MicroBatchProfile,
    work: Work,
    rehearsed: float,
) -> Memory:
    """Peak memory with the activations of the largest micro-batch as they were measured.

    rehearsed: share of them that general prompts add.
    """
    four_bit = recipe.quantization == "4bit" and hardware.supports_4bit
    saved_bytes = profile.checkpoint_bytes if recipe.gradient_checkpointing else profile.saved_bytes
    # one layer's gradients on the way back are about what it kept
    kept = (1 + rehearsed) * saved_bytes + profile.saved_bytes / max(shape.layers, 1)
    on_cpu = hardware.device == "cpu"
    process = PROCESS_GB["cuda" if hardware.device == "cuda" else "cpu"]
    kernels = KERNELS_GB[work.packed] if on_cpu else 0.0
    return memory_of(
        shape,
        recipe,
        number=4 if hardware.dtype == "float32" else 2,
        four_bit=four_bit,
        kept=kept,
        process=(process + kernels) * GB,
    )


PROCESS_GB = {"cpu": 0.8, "cuda": 0.6}
"""Python with torch, transformers and Django; on a GPU, the CUDA context there."""

KERNELS_GB = {True: 0.7, False: 0.2}
"""oneDNN compiles a kernel for each shape of product it meets and keeps 64 of them (`backend.settings`): with rows of
many lengths a run on a CPU grows in its first steps, then levels off. Packed rows (true) have more."""


# --- Per method ---------------------------------------------------------------------------------------------

KEPT = "the reference counted in full: what earlier runs computed is kept"


@estimated("pair")
def dpo(planned: Planned[DPORecipe]) -> Work | None:
    """Work of `DPOTrainer.train(rows)`; lengths come from the first rows."""
    recipe, sample = planned.recipe, list(planned.rows)[:SAMPLE]
    pairs = planned.encoder.pairs(sample, recipe.max_length, recipe.max_completion_length).rows
    if not pairs:
        return None
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
    count = round(len(planned.rows) * len(pairs) / len(sample))
    steps = recipe.steps(count)
    once = cut * count / recipe.batch_size
    held_out = once * HELD_OUT_SHARE
    trained = cut * steps * recipe.gradient_accumulation
    looked = planned.evaluations(steps, count) * held_out
    before = once + held_out if recipe.precompute_reference else 0.0
    during = 0.0 if recipe.precompute_reference else trained + looked
    warm_up = _warm_up_passes(recipe, 2 * count, micros, cut)
    forwards = before + during + looked + warm_up
    return Work(
        micros, count, steps, forwards, once=before + warm_up, warm_up=warm_up, trained=trained, note=KEPT
    )


def _warm_up_passes(recipe: AnswerRecipe, responses: int, micros: Sequence[Micro], cut: float = 1.0) -> float:
    """Passes forward that a warm-up takes as long as: for each micro-batch, `cut` into so many, and for the general
    prompts of each step."""
    a_step = cut * recipe.gradient_accumulation + general_share(recipe, micros)
    return WARM_UP_PASSES * recipe.warm_up(responses) * a_step


@estimated("response")
def kto(planned: Planned[KTORecipe]) -> Work | None:
    """Work of `KTOTrainer.train(rows)`."""
    recipe, rows = planned.recipe, len(planned.rows)
    items = planned.column(planned.sample, "completion").items
    if not items:
        return None
    mismatched = [
        EncodedResponse(item.prompt_ids, other.response_ids)
        for item, other in zip(items, [*items[1:], items[0]], strict=True)
    ]
    cut = zip(batches(items, recipe.batch_size), batches(mismatched, recipe.batch_size), strict=True)
    micros = [[*own, *others] for own, others in cut]
    warm_up = _warm_up_passes(recipe, rows, micros)
    reference, looked = _passes(planned)
    return Work(
        micros,
        rows,
        planned.steps,
        reference + looked + warm_up,
        once=reference + warm_up,
        warm_up=warm_up,
        note=KEPT,
    )


def _passes(planned: Planned[RecipeT]) -> tuple[float, float]:
    """Micro-batches of a reference pass over both splits, and of all looks at the eval split."""
    once = planned.batches_per_pass
    looks = planned.evaluations(planned.steps, len(planned.rows))
    return once * (1 + HELD_OUT_SHARE), looks * once * HELD_OUT_SHARE


@estimated("demonstration")
def sft(planned: Planned[SFTRecipe]) -> Work | None:
    """Work of `SFTTrainer.train(rows)`."""
    recipe = planned.recipe
    items = planned.column(planned.sample, "completion", turns=True).items
    if not items:
        return None
    whole = batches(items, recipe.batch_size)
    micros = [part for micro in whole for part in _parts(micro, recipe.micro_tokens)]
    cut = len(micros) / len(whole)
    reference, looked = _passes(planned)
    return Work(
        micros,
        len(planned.rows),
        planned.steps,
        cut * (reference + looked),
        once=cut * reference,
        trained=cut * planned.steps * recipe.gradient_accumulation,
    )


def _parts(micro: list[EncodedResponse], most: int) -> list[list[EncodedResponse]]:
    """The parts of a micro-batch that SFT computes at once."""
    lengths = [len(item.prompt_ids) + len(item.response_ids) for item in micro]
    if not 0 < most < len(micro) * max(lengths):
        return [micro]
    return [[micro[place] for place in places] for places in parts_alike(lengths, most)]


def reward_model(
    base_model: str, recipe: RewardModelRecipe, rows: Sequence[Row], **options: object
) -> Estimate:
    """Estimate of `RewardModelTrainer.train(rows)`; a linear one is fitted, without a base model."""
    if not recipe.is_linear:
        return _score_head(base_model, recipe, rows, **options)
    minutes = len(rows) * SECONDS_PER_ROW / 60
    return Estimate(recipe.steps(len(rows)), minutes, MEMORY_GB, {"minutes": "one fit, without a base model"})


@estimated("row")
def _score_head(planned: Planned[RewardModelRecipe]) -> Work | None:
    recipe, rows = planned.recipe, len(planned.rows)
    sides = ("chosen", "rejected") if recipe.objective == "pairwise" else ("completion",)
    sample, _ = planned.encoder.written(planned.sample)
    columns = [planned.column(sample, side).items for side in sides]
    if not columns[0]:
        return None
    cut = [batches(column, recipe.batch_size) for column in columns]
    micros = [[item for column in parts for item in column] for parts in zip(*cut, strict=True)]
    # its scale is read off the training responses at the end, its accuracy off the held-out ones beside their loss
    once = min(rows, SCALE_ROWS) / recipe.batch_size
    looked = _passes(planned)[1] + planned.batches_per_pass * HELD_OUT_SHARE
    causal = recipe.architecture != "encoder"
    return Work(micros, rows, planned.steps, once + looked, once=once, packed=causal)


def batches(items: Sequence[T], size: int) -> list[list[T]]:
    """Whole batches of the items; one of all of them where there are fewer."""
    return [list(items[start : start + size]) for start in range(0, max(len(items) - size, 0) + 1, size)]


NOT_COUNTED = "rewards that are no models not counted"


@estimated("prompt")
def ppo(planned: Planned[PPORecipe]) -> Work | None:
    """Work of `PPOTrainer.train(rows)`, with answers of the base to the prompts of some steps."""
    recipe = planned.recipe
    if (prompts := _prompts(planned)) is None:
        return None
    samples = recipe.samples_per_prompt
    answers = _sampled(planned, prompts, recipe.batch_size // samples, samples)
    size = recipe.mini_batch_size // recipe.gradient_accumulation
    steps, per_step = planned.steps, recipe.batch_size / size
    networks = 2 if recipe.value_backbone == "adapter" else 1
    looked_at = _held_out_answers(planned)
    models = reward_models_named(recipe.reward)
    return Work(
        batches(answers.items, size),
        len(planned.rows),
        steps,
        forwards=steps * per_step * (networks + 1 + models) + looked_at / size * (2 + models),
        samplings=steps + looked_at / recipe.batch_size,
        sample_s=answers.sample_s,
        trained=steps * per_step * recipe.ppo_epochs * networks,
        note=NOT_COUNTED,
    )


@estimated("prompt")
def grpo(planned: Planned[GRPORecipe]) -> Work | None:
    """Work of `GRPOTrainer.train(rows)`."""
    recipe, steps = planned.recipe, planned.steps
    if (prompts := _prompts(planned)) is None:
        return None
    micro_count = steps * recipe.gradient_accumulation
    answers = _sampled(planned, prompts, recipe.groups * recipe.gradient_accumulation, recipe.num_generations)
    micros = batches(answers.items, recipe.batch_size)
    looked_at = _held_out_answers(planned)
    models = reward_models_named(recipe.reward)
    fresh = micro_count / recipe.num_iterations
    said = sum(len(i.response_ids) for i in micros[0])
    alone = said + sum(len(i.prompt_ids) for i in micros[0])
    packed = said + sum(map(len, {tuple(i.prompt_ids) for i in micros[0]}))
    extra = (recipe.beta > 0) + (recipe.num_iterations > 1) + models * alone / packed
    return Work(
        micros,
        len(planned.rows),
        steps,
        forwards=fresh * extra + looked_at / recipe.batch_size * (2 + models) * alone / packed,
        samplings=steps / recipe.num_iterations
        + looked_at / (recipe.batch_size * recipe.gradient_accumulation),
        sample_s=answers.sample_s,
        note=NOT_COUNTED,
    )


def _held_out_answers(planned: Planned[SampledT]) -> float:
    """Held-out prompts answered over a run: before the first step too."""
    rows = len(planned.rows)
    looks = 1 + planned.evaluations(planned.steps, rows)
    return looks * min(planned.recipe.eval_prompts, rows * HELD_OUT_SHARE)


def _prompts(planned: Planned[SampledT]) -> Prompts | None:
    from rl.training.rewarding import Prompts

    some, _ = planned.encoder.written(list(planned.rows)[:SAMPLE])
    if not some:
        return None
    messages = [prompt_messages(row, number) for number, row in enumerate(some)]
    recipe = planned.recipe
    ids, _ = planned.encoder.prompts(messages, recipe.max_new_tokens, recipe.max_length)
    return Prompts(some, ids, truncated=0, duplicates=0)


def _sampled(planned: Planned[SampledT], prompts: Prompts, at_once: int, samples: int) -> SampledBatches:
    from rl.training.rewarding import answer_forms

    def forms_of(policy: LoadedPolicy) -> AnswerForms:
        return answer_forms(policy, get_agent(planned.agent), prompts)

    recipe = planned.recipe
    constrained = forms_of if recipe.constrains else None
    return answers_sampled(planned.base, recipe, prompts.ids, at_once, samples, constrained)
