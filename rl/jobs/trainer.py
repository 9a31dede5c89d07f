"""Entry point to `rl.training`: the machine, a run's first weights, its trainer. Writes no database row."""

from __future__ import annotations

import dataclasses
import importlib
import math
import random
import subprocess
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.conf import settings

from backend.installation import IS_INSTALLED
from rl.agents import agent_resolve
from rl.agents.base import Agent
from rl.checksums import FileDamaged
from rl.datasets import snapshot_rows
from rl.datasets.demonstrations import demonstration_rows
from rl.datasets.feedback_types import Row
from rl.jobs.lifecycle import TrainOrder, base_model_for
from rl.models import Policy, TrainingRun
from rl.models.runs import RunRefused, run_folder
from rl.recipes import BASE, CHAMPION, STAGE_STARTS, Recipe, SFTRecipe
from rl.recipes.base import Method
from rl.registry import service as registry
from rl.registry.integrity import adapter_folder
from rl.reward_models.service import rewards_located

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.preflight import AnswerCheck
    from rl.training.profiler import MeasuredBase
    from rl.training.result import TrainListener, TrainResult


def start_resolved(order: TrainOrder, recipe: Recipe) -> Recipe:
    """The recipe with `champion` made the name of the policy it stands for now, or base where there is none here.

    Raises RunRefused for a policy of another base model or without files, RegistryRefused
    for an unknown one.
    """
    start = recipe.as_dict().get("start_from", BASE)
    if start == BASE or start in STAGE_STARTS:
        return recipe
    base_model = base_model_for(order)
    if start == CHAMPION:
        champion = registry.champion_of(order.agent)
        fits = champion is not None and champion.base_model == base_model
        return recipe.with_knobs(start_from=champion.name if champion is not None and fits else BASE)
    found = registry.policy_get(start)
    if found.kind != Policy.Kind.ADAPTER:
        raise RunRefused(
            f"start_from {start}: it is no adapter ({found.get_kind_display()}), so there are no weights to begin "
            "with; start from base"
        )
    if found.base_model != base_model:
        raise RunRefused(
            f"start_from {start}: it is an adapter for {found.base_model}, this run trains {base_model}; give --model "
            f"{found.base_model}, or start from base"
        )
    start_located(start)
    return recipe.with_knobs(start_from=found.name)


def recipe_opened(recipe: Recipe) -> Recipe:
    """The recipe as the training package takes it: the folder of the adapter to start from in place of its name."""
    start = recipe.as_dict().get("start_from", BASE)
    if start in STAGE_STARTS:  # of a dry run, before the stage is trained
        return recipe.with_knobs(start_from=BASE)
    return recipe if start == BASE else recipe.with_knobs(start_from=start_located(start))


def start_located(name: str) -> str:
    """The folder of the adapter that a run starts from. Raises RunRefused where its files are gone."""
    try:
        folder = adapter_folder(registry.policy_get(name))
    except FileDamaged as damage:
        raise RunRefused(f"start_from {name}: {damage}; or start from base") from damage
    if not folder.is_dir():
        raise RunRefused(
            f"start_from {name}: its files were deleted ({folder}); start from base or from the champion"
        )
    return str(folder)


LOOKED_AT = 500
"""Prompts of each split that the base's answers are looked for among."""


def trainer_run(
    run: TrainingRun,
    agent: Agent,
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

    snapshot = run.snapshot
    if snapshot is None:
        raise RunRefused(f"run {run.pk} has no snapshot to train on")
    folder = run_folder(run)
    allocator_settle()  # this process trains and then ends
    threads_settle(hardware)
    method = run.definition
    knobs = method.recipe.from_dict(run.recipe)
    assert isinstance(knobs, Recipe)
    recipe = recipe_opened(knobs)
    if method.rewarded:
        recipe = recipe.with_knobs(reward=rewards_located(recipe.as_dict()["reward"], run.agent))
    train, held_out = (list(snapshot_rows(snapshot, split)) for split in ("train", "eval"))
    notes: list[str] = []
    if isinstance(recipe, SFTRecipe) and recipe.is_taught:
        train, held_out, note = demonstration_rows(recipe, train, held_out, agent)
        recipe = recipe.refit_to_rows(len(train))
        notes.append(note)
    deadline, passes = None, None
    if isinstance(recipe, Recipe) and recipe.minutes:
        passes = recipe.epochs if recipe.epochs < 1 else None  # as the run was asked for, for a resume
        deadline = (began or time.monotonic()) + 60 * (1 - FINISHING_SHARE) * recipe.minutes
        train = rows_read(recipe, train)
        recipe = dataclasses.replace(recipe, epochs=max(recipe.epochs, 1.0))
    trainer = import_reference(method.slug, method.trainer)(
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
    with agent_resolve(agent):
        result = train_with_checks(
            trainer,
            recipe,
            train,
            held_out,
            agent=run.agent,
            listener=listener,
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


def answers_of_base(
    run: TrainingRun, agent: Agent, hardware: Hardware, phase: Callable[[str], None]
) -> AnswerCheck | None:
    """The base model's answers to prompts of a run, and whether its agent can act on them; None for free text."""
    from rl.training.preflight import base_check

    assert run.snapshot is not None  # a claimed run has its dataset
    rows = [
        row for split in ("eval", "train") for row in islice(snapshot_rows(run.snapshot, split), LOOKED_AT)
    ]
    with agent_resolve(agent):
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


# --- This machine and this code, as jobs detect them and runs record them ---


def hardware_detect(profile: str | None = None) -> Hardware:
    """This machine; the probe of its arithmetic is kept in RATCHET_HOME/cache. `profile`: in place of RATCHET_PROFILE.

    Raises HardwareRefused (a ValueError) for a profile that it cannot have.
    """
    from rl.training.hardware import detect

    return detect(settings.RATCHET_HOME / "cache", profile or settings.RATCHET_PROFILE)


def hardware_of(method: Method) -> Hardware | None:
    """This machine where a method trains an adapter; None, and no torch loaded, where it does not."""
    return hardware_detect() if method.adapter else None


def code_version() -> str:
    """The version of this code, with the commit where it is a git checkout."""
    if IS_INSTALLED:  # git would answer with the commit of whatever checkout site-packages lies in
        return settings.RATCHET_VERSION
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(settings.BASE_DIR), "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return settings.RATCHET_VERSION
    commit = found.stdout.strip()
    return (
        f"{settings.RATCHET_VERSION}+{commit}"
        if found.returncode == 0 and commit
        else settings.RATCHET_VERSION
    )
