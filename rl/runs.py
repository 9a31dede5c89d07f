"""Claim a run, train it, enter its policy: the door to the training room. Torch is imported inside functions alone."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from feedback.selectors import agents_known
from rl import registry
from rl.datasets import DatasetRefused, Prepared, prepare_training_dataset, snapshot_rows
from rl.models import Policy, RunMetric, TrainingRun
from rl.recipes import DPORecipe, RecipeError, recipe_named

if TYPE_CHECKING:
    from rl.training.hardware import Hardware
    from rl.training.result import TrainResult

logger = logging.getLogger("rl.runs")

Status = TrainingRun.Status
ProgressCallback = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and a short figure to show."""

HEARTBEAT_S = 5.0
"""Seconds between signs of life of a running job."""
LOST_AFTER = timedelta(minutes=2)
"""A run of another host without a sign of life for so long is taken to be dead."""


class RunRefused(ValueError):
    """A run that cannot start, resume or be found; the message says why and what to do."""


@dataclass(frozen=True)
class TrainOrder:
    """What someone asks to be trained; left-out values come from the preset, the settings and the agent."""

    agent: str
    method: str = "dpo"
    config: str | None = None
    base_model: str | None = None
    knobs: dict[str, Any] = field(default_factory=dict)
    source: str = "db"
    data_file: Path | None = None
    ratings_file: Path | None = None
    min_samples: int | None = None
    max_samples: int | None = None
    output: Path | None = None
    actor: str = "train_dpo"


# --- Hardware and recipes -----------------------------------------------------------------------------------


def hardware_detect() -> Hardware:
    """This machine; the probe of its arithmetic is kept in RATCHET_HOME/cache."""
    from rl.training.hardware import detect

    return detect(settings.RATCHET_HOME / "cache")


def recipe_for(order: TrainOrder, hardware: Hardware) -> tuple[str, DPORecipe]:
    """The preset's name and the recipe: preset, then the RATCHET_CONFIG file, then the order's own knobs."""
    name = order.config or hardware.preset
    return name, recipe_named(order.method, name, settings.RATCHET_CONFIG.get(order.method)).with_knobs(
        **order.knobs
    )


# --- Training -----------------------------------------------------------------------------------------------


def train_plan(order: TrainOrder) -> dict[str, Any]:
    """What `train` would do (--dry-run): the dataset's counts, steps, minutes, memory, the recipe."""
    from rl.training.hardware import estimate

    hardware = hardware_detect()
    config, recipe = recipe_for(order, hardware)
    prepared = _prepare(order, dry_run=True)
    base_model = order.base_model or settings.RATCHET_BASE_MODEL
    expected = estimate(base_model, recipe, list(prepared.rows("train")), hardware=hardware)
    return {
        "samples": prepared.counts,
        "sources": prepared.sources,
        "left_out": prepared.left_out,
        "simulated_share": prepared.simulated_share,
        "estimated_steps": expected.steps,
        "estimated_minutes": expected.minutes,
        "estimated_memory_gb": expected.memory_gb,
        "base_model": base_model,
        "config": config,
        "recipe": recipe.as_dict(),
        "hardware": hardware.as_dict(),
    }


def train(order: TrainOrder, progress: ProgressCallback | None = None) -> dict[str, Any]:
    """Dataset, run, training, registry: from an order to a candidate policy, or to a stored reason why not.

    Raises what refuses (DatasetRefused, RecipeError, RunRefused, the furnace's TrainingRefused) or fails
    (TrainingFailed); the run's row has been marked by then.
    """
    hardware = hardware_detect()
    config, recipe = recipe_for(order, hardware)
    prepared = _prepare(order)
    run = TrainingRun.objects.create(
        agent=order.agent,
        method=order.method,
        snapshot=prepared.snapshot,
        base_model=order.base_model or settings.RATCHET_BASE_MODEL,
        config=config,
        recipe=recipe.as_dict(),
        seed=recipe.seed,
        code_version=code_version(),
        hardware=hardware.as_dict(),
        output=registry.home_relative(order.output) if order.output else "",
    )
    return _run_claimed(run_claim(run.pk), hardware, progress, actor=order.actor)


