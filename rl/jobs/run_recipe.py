"""Recipe of a training: preset, operator's file and the order's knobs, fitted to agent, method and machine.

Peak memory comes from the base model's files alone, with no torch and nothing loaded. `train_<method> --dry-run`
measures the activations; here they come from the architecture's shape at full length, which is an upper bound.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.agents import agent_resolve
from rl.agents.base import Agent
from rl.bundled_models import BUNDLED, resolve_base_model
from rl.datasets import PreparedDataset
from rl.datasets.feedback_types import Row
from rl.jobs import linear as linear_runs
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.jobs.method_selection import REWARD_MODEL, method_chosen
from rl.jobs.stages import SFT_SHARE, STAGE_SHARE
from rl.jobs.trainer import base_measured, import_reference, start_resolved
from rl.recipes import STAGE_STARTS, Recipe, recipe_named
from rl.recipes.base import AnswerRecipe, BasicRecipe
from rl.recipes.fit import (
    FLOAT32_BYTES,
    MINUTES,
    SMALL,
    MinutesFit,
    ModelShape,
    Speed,
    Workload,
    kept_at_most,
    memory_of,
    minutes_fitted,
    recipe_fitted,
)
from rl.recipes.linear import LinearRecipe
from rl.reward_models.service import rewards_located
from rl.rewards.catalogue import AUTO

if TYPE_CHECKING:
    from rl.training.estimates import Estimate
    from rl.training.hardware import Hardware
    from rl.training.profiler import MeasuredBase


@dataclass(frozen=True)
class MemoryEstimate:
    """Gigabytes at the peak, None where the base model is not on this machine, and how they were worked out."""

    gb: float | None
    source: str


def memory_at_most(base_model: str, recipe: Recipe, sides: int) -> MemoryEstimate:
    """Memory of a run of this recipe; `sides` are the responses of one row that are computed together."""
    folder = base_folder(base_model)
    if folder is None:
        return MemoryEstimate(
            None, f"{base_model} is not on this machine; `train_... --dry-run` downloads and measures it"
        )
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = ModelShape.of(config, sum(_parameters(file) for file in folder.glob("*.safetensors")))
    knobs = recipe.as_dict()
    responses = sides * int(knobs.get("mini_batch_size") or recipe.batch_size)
    memory = memory_of(
        shape,
        recipe,
        number=FLOAT32_BYTES,
        four_bit=recipe.quantization == "4bit",
        kept=kept_at_most(shape, recipe, responses, FLOAT32_BYTES, sparing=recipe.gradient_checkpointing),
    )
    tokens = f"{responses * recipe.max_length:,} tokens"
    return MemoryEstimate(round(memory.gb, 2), f"at most: {memory.words()}, at full length ({tokens})")


def base_parameters(base_model: str) -> int | None:
    """Parameters of a base model, read from the headers of its files; None where it is not on this machine."""
    folder = base_folder(base_model)
    return sum(_parameters(file) for file in folder.glob("*.safetensors")) if folder is not None else None


def base_folder(base_model: str) -> Path | None:
    """The folder of a base model that is here: the bundled one, a path, or the newest snapshot in the hub's cache."""
    given = Path(resolve_base_model(base_model)).expanduser()
    if (given / "config.json").is_file():
        return given
    hub = settings.HF_HUB_CACHE / f"models--{base_model.replace('/', '--')}" / "snapshots"
    found = sorted(hub.glob("*/config.json"), key=lambda path: -path.stat().st_mtime)
    return next((path.parent for path in found if any(path.parent.glob("*.safetensors"))), None)


