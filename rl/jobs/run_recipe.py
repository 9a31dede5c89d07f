"""Recipe of a training: preset, operator's file and the order's knobs, fitted to agent, method and machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.agents import agent_resolve
from rl.bundled_models import BUNDLED
from rl.datasets import PreparedDataset
from rl.datasets.feedback_types import Row
from rl.jobs import linear as linear_runs
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.jobs.memory_estimate import base_parameters, memory_at_most
from rl.jobs.method_selection import REWARD_MODEL, method_chosen
from rl.jobs.stages import SFT_SHARE, STAGE_SHARE
from rl.jobs.trainer import base_measured, import_reference
from rl.jobs.warm_start import start_resolved
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused
from rl.recipes import SFT_STAGE, Recipe, RewardModelRecipe, recipe_named
from rl.recipes.base import AnswerRecipe, BasicRecipe
from rl.recipes.fit import MINUTES, MinutesFit, Speed, Workload, minutes_fitted, recipe_fitted
from rl.recipes.linear import LinearRecipe
from rl.recipes.methods import METHODS, method_named
from rl.reward_models.service import rewards_located
from rl.rewards.catalogue import AUTO

if TYPE_CHECKING:
    from rl.training.estimates import Estimate
    from rl.training.hardware import Hardware
    from rl.training.profiler import MeasuredBase

WHOLE_RATE = 0.1
"""Learning rate of full fine-tuning by a preset's, which is LoRA's: the best rates differ by about ten (Schulman et al.
2025, "LoRA Without Regret")."""

MOST_OF_MEMORY = 0.9
"""Share of a machine's memory that a training may take."""


def recipe_for(order: TrainOrder, hardware: Hardware | None) -> tuple[str, BasicRecipe]:
    """The preset's name and the recipe: preset, then the RATCHET_CONFIG file, then the order's own knobs. hardware:
    None for a method that trains no adapter."""
    preset = hardware.preset if hardware is not None else "default"
    name = order.config or method_named(order.method).preset(preset)
    configuration = settings.RATCHET_CONFIG.get(order.method) or {}
    knobs = dict(order.knobs)
    if "epochs" in knobs or "epochs" in configuration:
        knobs.setdefault("min_steps", 0)  # who names the passes gets them
    if order.method == REWARD_MODEL:
        knobs = _judge_knobs(order, {*knobs, *configuration}) | knobs
    recipe = recipe_named(order.method, name, settings.RATCHET_CONFIG.get(order.method)).with_knobs(**knobs)
    recipe = _with_lengths(recipe, order.agent, {*knobs, *configuration})
    recipe = _with_general_prompts(recipe, order, {*knobs, *configuration})
    if isinstance(recipe, LinearRecipe):
        return name, linear_runs.feedback_resolved(order, recipe)
    assert isinstance(recipe, Recipe)
    if method_named(order.method).rewarded:
        rewards_located(
            recipe.as_dict()["reward"], order.agent
        )  # refused now rather than when the run has begun
    recipe = start_resolved(order, recipe)
    if (
        recipe.whole
        and hardware is not None
        and not (isinstance(recipe, RewardModelRecipe) and recipe.is_linear)
    ):
        recipe = _with_whole_rates(recipe, {*knobs, *configuration})
        _memory_check(order, recipe, hardware)
    return name, recipe


GENERAL_WEIGHT = 1.0
"""Weight of the general prompts of base models that can do something beside their tasks."""


def _with_general_prompts(recipe: BasicRecipe, order: TrainOrder, named: Collection[str]) -> BasicRecipe:
    """The recipe with a rehearsal of general prompts, where nobody named the knob: not of the bundled model."""
    known = isinstance(recipe, AnswerRecipe) and "general_weight" not in named
    if not known or base_model_for(order) == BUNDLED:
        return recipe
    return recipe.with_knobs(general_weight=GENERAL_WEIGHT)


TOKEN_BYTES = 3.5
"""Bytes of text to a token, on average; the vocabularies of small models write 3 to 4.5 bytes of English or JSON."""

SHORT_TOKEN_BYTES = 2.0
"""Bytes to a token at least, where a text is dense (identifiers, other scripts)."""

TURN_TOKENS = 16
"""Tokens that a chat template adds to a row."""


def recipe_sized(
    order: TrainOrder,
    recipe: BasicRecipe,
    dataset: PreparedDataset,
    hardware: Hardware | None,
    device: str = "",
) -> BasicRecipe:
    """The recipe for so many rows on this base model, in all that nobody named. The bundled model, for which the preset
    `cpu` was tuned, and presets that were named keep what the preset says."""
    rows = dataset.counts["train"]
    base_model = base_model_for(order)
    named = {*order.knobs, *(settings.RATCHET_CONFIG.get(order.method) or {})}
    device = device or (hardware.device if hardware is not None else "")
    parameters = base_parameters(base_model) if device == "cpu" and base_model != BUNDLED else None
    if parameters is None or order.config or not isinstance(recipe, Recipe) or not rows:
        return recipe.fit_to_rows(rows)
    sizes = [_bytes(row) for row in dataset.rows("train")]
    work = Workload(
        rows=rows,
        tokens=sum(sizes) / len(sizes) / TOKEN_BYTES + TURN_TOKENS,
        longest=round(max(sizes) / SHORT_TOKEN_BYTES) + TURN_TOKENS,
        parameters=parameters,
    )
    if not {"epochs", "max_steps", "minutes"} & named:
        recipe = recipe.with_knobs(minutes=MINUTES)
    if "epochs" in named:
        named.add("min_steps")
    return recipe_fitted(recipe, work, named).fit_to_rows(rows)