def run_enqueue(order: TrainOrder) -> TrainingRun:
    """Enter a run that another process trains later, by `train_queued`: what the web process does, without torch.

    The row keeps what was asked; preset, recipe and dataset are settled on the machine that trains, when it starts.
    Raises RecipeError for a knob or preset that does not exist.
    """
    recipe_named(order.method, order.config or "default").with_knobs(**order.knobs)
    return TrainingRun.objects.create(
        agent=order.agent,
        method=order.method,
        base_model=order.base_model or settings.RATCHET_BASE_MODEL,
        config=order.config or "",
        recipe=order.knobs,
    )


def train_queued(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, Any]:
    """Train a run that `run_enqueue` entered. What refuses it is raised, and stands as the run's reason."""
    run = run_claim(run_id)
    return _run_claimed(run, _settle(run), progress, actor=actor)


def _settle(run: TrainingRun) -> Hardware:
    """Give a claimed run that was only asked for its preset, recipe and dataset; a run that has them is left alone."""
    try:
        hardware = hardware_detect()
        if run.snapshot is None:
            order = TrainOrder(run.agent, run.method, run.config or None, run.base_model, run.recipe)
            run.config, recipe = recipe_for(order, hardware)
            run.recipe, run.seed = recipe.as_dict(), recipe.seed
            run.snapshot = _prepare(order).snapshot
            run.hardware, run.code_version = hardware.as_dict(), code_version()
            run.save(update_fields=["config", "recipe", "seed", "snapshot", "hardware", "code_version"])
    except (DatasetRefused, RecipeError) as refusal:
        run_finish(run, Status.REFUSED, reason=str(refusal))
        raise
    except BaseException as error:
        run_finish(run, Status.FAILED, reason=f"{type(error).__name__}: {error}")
        raise
    return hardware


def train_resume(run_id: int, progress: ProgressCallback | None = None, *, actor: str) -> dict[str, Any]:
    """Go on with a run that was killed, cancelled or failed, from its last whole checkpoint, with its own recipe."""
    run = run_claim(run_id, resume=True)
    begun = run.snapshot is not None  # one that was killed before it had its dataset starts over
    return _run_claimed(run, _settle(run), progress, actor=actor, resume=begun)


def _prepare(order: TrainOrder, *, dry_run: bool = False) -> Prepared:
    return prepare_training_dataset(
        order.agent,
        kind="pairs",
        source=order.source,
        data_file=order.data_file,
        ratings_file=order.ratings_file,
        min_samples=order.min_samples,
        max_samples=order.max_samples,
        dry_run=dry_run,
    )


def run_claim(run_id: int, *, resume: bool = False) -> TrainingRun:
    """Take a run for this process, by one conditional UPDATE, so that two workers never train the same one.

    Raises RunRefused when it does not exist, is held by a living worker, or is over.
    """
    run = TrainingRun.objects.filter(pk=run_id).first()
    if run is None:
        newest = list(TrainingRun.objects.values_list("pk", flat=True)[:5])
        raise RunRefused(f"there is no run {run_id}; the newest are {newest or 'none'}")
    allowed = TrainingRun.RESUMABLE if resume else (Status.QUEUED,)
    if run.status not in allowed:
        raise RunRefused(f"run {run_id} is {run.status}; only {', '.join(allowed)} runs can be taken")
    if run.status == Status.RUNNING and worker_lives(run):
        raise RunRefused(f"run {run_id} is still being trained by {run.worker}; stop that process first")
    claimed = TrainingRun.objects.filter(pk=run.pk, status=run.status, worker=run.worker).update(
        status=Status.RUNNING,
        worker=_worker_name(),
        reason="",
        started_at=run.started_at or timezone.now(),
        heartbeat_at=timezone.now(),
        finished_at=None,
    )
    if claimed != 1:
        raise RunRefused(f"run {run_id} was taken by another worker a moment ago")
    run.refresh_from_db()
    return run


def _worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def worker_lives(run: TrainingRun) -> bool:
    """Whether the process that claimed a run still exists (same host), or gave a sign of life lately (another)."""
    host, _, process = run.worker.rpartition(":")[0].rpartition(":")
    if host == socket.gethostname() and process.isdigit():
        try:
            # a process id is used again after a restart: the start time tells the two apart
            return f"{psutil.Process(int(process)).create_time():.0f}" == run.worker.rpartition(":")[2]
        except psutil.NoSuchProcess:
            return False
    return run.heartbeat_at is not None and timezone.now() - run.heartbeat_at < LOST_AFTER