def _parameters(file: Path) -> int:
    """Numbers in a safetensors file, by its header."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def recipe_for(order: TrainOrder, hardware: Hardware | None) -> tuple[str, BasicRecipe]:
    """The preset's name and the recipe: preset, then the RATCHET_CONFIG file, then the order's own knobs. hardware:
    None for a method that trains no adapter."""
    name = order.config or order.definition.preset(_preset(order, hardware))
    configuration = settings.RATCHET_CONFIG.get(order.method) or {}
    knobs = dict(order.knobs)
    if "epochs" in knobs or "epochs" in configuration:
        knobs.setdefault("min_steps", 0)  # who names the passes gets them
    if order.method == REWARD_MODEL:
        knobs = _judge_knobs(order, {*knobs, *configuration}) | knobs
    recipe = recipe_named(order.method, name, settings.RATCHET_CONFIG.get(order.method)).with_knobs(**knobs)
    recipe = _with_lengths(recipe, order.served, {*knobs, *configuration})
    recipe = _with_general_prompts(recipe, order, {*knobs, *configuration})
    if isinstance(recipe, LinearRecipe):
        return name, linear_runs.feedback_resolved(order, recipe)
    assert isinstance(recipe, Recipe)
    if order.definition.rewarded:
        rewards_located(
            recipe.as_dict()["reward"], order.agent
        )  # refused now rather than when the run has begun
    return name, start_resolved(order, recipe)


def _preset(order: TrainOrder, hardware: Hardware | None) -> str:
    """The machine's preset; `cpu` for a small base model on any machine."""
    if hardware is None:
        return "default"
    parameters = base_parameters(base_model_for(order)) if hardware.device != "cpu" else None
    return "cpu" if parameters is not None and parameters < SMALL else hardware.preset


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
    parameters = base_parameters(base_model) if device and base_model != BUNDLED else None
    if parameters is None or order.config or not isinstance(recipe, Recipe) or not rows:
        return recipe.fit_to_rows(rows)
    sizes = [_bytes(row) for row in dataset.rows("train")]
    work = Workload(
        rows=rows,
        tokens=sum(sizes) / len(sizes) / TOKEN_BYTES + TURN_TOKENS,
        longest=round(max(sizes) / SHORT_TOKEN_BYTES) + TURN_TOKENS,
        parameters=parameters,
        device=device,
    )
    if device == "cpu" and not {"epochs", "max_steps", "minutes"} & named:
        recipe = recipe.with_knobs(minutes=MINUTES)
    if "epochs" in named:
        named.add("min_steps")
    return recipe_fitted(recipe, work, named).fit_to_rows(rows)


def _bytes(row: Row) -> int:
    """Bytes of all text of a row: its prompt and its responses."""
    return sum(_text_bytes(row.get(part)) for part in ("prompt", "completion", "chosen", "rejected"))


def _text_bytes(said: object) -> int:
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
    own = 1 - 2 * STAGE_SHARE if AUTO in str(knobs.get("reward", "")).split(",") else 1.0
    own = 1 - SFT_SHARE if knobs.get("start_from") in STAGE_STARTS else own
    return minutes_fitted(recipe, rows, own * recipe.minutes, speed)


def training_estimate(
    order: TrainOrder, recipe: Recipe, rows: Sequence[Row], hardware: Hardware, base: MeasuredBase
) -> Estimate:
    """Steps, minutes and memory of a training by the estimate of its method, and its measured speed."""
    method = order.definition
    sampled = {"agent": order.agent} if method.kind == "prompts" else {}
    with agent_resolve(order.served):
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


def _with_lengths(recipe: BasicRecipe, agent: Agent, named: Collection[str]) -> BasicRecipe:
    """The recipe with lengths for prompts and answers of an agent that says how long its are, in knobs nobody named."""
    if agent.max_prompt_tokens is None or not isinstance(recipe, Recipe):
        return recipe
    room = {
        "max_length": agent.max_prompt_tokens + agent.max_new_tokens,
        "max_new_tokens": agent.max_new_tokens,
    }
    knobs = recipe.as_dict()
    return recipe.with_knobs(
        **{knob: n for knob, n in room.items() if knob not in named and knobs.get(knob, n) < n}
    )
