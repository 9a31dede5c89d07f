"""Dataset, snapshot and row of a run, and the plan of a training (--dry-run): steps, minutes, memory."""

from __future__ import annotations

import dataclasses
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.conf import settings

from feedback.selectors import prompts_of_feedback
from rl.agents import agent_resolve
from rl.datasets import PreparedDataset, prepare_training_dataset
from rl.datasets.buffer import buffer_ids, feedback_take, run_feedback_resolve
from rl.datasets.demonstrations import demonstration_rows
from rl.datasets.examples import Replay
from rl.datasets.feedback_types import Row
from rl.datasets.gate_distance import distance_of_prepared
from rl.datasets.reward_records import rewards_calculate
from rl.datasets.rows import RowRules, agent_check
from rl.jobs import linear as linear_runs
from rl.jobs.lifecycle import TrainOrder, base_model_for, base_model_settle
from rl.jobs.progress import HARDWARE, READING, ProgressCallback, phase_callback
from rl.jobs.run_recipe import recipe_for, recipe_sized, recipe_timed, training_estimate, within_minutes
from rl.jobs.stages import stage_limits
from rl.jobs.teachability import teachability_warning
from rl.jobs.trainer import base_measured, code_version, hardware_of, recipe_opened
from rl.models import Snapshot, TrainingRun
from rl.models.learning import learner_settings
from rl.models.runs import LEARNER, RunRefused
from rl.recipes import BASE, BasicRecipe, Recipe, SFTRecipe
from rl.recipes.base import KEEP, AnswerRecipe
from rl.recipes.methods import dataset_kind
from rl.recipes.sft import FEEDBACK_SOURCES
from rl.registry import service as registry
from rl.reward_models.service import reward_model_valid, rewards_located
from rl.rewards.answers import teaching_fault
from rl.rewards.catalogue import AUTO, opened_in_training, rewards_named

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.preflight import AnswerCheck

TEACHING_ROWS = 200
"""Prompts that rewards are computed on before a model is loaded."""


def run_register(order: TrainOrder, hardware: Hardware | None, phase: Callable[[str], None]) -> TrainingRun:
    """The row of a run, with its dataset."""
    config, recipe = recipe_for(order, hardware)
    new = feedback_unlearnt(order)
    dataset = dataset_prepare(order, recipe, new)
    recipe, not_fitted = recipe_timed(order, recipe, dataset, hardware, phase)
    run = TrainingRun.objects.create(
        agent=order.agent,
        result=order.initial_result | ({"not_fitted": not_fitted} if not_fitted else {}),
        method=order.method,
        asked_by=order.actor,
        stage_of_id=order.stage_of,
        snapshot=dataset.snapshot,
        base_model=base_model_for(order),
        config=config,
        recipe=recipe.as_dict(),
        seed=recipe.seed,
        code_version=code_version(),
        hardware=hardware.as_dict() if hardware is not None else {},
        output=registry.home_relative(order.output) if order.output else "",
    )
    run_feedback_resolve(run, dataset, recipe, new)
    return run


def dataset_of_claimed(run: TrainingRun, order: TrainOrder, recipe: BasicRecipe) -> PreparedDataset:
    """The dataset of a claimed run. A retrain of the online learner reads no more new feedback than its settings say,
    and what decisions earned is calculated before it reads."""
    put_off: set[uuid.UUID] = set()
    if run.asked_by == LEARNER:
        rewards_calculate(run.agent)
        new = feedback_take(run, newest=learner_settings(run.agent).max_buffer_size)
        put_off = set(buffer_ids(run.agent, but=run)).difference(new)
    else:
        takes = run.definition.policy and order.source == "db"
        new = feedback_take(run) if takes else feedback_unlearnt(order)
    prepared = dataset_prepare(order, recipe, new, put_off=put_off)
    run_feedback_resolve(run, prepared, recipe, new)
    return prepared


def feedback_unlearnt(order: TrainOrder) -> list[uuid.UUID]:
    """Feedback that a run of this order would learn from for the first time. A reward model takes none away, nor does
    a stage, so they may read what a run at work has: that run may be the one whose stage it is."""
    alone = order.definition.policy and order.stage_of is None
    return buffer_ids(order.agent, at_work=alone) if order.source == "db" else []


