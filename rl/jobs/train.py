"""Claim a run, train it, enter its policy: the door to the training room. Torch is imported inside functions alone."""

from __future__ import annotations

import functools
import importlib
import subprocess
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import TYPE_CHECKING, Any, NoReturn

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection

from backend.installation import INSTALLED
from feedback.selectors import prompts_of_feedback
from rl.agents import agent_resolve
from rl.datasets import DatasetRefused, Prepared, prepare_training_dataset, snapshot_rows
from rl.datasets.buffer import buffer_ids, feedback_release, feedback_take
from rl.datasets.demonstrations import demonstration_rows
from rl.datasets.gate_distance import distance_of_prepared
from rl.datasets.replay import Replay
from rl.datasets.reward_records import RewardsRefused, rewards_calculate
from rl.datasets.run_feedback import run_feedback_resolve, run_rewards_resolve
from rl.jobs import linear as linear_runs
from rl.jobs.distributed import Alone, Beside, Launch, launch_join
from rl.jobs.form_stage import form_stage_run
from rl.jobs.lifecycle import (
    MAX_ATTEMPTS,
    PhaseRecorder,
    ProgressCallback,
    RunListener,
    TrainOrder,
    base_model_for,
    pulse,
    run_claim,
    run_finish,
    run_interrupt,
    run_log,
    stop_signals,
)
from rl.jobs.memory_estimate import memory_estimate
from rl.jobs.results import figures_of, policy_publish, result_persist, run_warning, train_report
from rl.jobs.reward_stage import reward_model_resolve, waits_for_reward_model
from rl.jobs.stages import Rooms, StageStopped
from rl.jobs.teachability import teachability_warning
from rl.jobs.warm_start import recipe_opened, start_resolved
from rl.linear.rows import LinearRefused
from rl.models import Snapshot, TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.learner_config import learner_settings
from rl.models.runs import LEARNER, RunRefused, run_folder
from rl.recipes import BasicRecipe, Recipe, RecipeError, SFTRecipe, recipe_named
from rl.recipes.methods import METHODS, dataset_kind, method_named
from rl.recipes.sft import SHOWN
from rl.registry import service as registry
from rl.reward_models.service import (
    RewardModelRefused,
    reward_model_judge,
    reward_model_register,
)
from rl.reward_models.specs import rewards_located
from rl.reward_models.teachability import TEACHING_ROWS, teaching_check
from rl.rewards.named import RewardRefused

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.preflight import AnswerCheck
    from rl.training.processes import Processes
    from rl.training.progress import TrainListener
    from rl.training.result import TrainResult

Status = TrainingRun.Status

# --- Hardware and recipes -----------------------------------------------------------------------------------


def hardware_detect(profile: str | None = None) -> Hardware:
    """This machine; the probe of its arithmetic is kept in RATCHET_HOME/cache. `profile`: in place of RATCHET_PROFILE.

    Raises HardwareRefused (a ValueError) for a profile that it cannot have.
    """
    from rl.training.hardware import detect

    return detect(settings.RATCHET_HOME / "cache", profile or settings.RATCHET_PROFILE)


def recipe_for(order: TrainOrder, hardware: Hardware | None) -> tuple[str, Any]:
    """The preset's name and the recipe: preset, then the RATCHET_CONFIG file, then the order's own knobs. hardware:
    None for a method that trains no adapter."""
    preset = hardware.preset if hardware is not None else "default"
    name = order.config or method_named(order.method).preset(preset)
    configured = settings.RATCHET_CONFIG.get(order.method) or {}
    knobs = dict(order.knobs)
    if "epochs" in knobs or "epochs" in configured:
        knobs.setdefault("min_steps", 0)  # who names the passes gets them
    recipe = recipe_named(order.method, name, settings.RATCHET_CONFIG.get(order.method)).with_knobs(**knobs)
    recipe = _with_lengths(recipe, order.agent, {*knobs, *configured})
    if not method_named(order.method).adapter:
        return name, linear_runs.feedback_resolved(order, recipe)
    if method_named(order.method).rewarded:
        rewards_located(recipe.reward, order.agent)  # refused now rather than when the run has begun
    recipe = start_resolved(order, recipe)
    if recipe.whole and hardware is not None:
        if "learning_rate" not in {*knobs, *configured}:
            recipe = recipe.with_knobs(learning_rate=recipe.learning_rate * WHOLE_RATE)
        _memory_check(order, recipe, hardware)
    return name, recipe