def _run_claimed(
    run: TrainingRun,
    hardware: Hardware,
    progress: ProgressCallback | None,
    *,
    actor: str,
    resume: bool = False,
) -> dict[str, Any]:
    from rl.training.result import TrainingRefused

    folder = run_folder(run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _log_file(folder / "train.log"), stop_signals() as stop:
            result = _furnace(run, hardware, _Listener(run, stop, progress), resume=resume)
        policy = None if result.status == "cancelled" else _policy_enter(run, result, actor=actor)
    except KeyboardInterrupt:
        run_finish(run, Status.CANCELLED, reason="stopped by Ctrl-C before the first checkpoint")
        raise
    except (TrainingRefused, DatasetRefused, registry.RegistryRefused) as refusal:
        run_finish(run, Status.REFUSED, reason=str(refusal))
        raise
    except BaseException as error:
        run_finish(run, Status.FAILED, reason=f"{type(error).__name__}: {error}")
        raise
    if policy is None:
        run_finish(
            run,
            Status.CANCELLED,
            reason=f"stopped at step {result.steps} of {result.total_steps}",
            result=result,
        )
    return _train_report(run, result, policy)


def _furnace(run: TrainingRun, hardware: Hardware, listener: _Listener, *, resume: bool) -> TrainResult:
    """Open the training room for one run."""
    from rl.training.dpo import DPOTrainer

    snapshot = run.snapshot
    if snapshot is None:
        raise RunRefused(f"run {run.pk} has no snapshot to train on")
    folder = run_folder(run)
    trainer = DPOTrainer(
        DPORecipe.from_dict(run.recipe),
        run.base_model,
        output_dir=folder,
        agent=run.agent,
        hardware=hardware,
        listener=listener,
        resume=resume,
    )
    trainer.load_base_model()
    result = trainer.train(list(snapshot_rows(snapshot, "train")), list(snapshot_rows(snapshot, "eval")))
    if snapshot.simulated_share:
        result.notes.append(f"{100 * snapshot.simulated_share:.0f} % of the feedback was SIMULATED")
    result.save(folder / "result.json")
    if result.history.get("step"):
        result.plot(folder / "training.png")
    TrainingRun.objects.filter(pk=run.pk).update(
        base_model_hash=result.base_model_hash, libraries=result.libraries, steps_done=result.steps
    )
    run.refresh_from_db()
    return result


def _policy_enter(run: TrainingRun, result: TrainResult, *, actor: str) -> Policy:
    """Copy the adapter to its place beside the others, then register it and end the run in one transaction.

    A crash before that transaction leaves a folder without a row, which the resumed run replaces: never a row
    without its files.
    """
    snapshot = run.snapshot
    assert snapshot is not None  # _furnace refused otherwise
    name = registry.policy_name_next(run.agent, snapshot.feedback_count)
    home = (
        settings.RATCHET_HOME / run.output
        if run.output
        else settings.RATCHET_HOME / "policies" / run.agent / name
    )
    half = home.with_name(f".{home.name}.{run.pk}")
    shutil.rmtree(half, ignore_errors=True)
    half.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(result.checkpoint, half)
    if run.output and home.exists():
        shutil.copytree(half, home, dirs_exist_ok=True)
        shutil.rmtree(half)
    else:
        shutil.rmtree(home, ignore_errors=True)
        half.rename(home)
    result.checkpoint = str(home)
    result.save(run_folder(run) / "result.json")
    with transaction.atomic():
        policy = registry.policy_register(
            run,
            name=name,
            adapter=home,
            adapter_sha256=file_sha256(home / "adapter_model.safetensors"),
            feedback_count=snapshot.feedback_count,
            actor=actor,
        )
        run_finish(run, Status.SUCCEEDED, result=result)
    return policy


def _train_report(run: TrainingRun, result: TrainResult, policy: Policy | None) -> dict[str, Any]:
    snapshot = run.snapshot
    return {
        "run": run.pk,
        "method": run.method,
        "status": result.status,
        "policy": policy.name if policy else None,
        "checkpoint": result.checkpoint,
        "agent": run.agent,
        "base_model": run.base_model,
        "config": run.config,
        "samples": {**result.samples, "holdout": snapshot.counts.get("holdout", 0) if snapshot else 0},
        "left_out": {**(snapshot.left_out if snapshot else {}), **result.left_out},
        "truncated": result.truncated,
        "simulated_share": snapshot.simulated_share if snapshot else 0.0,
        "steps": result.steps,
        "total_steps": result.total_steps,
        "seconds": result.seconds,
        "metrics": result.metrics,
        "notes": result.notes,
        "files": {
            "result": str(run_folder(run) / "result.json"),
            "plot": str(run_folder(run) / "training.png"),
        },
    }


def run_finish(run: TrainingRun, status: str, *, reason: str = "", result: TrainResult | None = None) -> None:
    """End a run that this process holds."""
    facts: dict[str, Any] = {"status": status, "reason": reason, "finished_at": timezone.now()}
    if result is not None:
        facts["result"] = {
            "metrics": result.metrics,
            "samples": result.samples,
            "truncated": result.truncated,
            "left_out": result.left_out,
            "seconds": result.seconds,
            "notes": result.notes,
        }
        facts["steps_done"] = result.steps
    TrainingRun.objects.filter(pk=run.pk, worker=run.worker).update(**facts)
    run.refresh_from_db()
    if status == Status.FAILED:
        logger.error("run %s failed: %s", run.pk, reason)


def run_folder(run: TrainingRun) -> Path:
    return settings.RATCHET_HOME / "runs" / str(run.pk)


class _Listener:
    """Writes what the furnace says into the run's rows, and passes it on to the progress bar."""

    def __init__(self, run: TrainingRun, stop: threading.Event, progress: ProgressCallback | None) -> None:
        self.run = run
        self.stop = stop
        self.progress = progress
        self.figure = ""
        self.beat_at = timezone.now()

    def on_start(self, total_steps: int) -> None:
        TrainingRun.objects.filter(pk=self.run.pk).update(steps_total=total_steps)

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        # a resumed run repeats the steps after its checkpoint: the newer figures stand
        RunMetric.objects.update_or_create(run=self.run, step=step, defaults={"values": metrics})
        if "loss" in metrics:
            accuracy = metrics.get("rewards/accuracies")
            self.figure = f"loss {metrics['loss']:.3f}" + (
                "" if accuracy is None else f", accuracy {accuracy:.2f}"
            )

    def on_step(self, step: int, total: int) -> None:
        if self.progress:
            self.progress(step, total, self.figure)
        if (timezone.now() - self.beat_at).total_seconds() >= HEARTBEAT_S or step == total:
            self.beat_at = timezone.now()
            TrainingRun.objects.filter(pk=self.run.pk).update(steps_done=step, heartbeat_at=self.beat_at)

    def on_note(self, text: str) -> None:
        logger.info("run %s: %s", self.run.pk, text)

    def should_stop(self) -> bool:
        return self.stop.is_set()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C or a TERM sets, once; a second Ctrl-C interrupts at once. Only in the main thread."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def ask(number: int, _: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        logger.warning("stopping after this step and keeping a checkpoint (%s)", signal.Signals(number).name)

    earlier = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Everything logged while a run trains goes to its folder too; a traceback goes there alone."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    listened = [logging.getLogger(name) for name in ("rl", "transformers", "trl")]
    for source in listened:
        source.addHandler(handler)
    try:
        yield
    except Exception:
        handler.handle(
            logger.makeRecord(
                logger.name, logging.ERROR, __file__, 0, "training ended with", (), sys.exc_info()
            )
        )
        raise
    finally:
        for source in listened:
            source.removeHandler(handler)
        handler.close()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_version() -> str:
    """The version of this code, with the commit where it is a git checkout."""
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


def agent_for(agent: str | None, *, from_file: bool) -> str:
    """The agent that was named, or the only one there is. Raises RunRefused when that is not clear."""
    if agent:
        return agent
    if from_file:
        return "assistant"
    known = agents_known()
    if len(known) == 1:
        return known[0]
    if not known:
        raise RunRefused(
            "no decisions are recorded yet; record some, import a file, or try "
            "`manage.py simulate widgets --rate simulated`"
        )
    raise RunRefused(f"there are several agents; expected --agent with one of {', '.join(known)}")