def dataset_prepare(
    order: TrainOrder,
    recipe: BasicRecipe,
    new: Sequence[uuid.UUID],
    *,
    put_off: Collection[uuid.UUID] = (),
    dry_run: bool = False,
) -> PreparedDataset:
    kind = dataset_kind(order.method, recipe.as_dict())
    if kind == Snapshot.Kind.PAIRS_AND_SCORES and order.source != "db":
        raise RunRefused(
            f"feedback {kind} is read from recorded feedback only, found a file: import it "
            f"(`import_feedback FILE --agent {order.agent}`), or take feedback pairs or scores"
        )
    replay = None
    if recipe.replay_share < 1:
        if order.source != "db":
            raise RunRefused(
                "replay_share applies to recorded feedback only; a file is trained on completely"
            )
        replay = Replay(recipe.replay_share, frozenset(prompts_of_feedback(new)))
    dataset = prepare_training_dataset(
        order.agent,
        kind=kind,
        source=order.feedback_file,
        rules=row_rules(recipe),
        min_samples=order.min_samples,
        max_samples=order.max_samples,
        put_off=put_off,
        replay=replay,
        dry_run=dry_run,
    )
    if order.definition.rewarded:
        teaching_check(recipe.as_dict(), list(islice(dataset.rows("train"), TEACHING_ROWS)), order.agent)
    return dataset


def row_rules(recipe: BasicRecipe) -> RowRules:
    """How a recipe asks for evidence to become rows."""
    return RowRules(
        reward_threshold=recipe.as_dict().get("reward_threshold") or None,
        sources=tuple(recipe.source_names) if isinstance(recipe, SFTRecipe) else FEEDBACK_SOURCES,
        implied=bool(recipe.as_dict().get("implied_pairs")),
        keep_reasoning=isinstance(recipe, AnswerRecipe) and recipe.reasoning == KEEP,
    )


def teaching_check(knobs: Mapping[str, Any], rows: Sequence[Row], agent: str) -> None:
    """Raises RunRefused for rewards that cannot tell one valid answer from another on any of the prompts.

    knobs: of the recipe, `reward` and `allow_constant_reward` among them.
    """
    specs = [spec.strip() for spec in str(knobs["reward"]).split(",") if spec.strip()]
    if any(opened_in_training(spec) for spec in specs):
        return  # what a trained model says is only known with the model
    located = rewards_located(",".join(specs), agent).split(",")
    functions = rewards_named(located, code_execution=settings.ENABLE_CODE_EXECUTION)
    fault, may_insist = teaching_fault(functions, rows, agent)
    if fault and not (may_insist and knobs["allow_constant_reward"]):
        raise RunRefused(fault)


def train_plan(order: TrainOrder, progress: ProgressCallback | None = None) -> dict[str, object]:
    """Plan of what `train` would do (--dry-run): the dataset's counts, steps, minutes, memory, the recipe,
    and the share of valid answers of the base. `progress` is told the phases. Raises what refuses, as `train` does."""
    if order.source == "db":
        agent_check(order.agent)  # before torch is loaded, which takes seconds
    phase = phase_callback(progress)
    phase(HARDWARE)
    hardware = hardware_of(order.definition)
    config, recipe = recipe_for(order, hardware)
    order = base_model_settle(order, phase)
    phase(READING)
    dataset = dataset_prepare(order, recipe, feedback_unlearnt(order), dry_run=True)
    recipe = recipe_sized(order, recipe, dataset, hardware)
    if hardware is None or not isinstance(recipe, Recipe):
        expected = linear_runs.plan_of(dataset, order.served)
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
        "evidence": distance.model_dump() if distance else None,
        **expected,
    }


def _adapter_plan(
    order: TrainOrder,
    recipe: Recipe,
    prepared: PreparedDataset,
    hardware: Hardware,
    phase: Callable[[str], None],
) -> tuple[Recipe, dict[str, object]]:
    """The recipe within its minutes, with the cost of training an adapter by it, whether it would teach, and whether
    the base's answers are valid."""
    from rl.training import preflight

    base_model = base_model_for(order)
    rows, eval_rows = list(prepared.rows("train")), list(prepared.rows("eval"))
    if isinstance(recipe, SFTRecipe) and recipe.is_taught:
        rows, eval_rows, _ = demonstration_rows(recipe, rows, eval_rows, order.served)
        recipe = recipe.refit_to_rows(len(rows))
    phase("checking the rows as tokens")
    base = base_measured(base_model, recipe, hardware)
    samples, left_out = preflight.tokens_check(base, recipe, rows, eval_rows)
    with agent_resolve(order.served):
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
    return recipe, {
        "samples": {**prepared.counts, **samples},
        "left_out": dict(Counter(prepared.left_out) + Counter(left_out)),
        "estimated_steps": expected.steps,
        "estimated_minutes": expected.minutes,
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