def _memory_check(order: TrainOrder, recipe: Recipe, hardware: Hardware) -> None:
    """Raises RunRefused for full fine-tuning of a base model that the machine has no memory for, one row at a time."""
    base_model = base_model_for(order)
    least = recipe.as_dict() | {"batch_size": 1, "gradient_checkpointing": True}
    needed = memory_estimate(base_model, least, 2 if METHODS[order.method].kind in ("pairs", "labels") else 1)
    if needed.gb is not None and needed.gb > MOST_OF_MEMORY * hardware.memory_gb:
        raise RunRefused(
            f"--lora-r 0 trains every weight of {base_model}, which takes {needed.gb:g} GB ({needed.by}); this machine "
            f"has {hardware.memory_gb:g} GB, of which a tenth is left to others. Train a LoRA adapter (--lora-r 16), "
            "or a smaller base model"
        )


WHOLE_RATE = 0.1
"""Learning rate of full fine-tuning by a preset's, which is LoRA's: the best rates differ by about ten (Schulman et al.
2025, "LoRA Without Regret")."""

MOST_OF_MEMORY = 0.9
"""Share of a machine's memory that a training may take."""


def _with_lengths(recipe: Any, agent: str, named: Collection[str]) -> Any:
    """The recipe with room for prompts and answers of an agent that says how long its are, in knobs nobody named."""
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


# --- Training -----------------------------------------------------------------------------------------------


