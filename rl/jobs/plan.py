"""Plan of a training (--dry-run): its dataset, steps, minutes, memory, and the share of valid answers of the base."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.agents import agent_resolve
from rl.datasets import PreparedDataset
from rl.datasets.demonstrations import demonstration_rows
from rl.datasets.gate_distance import distance_of_prepared
from rl.jobs import linear as linear_runs
from rl.jobs.hardware import hardware_of
from rl.jobs.lifecycle import TrainOrder, base_model_for, base_model_settle
from rl.jobs.progress import HARDWARE, READING, ProgressCallback, phase_callback
from rl.jobs.run_dataset import dataset_prepare, feedback_unlearnt
from rl.jobs.run_recipe import recipe_for, recipe_sized, training_estimate, within_minutes
from rl.jobs.stages import stage_limits
from rl.jobs.teachability import teachability_warning
from rl.jobs.trainer import base_measured
from rl.jobs.warm_start import recipe_opened
from rl.models.agent_definitions import agent_served
from rl.recipes import BASE, Recipe, SFTRecipe
from rl.reward_models.service import reward_model_valid
from rl.rewards.catalogue import AUTO

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.preflight import AnswerCheck


def train_plan(order: TrainOrder, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Plan of what `train` would do (--dry-run): the dataset's counts, steps, minutes, memory, the recipe,
    and the share of valid answers of the base. `progress` is told the phases. Raises what refuses, as `train` does."""
    phase = phase_callback(progress)
    phase(HARDWARE)
    hardware = hardware_of(order.method)
    config, recipe = recipe_for(order, hardware)
    order = base_model_settle(order, phase)
    phase(READING)
    dataset = dataset_prepare(order, recipe, feedback_unlearnt(order), dry_run=True)
    recipe = recipe_sized(order, recipe, dataset, hardware)
    if hardware is None or not isinstance(recipe, Recipe):
        expected = linear_runs.plan_of(dataset, order.agent)
    else:
        recipe, expected = _adapter_plan(order, recipe, dataset, hardware, phase)
    distance = distance_of_prepared(dataset, order.agent)
    return {
        "agent": order.agent,
        "samples": dataset.counts,
        "sources": dataset.sources,
        "left_out": dataset.left_out,
        "balance": dataset.balance,
        "query": dataset.query | ({"unreadable": dataset.unreadable} if dataset.unreadable else {}),
        "simulated_share": dataset.simulated_share,
        "base_model": base_model_for(order),
        "config": config,
        "recipe": recipe.as_dict(),
        "hardware": hardware.as_dict() if hardware is not None else {},
        "evidence": distance.as_dict() if distance else None,
        **expected,
    }


def _adapter_plan(
    order: TrainOrder,
    recipe: Recipe,
    prepared: PreparedDataset,
    hardware: Hardware,
    phase: Callable[[str], None],
) -> tuple[Recipe, dict[str, Any]]:
    """The recipe within its minutes, with the cost of training an adapter by it, whether it would teach, and whether
    the base's answers are valid."""
    from rl.training import preflight

    base_model = base_model_for(order)
    rows, eval_rows = list(prepared.rows("train")), list(prepared.rows("eval"))
    if isinstance(recipe, SFTRecipe) and recipe.is_taught:
        rows, eval_rows, _ = demonstration_rows(recipe, rows, eval_rows, order.agent)
        recipe = recipe.refit_to_rows(len(rows))
    phase("checking the rows as tokens")
    samples, left_out = preflight.tokens_check(
        base_model, recipe, rows, eval_rows, settings.RATCHET_HOME / "cache"
    )
    base = base_measured(base_model, recipe, hardware)
    with agent_resolve(agent_served(order.agent)):
        look = preflight.plan_check(
            base,
            recipe_opened(recipe),
            [*prepared.rows("eval"), *prepared.rows("train")],
            agent=order.agent,
            phase=phase,
        )
    phase("estimating steps, minutes and memory")
    expected = training_estimate(order, recipe, rows, hardware, base)
    fitted = within_minutes(recipe, len(rows), expected.speed)
    if fitted.recipe != recipe:
        recipe = fitted.recipe
        read = dataclasses.replace(recipe, epochs=max(recipe.epochs, 1.0))  # some of the rows, once each
        expected = training_estimate(order, read, rows[: fitted.rows], hardware, base)
    tries = max(1, int(recipe.as_dict().get("search", 0)))  # each takes about as long
    return recipe, {
        "samples": {**prepared.counts, **samples},
        "left_out": dict(Counter(prepared.left_out) + Counter(left_out)),
        "estimated_steps": expected.steps * tries,
        "estimated_minutes": expected.minutes * tries,
        "estimated_memory_gb": expected.memory_gb,
        "not_fitted": fitted.note,
        "stages": _stages(recipe, order.agent, base_model, look),
        "doubt": teachability_warning(recipe, prepared.counts["train"], prepared.kind),
        "preflight": {"before": look.as_dict()} if look else {},
        "warning": preflight.warning_of(look, recipe),
    }


def _stages(recipe: Recipe, agent: str, base_model: str, look: AnswerCheck | None) -> list[str]:
    """Stages that a run with the reward `auto` trains first, each with the limits it has from the run."""
    knobs = recipe.as_dict()
    if AUTO not in str(knobs.get("reward", "")).split(","):
        return []
    limits = stage_limits(knobs)
    at_most = [f"{limits['max_steps']:,} steps"] if "max_steps" in limits else []
    at_most += [f"{limits['minutes']:g} minutes"] if "minutes" in limits else []
    limit = f", at most {' and '.join(at_most)}" if at_most else ""
    stages = []
    if look is not None and look.few and knobs.get("start_from", BASE) == BASE:
        stages.append(f"sft on the form of the answer, as the base model gives few valid ones{limit}")
    if reward_model_valid(agent, base_model) is None:
        stages.append(f"a reward model, as reward auto finds none{limit}")
    return stages