def _bytes(row: Row) -> int:
    """Bytes of all text of a row: its prompt and its responses."""
    return sum(
        _text_bytes(row.get(part)) for part in ("prompt", "completion", "chosen", "rejected", "completions")
    )


def _text_bytes(said: Any) -> int:
    if isinstance(said, str):
        return len(said.encode())
    if isinstance(said, Mapping):
        return sum(_text_bytes(part) for part in said.values())
    return sum(_text_bytes(part) for part in said) if isinstance(said, Sequence) else 0


def within_minutes(recipe: Recipe, rows: int, speed: Speed) -> MinutesFit:
    """The recipe with as many passes as its minutes allow; steps that were named are left as they are."""
    if not recipe.minutes or recipe.max_steps > 0 or not speed.step_s:
        return MinutesFit(recipe, recipe.steps(rows), rows)
    knobs = recipe.as_dict()
    tries = max(1, int(knobs.get("search", 0)))
    own = 1 - 2 * STAGE_SHARE if AUTO in str(knobs.get("reward", "")).split(",") else 1.0
    own = 1 - SFT_SHARE if knobs.get("start_from") == SFT_STAGE else own
    return minutes_fitted(recipe, rows, own * recipe.minutes / tries, speed)


def training_estimate(
    order: TrainOrder, recipe: Recipe, rows: Sequence[Row], hardware: Hardware, base: MeasuredBase
) -> Estimate:
    """Steps, minutes and memory of a training by the estimate of its method, and its measured speed."""
    method = method_named(order.method)
    sampled = {"agent": order.agent} if method.kind == "prompts" else {}
    with agent_resolve(agent_served(order.agent)):
        expected: Estimate = import_reference(order.method, method.estimate)(
            base_model_for(order), recipe, rows, hardware=hardware, base=base, **sampled
        )
    return expected


def recipe_timed(
    order: TrainOrder,
    recipe: BasicRecipe,
    dataset: PreparedDataset,
    hardware: Hardware | None,
    phase: Callable[[str], None],
) -> tuple[BasicRecipe, str]:
    """The sized recipe of a run within its minutes, and what did not fit, in one sentence."""
    recipe = recipe_sized(order, recipe, dataset, hardware)
    if hardware is None or not isinstance(recipe, Recipe) or not recipe.minutes or recipe.max_steps > 0:
        return recipe, ""
    phase("measuring the speed of a step")
    rows = list(dataset.rows("train"))
    base = base_measured(base_model_for(order), recipe, hardware)
    fitted = within_minutes(recipe, len(rows), training_estimate(order, recipe, rows, hardware, base).speed)
    return fitted.recipe, fitted.note


def _judge_knobs(order: TrainOrder, named: Collection[str]) -> dict[str, Any]:
    """Objective and architecture that fit the feedback, where nobody named them."""
    if {"objective", "architecture"} <= set(named):
        return {}
    chosen = method_chosen(
        order.agent, REWARD_MODEL, base_model=base_model_for(order), **order.feedback_source
    )
    return {knob: value for knob, value in chosen.knobs.items() if knob not in named}


RATES = ("learning_rate", "value_learning_rate", "warm_up_learning_rate")
"""Knobs that are learning rates of weights; 0 stands for the first."""


def _with_whole_rates(recipe: Recipe, named: Collection[str]) -> Recipe:
    """The recipe with learning rates of full fine-tuning in place of a preset's, but those somebody named."""
    rates = {knob: rate for knob, rate in recipe.as_dict().items() if knob in RATES and knob not in named}
    return recipe.with_knobs(**{knob: rate * WHOLE_RATE for knob, rate in rates.items()})


def _memory_check(order: TrainOrder, recipe: Recipe, hardware: Hardware) -> None:
    """Raises RunRefused for full fine-tuning of a base model that the machine has no memory for, one row at a time."""
    base_model = base_model_for(order)
    sides = 2 if METHODS[order.method].kind in ("pairs", "labels") else 1
    needed = memory_at_most(base_model, recipe, sides, least=True)
    if needed.gb is not None and needed.gb > MOST_OF_MEMORY * hardware.memory_gb:
        raise RunRefused(
            f"--lora-r 0 trains every weight of {base_model}, which takes {needed.gb:g} GB ({needed.source}); this "
            f"machine has {hardware.memory_gb:g} GB, of which a tenth is left to others. Train a LoRA adapter "
            f"(--lora-r 16), or a smaller base model{_value_shared(recipe)}"
        )


def _value_shared(recipe: Recipe) -> str:
    """Advice where a value of its own takes a second copy of the weights; empty where none does."""
    if recipe.trained_copies == 1:
        return ""
    return "; --set value_backbone=shared saves the second trained copy, that of the value"


def _with_lengths(recipe: BasicRecipe, agent: str, named: Collection[str]) -> BasicRecipe:
    """The recipe with lengths for prompts and answers of an agent that says how long its are, in knobs nobody named."""
    known = agent_served(agent)
    if known.max_prompt_tokens is None or not isinstance(recipe, Recipe):
        return recipe
    room = {
        "max_length": known.max_prompt_tokens + known.max_new_tokens,
        "max_new_tokens": known.max_new_tokens,
    }
    knobs = recipe.as_dict()
    return recipe.with_knobs(
        **{knob: n for knob, n in room.items() if knob not in named and knobs.get(knob, n) < n}
    )
