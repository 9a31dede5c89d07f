"""A training run as a job: queued, claimed by one worker, alive while it beats, finished. No torch in this room."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings
from django.utils import timezone

from rl.models import RunMetric, TrainingRun
from rl.recipes import recipe_named

logger = logging.getLogger("rl.jobs")

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


def run_finish(run: TrainingRun, status: str, *, reason: str = "", **facts: Any) -> None:
    """End a run that this process holds; `facts` are further fields of its row."""
    facts |= {"status": status, "reason": reason, "finished_at": timezone.now()}
    TrainingRun.objects.filter(pk=run.pk, worker=run.worker).update(**facts)
    run.refresh_from_db()
    if status == Status.FAILED:
        logger.error("run %s failed: %s", run.pk, reason)


def run_folder(run: TrainingRun) -> Path:
    return settings.RATCHET_HOME / "runs" / str(run.pk)


class RunListener:
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
def run_log(path: Path) -> Iterator[None]:
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