def train_plan(order: TrainOrder, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Plan of what `train` would do (--dry-run): the dataset's counts, steps, minutes, memory, the recipe,
    and the share of valid answers of the base. `progress` is told the phases. Raises what refuses, as `train` does."""
    phase = _phase_of(progress)
    phase(HARDWARE)
    hardware = _hardware_of(order.method)
    config, recipe = recipe_for(order, hardware)
    phase(READING)
    prepared = _prepare(order, recipe, _new(order), dry_run=True)
    recipe = recipe.fit_to_rows(prepared.counts["train"])
    phase("estimating steps, minutes and memory")
    expected = (
        linear_runs.plan_of(prepared, order.agent)
        if hardware is None
        else _adapter_plan(order, recipe, prepared, hardware, phase)
    )
    distance = distance_of_prepared(prepared, order.agent)
    return {
        "agent": order.agent,
        "samples": prepared.counts,
        "sources": prepared.sources,
        "left_out": prepared.left_out,
        "balance": prepared.balance,
        "query": prepared.query | ({"unreadable": prepared.unreadable} if prepared.unreadable else {}),
        "simulated_share": prepared.simulated_share,
        "base_model": base_model_for(order),
        "config": config,
        "recipe": recipe.as_dict(),
        "hardware": hardware.as_dict() if hardware is not None else {},
        "evidence": distance.as_dict() if distance else None,
        **expected,
    }


def _hardware_of(method: str) -> Hardware | None:
    """This machine where a method trains an adapter; None, and no torch loaded, where it does not."""
    return hardware_detect() if method_named(method).adapter else None


def _phase_of(progress: ProgressCallback | None) -> Callable[[str], None]:
    """Callback that names a phase before there is a run to write it into."""

    def phase(name: str) -> None:
        if progress is not None:
            progress(0, 0, name)

    return phase


HARDWARE, READING = "looking at the hardware", "reading the feedback"
"""Phases before a run has its dataset."""


def _adapter_plan(
    order: TrainOrder,
    recipe: Recipe,
    prepared: Prepared,
    hardware: Hardware,
    phase: Callable[[str], None],
) -> dict[str, Any]:
    """Cost of training an adapter, whether it would teach, and whether the base's answers are valid."""
    from rl.training import preflight

    base_model = base_model_for(order)
    expected = _import_reference(order.method, method_named(order.method).estimate)(
        base_model, recipe, list(prepared.rows("train")), hardware=hardware
    )
    tries = max(1, int(recipe.as_dict().get("search", 0)))  # each takes about as long
    with agent_resolve(agent_served(order.agent)):
        look = preflight.plan_check(
            base_model,
            recipe_opened(recipe),
            [*prepared.rows("eval"), *prepared.rows("train")],
            agent=order.agent,
            hardware=hardware,
            cache_dir=settings.RATCHET_HOME / "cache",
            phase=phase,
        )
    return {
        "estimated_steps": expected.steps * tries,
        "estimated_minutes": expected.minutes * tries,
        "estimated_memory_gb": expected.memory_gb,
        "doubt": teachability_warning(recipe, prepared.counts["train"], prepared.kind),
        "preflight": {"before": look.as_dict()} if look else {},
        "warning": preflight.warning_of(look, recipe),
    }


def train(
    order: TrainOrder,
    progress: ProgressCallback | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Dataset, run, training, registry: from an order to a candidate policy, or to a stored reason why not.

    In a launch of several processes (`accelerate launch`) the first does all of this; the others only compute, and end
    with Beside. Raises what refuses (DatasetRefused, RecipeError, RunRefused, the furnace's TrainingRefused) or fails
    (TrainingFailed); the run's row has been marked by then. `note` is told before anything is loaded why the training
    may teach nothing.
    """
    _phase_of(progress)(HARDWARE)
    hardware = _hardware_of(order.method)
    with _launch_of(hardware) as launch:
        if hardware is not None and not launch.first:
            _train_follower(launch, hardware)
        _phase_of(progress)(READING)
        run = _run_register(order, hardware)
        if note is not None and (why := run_warning(run)):
            note(why)
        return _run_claimed(run_claim(run.pk), hardware, progress, launch, actor=order.actor)


def _launch_of(hardware: Hardware | None) -> AbstractContextManager[Launch]:
    """This process's part in its launch; what trains no adapter is never spread over several processes."""
    return launch_join(_processes(hardware) if hardware is not None else Alone())


def _processes(hardware: Hardware) -> Processes:
    from rl.training.processes import Processes

    return Processes(cpu=hardware.device == "cpu")


def _run_register(order: TrainOrder, hardware: Hardware | None) -> TrainingRun:
    """The row of a run, with its dataset."""
    config, recipe = recipe_for(order, hardware)
    new = _new(order)
    prepared = _prepare(order, recipe, new)
    recipe = recipe.fit_to_rows(prepared.counts["train"])
    run = TrainingRun.objects.create(
        agent=order.agent,
        result=order.initial_result,
        method=order.method,
        asked_by=order.actor,
        stage_of_id=order.stage_of,
        snapshot=prepared.snapshot,
        base_model=base_model_for(order),
        config=config,
        recipe=recipe.as_dict(),
        seed=recipe.seed,
        code_version=code_version(),
        hardware=hardware.as_dict() if hardware is not None else {},
        output=registry.home_relative(order.output) if order.output else "",
    )
    run_feedback_resolve(run, prepared, recipe, new)
    return run


def train_queued(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, Any]:
    """Train a run that `run_enqueue` entered. What refuses it is raised, and stands as the run's reason."""
    return _train_entered(run_id, progress, actor=actor, resume=False)


def _settle(run: TrainingRun, hardware: Hardware | None) -> None:
    """Give a claimed run that was only asked for its preset, recipe and dataset; a run that has them is left alone."""
    try:
        if run.snapshot is None:
            order = TrainOrder(run.agent, run.method, run.config or None, run.base_model, run.recipe)
            run.config, recipe = recipe_for(order, hardware)
            run.snapshot = _dataset(run, order, recipe)
            recipe = recipe.fit_to_rows(run.snapshot.counts["train"]) if run.snapshot else recipe
            run.recipe, run.seed = recipe.as_dict(), recipe.seed
            run.hardware = hardware.as_dict() if hardware is not None else {}
            run.code_version = code_version()
            run.save(update_fields=["config", "recipe", "seed", "snapshot", "hardware", "code_version"])
    except (
        DatasetRefused, RecipeError, RewardRefused, RewardsRefused, RewardModelRefused, RunRefused,
        registry.RegistryRefused,
    ) as refusal:  # fmt: skip
        run_finish(run, Status.REFUSED, reason=str(refusal))
        raise
    except BaseException as error:
        _run_end(run, error)
        raise


def _dataset(run: TrainingRun, order: TrainOrder, recipe: BasicRecipe) -> Snapshot | None:
    """The dataset of a claimed run. A retrain of the online learner reads no more new feedback than its settings say,
    and what decisions earned is calculated before it reads."""
    put_off: set[uuid.UUID] = set()
    if run.asked_by == LEARNER:
        rewards_calculate(run.agent)
        new = feedback_take(run, newest=learner_settings(run.agent).max_buffer_size)
        put_off = set(buffer_ids(run.agent, but=run)).difference(new)
    else:
        new = feedback_take(run) if method_named(run.method).policy else _new(order)
    prepared = _prepare(order, recipe, new, put_off=put_off)
    run_feedback_resolve(run, prepared, recipe, new)
    return prepared.snapshot


def _run_end(run: TrainingRun, error: BaseException) -> None:
    """A claimed run met the unexpected: it failed, or goes back to the workers where only the database went away."""
    transient = isinstance(error, (OperationalError, InterfaceError))
    if transient and run.dispatched_at is not None and run.attempts < MAX_ATTEMPTS:
        connection.close()  # what is left of it
        run_interrupt(run, reason=f"the database went away: {str(error).strip().splitlines()[0]}")
    else:
        run_finish(run, Status.FAILED, reason=f"{type(error).__name__}: {error}")


def train_resume(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, Any]:
    """Go on with a run that was killed, cancelled or failed, from its last whole checkpoint, with its own recipe."""
    return _train_entered(run_id, progress, actor=actor, resume=True)


def _train_entered(
    run_id: int, progress: ProgressCallback | None, *, actor: str, resume: bool
) -> dict[str, Any]:
    _phase_of(progress)(HARDWARE)
    hardware = _hardware_of(
        TrainingRun.objects.filter(pk=run_id).values_list("method", flat=True).first() or "dpo"
    )
    with _launch_of(hardware) as launch:
        if hardware is not None and not launch.first:
            _train_follower(launch, hardware)
        run = run_claim(run_id, resume=resume)
        with pulse(run):
            PhaseRecorder(run, progress)(0, 0, READING)
            # by a worker that died; one that was killed before it had its dataset starts over
            begun = run.snapshot is not None
            if begun:
                feedback_release(run)
            _settle(run, hardware)
            return _run_claimed(run, hardware, progress, launch, actor=actor, resume=begun)


def _train_follower(launch: Launch, hardware: Hardware) -> NoReturn:
    """A further process of a launch: its share of the arithmetic, and not a word to database, log or screen."""
    from rl.training.progress import Silent

    more = True
    while more:
        run_id, resume, more = launch.follow()
        _run_training(TrainingRun.objects.get(pk=run_id), hardware, Silent(), resume=resume)
    raise Beside(f"run {run_id} is the first process's to report")


def _new(order: TrainOrder) -> list[uuid.UUID]:
    """Feedback that a run of this order would learn from for the first time. A reward model takes none away, nor does
    a stage, so they may read what a run at work has: that run may be the one whose stage it is."""
    alone = method_named(order.method).policy and order.stage_of is None
    return buffer_ids(order.agent, at_work=alone) if order.source == "db" else []


def _prepare(
    order: TrainOrder,
    recipe: BasicRecipe,
    new: Sequence[uuid.UUID],
    *,
    put_off: Collection[uuid.UUID] = (),
    dry_run: bool = False,
) -> Prepared:
    replay = None
    if recipe.replay_share < 1:
        if order.source != "db":
            raise RunRefused("replay_share is for the feedback recorded here; a file is trained on whole")
        replay = Replay(recipe.replay_share, frozenset(prompts_of_feedback(new)))
    prepared = prepare_training_dataset(
        order.agent,
        kind=dataset_kind(order.method, recipe.as_dict()),
        source=order.source,
        data_file=order.data_file,
        ratings_file=order.ratings_file,
        min_samples=order.min_samples,
        max_samples=order.max_samples,
        put_off=put_off,
        replay=replay,
        dry_run=dry_run,
        balance=recipe.as_dict().get("balance") == "downsample",
        reward_threshold=recipe.as_dict().get("reward_threshold") or None,
        sources=recipe.source_names if isinstance(recipe, SFTRecipe) else SHOWN,
    )
    if method_named(order.method).rewarded and recipe.as_dict().get("mode") != "logged":
        teaching_check(recipe.as_dict(), list(islice(prepared.rows("train"), TEACHING_ROWS)), order.agent)
    return prepared


def _run_claimed(
    run: TrainingRun,
    hardware: Hardware | None,
    progress: ProgressCallback | None,
    launch: Launch,
    *,
    actor: str,
    resume: bool = False,
    is_stage: bool = False,
) -> dict[str, Any]:
    """Train a run this process holds, and enter what it makes. is_stage: another run of this launch follows it."""
    from rl.training.result import TrainingRefused

    folder = run_folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with run_log(folder / "train.log"), stop_signals() as stop:
            if hardware is not None and waits_for_reward_model(run):
                _stages_first(run, hardware, progress, launch)
            launch.lead(run.pk, resume=resume, more=is_stage)
            listener = RunListener(run, stop, progress)
            if hardware is None:
                result = linear_runs.run_fit(run, listener)
            else:
                result = _run_training(run, hardware, listener, resume=resume)
            listener.on_phase("writing the results")
            result_persist(run, result)
        policy, judge = None, None
        if result.status != "cancelled" and run.method == "reward_model":
            figures = figures_of(run, result)

            def finish(reason: str) -> None:
                run_finish(run, Status.SUCCEEDED, reason=reason, **figures)

            judge = reward_model_register(run, result, actor=actor, finish=finish)
        if result.status != "cancelled" and method_named(run.method).policy:
            policy = policy_publish(run, result, actor=actor)
    except KeyboardInterrupt:
        run_finish(run, Status.CANCELLED, reason="stopped by Ctrl-C before the first checkpoint")
        raise
    except StageStopped as stopped:
        return _stopped_in_stage(run, stopped)
    except (
        TrainingRefused,
        DatasetRefused,
        RewardModelRefused,
        RunRefused,
        registry.RegistryRefused,
    ) as refusal:
        run_finish(run, Status.REFUSED, reason=str(refusal))
        raise
    except BaseException as error:
        _run_end(run, error)
        raise
    if judge is not None and hardware is not None:
        reward_model_judge(judge, actor=actor, hardware=hardware)
    elif policy is None:
        run.refresh_from_db()
        where = f"stopped at step {result.steps} of {result.total_steps}"
        if run.dispatched_at is not None and not run.cancel_requested:
            run_interrupt(run, reason=f"{where} with its worker", **figures_of(run, result))
        else:
            said = f"{run.reason}, " if run.cancel_requested else ""
            run_finish(run, Status.CANCELLED, reason=f"{said}{where}", **figures_of(run, result))
    return train_report(run, result, policy, judge)


def _stages_first(
    run: TrainingRun, hardware: Hardware, progress: ProgressCallback | None, launch: Launch
) -> None:
    """The stages of a run whose reward is `auto`, as runs of their own: the form of an answer where the base model
    gives few valid ones, then its reward model. Each is found, gone on with, or trained."""

    def trained(stage: TrainingRun) -> dict[str, Any]:
        resume = stage.status != Status.QUEUED
        stage = run_claim(stage.pk, resume=resume)
        return _run_claimed(
            stage, hardware, progress, launch, actor=stage.asked_by, resume=resume, is_stage=True
        )

    rooms = Rooms(lambda order: _run_register(order, hardware), trained)
    form_stage_run(run, lambda: _answers_of_base(run, hardware), rooms)
    reward_model_resolve(run, rooms)
    run_rewards_resolve(run)


def _answers_of_base(run: TrainingRun, hardware: Hardware) -> AnswerCheck | None:
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
        )


LOOKED_AT = 500
"""Prompts of each split that the base's answers are looked for among."""


def _stopped_in_stage(run: TrainingRun, stopped: StageStopped) -> dict[str, Any]:
    """End a run whose first stage was stopped: back to the workers, or cancelled; either can be gone on with."""
    run.refresh_from_db()
    if run.dispatched_at is not None and not run.cancel_requested and not stopped.cancelled:
        run_interrupt(run, reason=str(stopped))
    else:
        said = f"{run.reason}, " if run.cancel_requested else ""
        run_finish(run, Status.CANCELLED, reason=f"{said}{stopped}")
    return {"run": run.pk, "method": run.method, "status": "cancelled", "policy": None, "agent": run.agent,
            "why": run.result.get("why", ""), "steps": 0, "total_steps": run.steps_total}  # fmt: skip


def _run_training(
    run: TrainingRun, hardware: Hardware, listener: TrainListener, *, resume: bool
) -> TrainResult:
    """Open the training room for one run. Writes nothing but files below the run's folder."""
    from rl.training.hardware import threads_settle
    from rl.training.memory import allocator_settle
    from rl.training.preflight import trained_between_looks
    from rl.training.result import TrainingRefused
    from rl.training.search import SearchTrainer

    snapshot = run.snapshot
    if snapshot is None:
        raise RunRefused(f"run {run.pk} has no snapshot to train on")
    folder = run_folder(run)
    allocator_settle()  # this process trains and then ends
    threads_settle(hardware)
    method = method_named(run.method)
    knobs: Any = method.recipe.from_dict(run.recipe)
    recipe: Any = recipe_opened(knobs)
    if method.rewarded:
        recipe = recipe.with_knobs(reward=rewards_located(recipe.as_dict()["reward"], run.agent))
    trains = _import_reference(method.slug, method.trainer)
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
    )
    train, held_out = (list(snapshot_rows(snapshot, split)) for split in ("train", "eval"))
    notes: list[str] = []
    if isinstance(recipe, SFTRecipe) and recipe.feedback != "corrections":
        try:
            train, held_out, note = demonstration_rows(recipe, train, held_out, run.agent)
        except LinearRefused as refusal:
            raise TrainingRefused(str(refusal)) from refusal
        notes.append(note)
    with agent_resolve(agent_served(run.agent)):
        result = trained_between_looks(
            trainer,
            recipe,
            train,
            held_out,
            agent=run.agent,
            listener=listener,
            resume=resume,
        )
    result.notes.extend(notes)
    return result


def _import_reference(method: str, path: str) -> Any:
    """The trainer or the estimate of a method, `module:name`. Raises RunRefused where there is none."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise RunRefused(
            f"method {method}: expected {path}, which cannot be imported ({type(error).__name__}: {error}); correct "
            "the row of the method, or the package that brings it"
        ) from error


def code_version() -> str:
    """The version of this code, with the commit where it is a git checkout."""
    if INSTALLED:  # git would answer with the commit of whatever checkout site-packages lies in
        return settings.RATCHET_VERSION
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(settings.BASE_DIR), "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return settings.RATCHET_VERSION
    commit = found.stdout.strip()
    return (
        f"{settings.RATCHET_VERSION}+{commit}"
        if found.returncode == 0 and commit
        else settings.RATCHET_VERSION
    )
