"""Dataset of a run: the feedback it takes, the snapshot made of it, the check of rewards on it, and the run's row."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.conf import settings

from feedback.selectors import prompts_of_feedback
from rl.datasets import PreparedDataset, prepare_training_dataset
from rl.datasets.buffer import buffer_ids, feedback_take, run_feedback_resolve
from rl.datasets.examples import Replay
from rl.datasets.feedback_types import Row
from rl.datasets.reward_records import rewards_calculate
from rl.datasets.rows import RowRules
from rl.jobs.hardware import code_version
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.jobs.run_recipe import recipe_for, recipe_timed
from rl.models import Snapshot, TrainingRun
from rl.models.learning import learner_settings
from rl.models.runs import LEARNER, RunRefused
from rl.recipes import BasicRecipe, SFTRecipe
from rl.recipes.base import KEEP, AnswerRecipe
from rl.recipes.methods import dataset_kind, method_named
from rl.recipes.sft import EXAMPLE_SOURCES
from rl.registry import service as registry
from rl.rewards.catalogue import opened_in_training, rewards_named
from rl.rewards.rows import teaching_fault

if TYPE_CHECKING:
    from rl.training.hardware import Hardware

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
        new = feedback_take(run) if method_named(run.method).policy else feedback_unlearnt(order)
    prepared = dataset_prepare(order, recipe, new, put_off=put_off)
    run_feedback_resolve(run, prepared, recipe, new)
    return prepared


def feedback_unlearnt(order: TrainOrder) -> list[uuid.UUID]:
    """Feedback that a run of this order would learn from for the first time. A reward model takes none away, nor does
    a stage, so they may read what a run at work has: that run may be the one whose stage it is."""
    alone = method_named(order.method).policy and order.stage_of is None
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
        rules=RowRules(
            reward_threshold=recipe.as_dict().get("reward_threshold") or None,
            balance=recipe.as_dict().get("balance") == "downsample",
            sources=tuple(recipe.source_names) if isinstance(recipe, SFTRecipe) else EXAMPLE_SOURCES,
            implied=bool(recipe.as_dict().get("implied_pairs")),
            keep_reasoning=isinstance(recipe, AnswerRecipe) and recipe.reasoning == KEEP,
        ),
        min_samples=order.min_samples,
        max_samples=order.max_samples,
        put_off=put_off,
        replay=replay,
        dry_run=dry_run,
    )
    if method_named(order.method).rewarded and recipe.as_dict().get("mode") != "logged":
        teaching_check(recipe.as_dict(), list(islice(dataset.rows("train"), TEACHING_ROWS)), order.agent)
    return dataset


def teaching_check(knobs: Mapping[str, Any], rows: Sequence[Row], agent: str) -> None:
    """Raises RunRefused for rewards that cannot tell one valid answer from another on any of the prompts.

    knobs: of the recipe, `reward` and `allow_constant_reward` among them.
    """
    specs = [spec.strip() for spec in str(knobs["reward"]).split(",") if spec.strip()]
    if any(opened_in_training(spec) for spec in specs):
        return  # what a trained model says is only known with the model
    functions = rewards_named(specs, code_execution=settings.ENABLE_CODE_EXECUTION)
    fault, may_insist = teaching_fault(functions, rows, agent)
    if fault and not (may_insist and knobs["allow_constant_reward"]):
        raise RunRefused(fault)
