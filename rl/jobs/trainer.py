"""Entry point to `rl.training` for one run: its trainer, made and run; nothing is written to the database here."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import random
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.conf import settings

from rl.agents import agent_resolve
from rl.datasets import snapshot_rows
from rl.datasets.demonstrations import demonstration_rows
from rl.datasets.feedback_types import Row
from rl.jobs.warm_start import recipe_opened
from rl.models import TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused, run_folder
from rl.recipes import Recipe, SFTRecipe
from rl.recipes.methods import method_named
from rl.reward_models.service import rewards_located

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.preflight import AnswerCheck
    from rl.training.profiler import MeasuredBase
    from rl.training.result import TrainListener, TrainResult

LOOKED_AT = 500
"""Prompts of each split that the base's answers are looked for among."""


def trainer_run(
    run: TrainingRun,
    hardware: Hardware,
    listener: TrainListener,
    *,
    resume: bool,
    began: float | None = None,
) -> TrainResult:
    """Train one run. Writes nothing but files below the run's folder. `began` is when its minutes began to count, on
    the monotonic clock; now where it is left out."""
    from rl.training.hardware import allocator_settle, threads_settle
    from rl.training.preflight import train_with_checks
    from rl.training.search import SearchTrainer

    snapshot = run.snapshot
    if snapshot is None:
        raise RunRefused(f"run {run.pk} has no snapshot to train on")
    folder = run_folder(run)
    allocator_settle()  # this process trains and then ends
    threads_settle(hardware)
    method = method_named(run.method)
    knobs = method.recipe.from_dict(run.recipe)
    assert isinstance(knobs, Recipe)
    recipe = recipe_opened(knobs)
    if method.rewarded:
        recipe = recipe.with_knobs(reward=rewards_located(recipe.as_dict()["reward"], run.agent))
    train, held_out = (list(snapshot_rows(snapshot, split)) for split in ("train", "eval"))
    notes: list[str] = []
    if isinstance(recipe, SFTRecipe) and recipe.is_taught:
        train, held_out, note = demonstration_rows(recipe, train, held_out, run.agent)
        recipe = recipe.refit_to_rows(len(train))
        notes.append(note)
    deadline, passes = None, None
    if isinstance(recipe, Recipe) and recipe.minutes:
        passes = recipe.epochs if recipe.epochs < 1 else None  # as the run was asked for, for a resume
        deadline = (began or time.monotonic()) + 60 * (1 - FINISHING_SHARE) * recipe.minutes
        train = rows_read(recipe, train)
        recipe = dataclasses.replace(recipe, epochs=max(recipe.epochs, 1.0))
    trains = import_reference(method.slug, method.trainer)
    if recipe.as_dict().get("search", 0) > 1:
        trains = functools.partial(SearchTrainer, trains)
    trainer = trains(
        recipe,
        run.base_model,
        output_dir=folder,
        agent=run.agent,
        hardware=hardware,
        listener=listener,
        resume=resume,
        cache_dir=settings.RATCHET_HOME / "cache",
        **({} if deadline is None else {"deadline": deadline}),
    )
    with agent_resolve(agent_served(run.agent)):
        result = train_with_checks(
            trainer,
            recipe,
            train,
            held_out,
            agent=run.agent,
            listener=listener,
            resume=resume,
        )
    result.notes.extend(notes)
    result.recipe |= {"epochs": passes} if passes is not None else {}
    return result


FINISHING_SHARE = 0.05
"""Share of the minutes left for the evaluation, the answers and the files after the last step."""


def rows_read(recipe: Recipe, rows: list[Row]) -> list[Row]:
    """The rows that a run of less than one pass reads, drawn by its seed; all rows otherwise."""
    if recipe.epochs >= 1 or recipe.max_steps > 0:
        return rows
    return random.Random(recipe.seed).sample(rows, max(1, math.floor(recipe.epochs * len(rows))))


def base_measured(base_model: str, recipe: Recipe, hardware: Hardware) -> MeasuredBase:
    """A base model as a run of the recipe loads it, to be measured and asked before."""
    from rl.training.profiler import MeasuredBase

    cache_dir = settings.RATCHET_HOME / "cache"
    return MeasuredBase(base_model, hardware, quantization=recipe.quantization, cache_dir=cache_dir)


def answers_of_base(run: TrainingRun, hardware: Hardware, phase: Callable[[str], None]) -> AnswerCheck | None:
    """The base model's answers to prompts of a run, and whether its agent can act on them; None for free text."""
    from rl.training.preflight import base_check

    assert run.snapshot is not None  # a claimed run has its dataset
    rows = [
        row for split in ("eval", "train") for row in islice(snapshot_rows(run.snapshot, split), LOOKED_AT)
    ]
    with agent_resolve(agent_served(run.agent)):
        return base_check(
            run.base_model,
            rows,
            agent=run.agent,
            hardware=hardware,
            quantization=str(run.recipe.get("quantization", "none")),
            cache_dir=settings.RATCHET_HOME / "cache",
            phase=phase,
        )


def import_reference(method: str, path: str) -> Any:
    """The trainer or the estimate of a method, `module:name`. Raises RunRefused where there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunRefused(
            f"method {method}: expected {path}, which cannot be imported ({type(error).__name__}: {error}); correct "
            "the row of the method, or the package that brings it"
        ) from error
