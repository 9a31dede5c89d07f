"""A training run as a job: queued, claimed by one worker, alive while it beats, finished. No torch in this package."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F, Q
from django.utils import timezone
from django_q.tasks import async_task

from backend.installation import PROGRAM
from backend.notifications import notify
from rl.agents.base import Agent
from rl.base_models.service import BaseModel, agent_base_model, base_model_given
from rl.base_models.sources import SourceRefused
from rl.datasets import DatasetRefused, DatasetTooSmall
from rl.datasets.rows import FeedbackFile
from rl.models import TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import LEARNER, RunRefused, run_folder
from rl.recipes import recipe_named
from rl.recipes.base import Method
from rl.recipes.methods import method_named

logger = logging.getLogger("rl.jobs.lifecycle")

Status = TrainingRun.Status

LOST_AFTER = timedelta(minutes=2)
"""A run of another host without a sign of life for so long is taken to be dead."""
MAX_ATTEMPTS = 5
"""Workers that may take a run; one whose process dies again and again is not begun for ever."""
REDISPATCH_AFTER = timedelta(seconds=20)
"""A run that waits while nothing is trained is handed to the workers again after so long."""
TRAINING_CLUSTER = "training"
"""The cluster that trains: one worker, so that one run at a time has the device."""


@dataclass(frozen=True)
class TrainOrder:
    """Order of a training; left-out values come from the preset, the settings and the agent."""

    agent: str
    method: str = "dpo"
    config: str | None = None
    base_model: str | None = None
    knobs: dict[str, object] = field(default_factory=dict)
    source: str = "db"
    data_file: Path | None = None
    ratings_file: Path | None = None
    validation_file: Path | None = None
    """File whose prompts are held out; None: the data file's prompts are split."""
    min_samples: int | None = None
    max_samples: int | None = None
    output: Path | None = None
    actor: str = "train_dpo"
    reason: str = ""
    """Reason for this method, where something chose it."""
    stage_of: int | None = None
    """The run that this one is a stage of, whose feedback it reads and takes none of."""

    @property
    def definition(self) -> Method:
        """The method itself. Raises RecipeError where no method has this name."""
        return method_named(self.method)

    @cached_property
    def served(self) -> Agent:
        return agent_served(self.agent)

    @property
    def asked_by_learner(self) -> bool:
        return self.actor == LEARNER

    @property
    def feedback_file(self) -> FeedbackFile | None:
        """File that its feedback is read from; None: the database. Raises DatasetRefused without `data_file`."""
        if self.source == "db":
            return None
        if self.source != "file":
            raise DatasetRefused(f"a source is db or file, found {self.source!r}")
        if self.data_file is None:
            raise DatasetRefused("--source file needs --data-file FILE")
        return FeedbackFile(self.data_file, self.ratings_file, self.validation_file)

    @property
    def feedback_source(self) -> dict[str, Any]:
        """Source and smallest size of its feedback, as keyword arguments of `method_chosen`."""
        return {"min_samples": self.min_samples, "source": self.feedback_file}

    @property
    def initial_result(self) -> dict[str, object]:
        """First TrainingRun.result of a run of this order, before it has figures."""
        return {"why": self.reason, "notes": [self.reason]} if self.reason else {}


def base_model_for(order: TrainOrder) -> str:
    """Name of the base model an order trains: its own, else the agent's (`agent_base_model`); empty for a method that
    trains none."""
    return base_model_of(order).name if order.definition.adapter else ""


def base_model_of(order: TrainOrder) -> BaseModel:
    """The base model an order trains."""
    sections = ["continuous_learning"] if order.asked_by_learner else []
    given = order.base_model
    if order.method == "reward_model":
        given = given or settings.RATCHET_BASE_MODELS.get(order.method)
    return agent_base_model(order.agent, given=given, sections=[*sections, order.method])


def base_model_settle(order: TrainOrder, progress: Callable[[str], None]) -> TrainOrder:
    """The order with its base model ready to load: a source that was not added yet is added now. Raises RunRefused."""
    if not order.definition.adapter:
        return order
    base = base_model_of(order)
    try:
        name = base.name if base.is_ready else base_model_given(base.name, progress).name
    except SourceRefused as refusal:
        raise RunRefused(f"base model ({base.origin}): {refusal}") from refusal
    return replace(order, base_model=name)


def run_enqueue(order: TrainOrder) -> TrainingRun:
    """Enter a run that another process trains later, by `train_queued`: what the web process does, without torch.

    The row keeps what was asked; preset, recipe and dataset are settled on the machine that trains, when it starts.
    Raises RecipeError for a knob or preset that does not exist.
    """
    recipe_named(order.method, order.config or "default").with_knobs(**order.knobs)
    return TrainingRun.objects.create(
        agent=order.agent,
        result=order.initial_result,
        method=order.method,
        base_model=base_model_for(order),
        config=order.config or "",
        recipe=order.knobs,
        asked_by=order.actor,
        data_file=_stored(order.data_file),
        validation_file=_stored(order.validation_file),
    )


def _stored(path: Path | None) -> str:
    """A file of a queued run as its row has it. Raises ValueError outside RATCHET_HOME."""
    return str(path.relative_to(settings.RATCHET_HOME)) if path else ""


def order_of_queued(run: TrainingRun) -> TrainOrder:
    """The order that `run_enqueue` entered."""
    home: Path = settings.RATCHET_HOME
    return TrainOrder(
        run.agent,
        run.method,
        run.config or None,
        run.base_model,
        run.recipe,
        source="file" if run.data_file else "db",
        data_file=home / run.data_file if run.data_file else None,
        validation_file=home / run.validation_file if run.validation_file else None,
    )


def run_dispatch(run: TrainingRun) -> None:
    """Hand a queued run to the workers. Twice does no harm: a run is claimed once. While Redis is away it waits for
    `runs_redispatch`."""
    TrainingRun.objects.filter(pk=run.pk).update(dispatched_at=timezone.now())
    try:
        # by its name: the worker is another process
        async_task(
            "rl.tasks.train", run.pk, task_name=f"run {run.pk}", group=run.agent, cluster=TRAINING_CLUSTER
        )
    except Exception as error:
        if type(error).__module__ != "redis.exceptions":  # its import takes a tenth of a second
            raise
        TrainingRun.objects.filter(pk=run.pk).update(dispatched_at=None)
        logger.warning("run %s waits: Redis cannot be reached (%s)", run.pk, error)


def follow_up_dispatch(run: TrainingRun) -> None:
    """Hand the evaluation of a finished run's policy to the workers."""
    async_task(
        "rl.tasks.follow_up",
        run.pk,
        task_name=f"after run {run.pk}",
        group=run.agent,
        cluster=TRAINING_CLUSTER,
    )


def follow_up_place(run: TrainingRun, wanted: str, *, export_as: str = "", compare: str = "") -> TrainingRun:
    """Have the policy of a finished run judged or exported (FollowUp.JUDGE, EXPORT) by the workers.

    export_as: one of `rl.export.service.export_forms`; empty: the usual files. compare: the opponent of the
    evaluation, as `EvaluationOrder.compare`; empty: the gate's, unless it was compared with it already.

    Raises RunRefused where it made none, or where its policy is being evaluated or exported already.
    """
    finished = TrainingRun.objects.filter(pk=run.pk, status=Status.SUCCEEDED, policy__isnull=False)
    pending = TrainingRun.FOLLOW_UP_PENDING
    if (
        not TrainingRun.objects.filter(pk__in=finished.values("pk"))
        .exclude(follow_up__in=pending)
        .update(
            follow_up=wanted,
            export_as=export_as,
            compare=compare,
            follow_ups=0,
            reason="",
            heartbeat_at=timezone.now(),
        )
    ):
        run.refresh_from_db()
        raise RunRefused(
            f"run {run.pk}: its policy is being evaluated or exported already"
            if run.is_followed
            else f"run {run.pk} is {run.status} and made no policy to evaluate or export"
        )
    follow_up_dispatch(run)
    run.refresh_from_db()
    return run


def run_interrupt(run: TrainingRun, *, reason: str, **facts: object) -> None:
    """Give back a run that this process holds and was told to stop with its worker: another goes on with it."""
    TrainingRun.objects.filter(pk=run.pk, worker=run.worker, status=Status.RUNNING).update(
        status=Status.QUEUED, reason=reason, dispatched_at=None, phase="", phase_at=None, **facts
    )
    run.refresh_from_db()


def run_cancel(run: TrainingRun, *, actor: str) -> TrainingRun:
    """Stop a run: at once where it waits or its worker is dead, else after its present step, keeping a checkpoint.

    Raises RunRefused where it is over already.
    """
    reason = f"cancelled by {actor}"
    over = {"status": Status.CANCELLED, "reason": reason, "finished_at": timezone.now()}
    waiting = TrainingRun.objects.filter(pk=run.pk, status=Status.QUEUED)
    if not waiting.update(cancel_requested=True, **over):
        running = TrainingRun.objects.filter(pk=run.pk, status=Status.RUNNING)
        if not running.update(cancel_requested=True, reason=reason):
            run.refresh_from_db()
            raise RunRefused(f"run {run.pk} is {run.status}; only queued and running runs can be cancelled")
        run.refresh_from_db()
        if not worker_lives(run):
            running.filter(worker=run.worker).update(**over)
    run.refresh_from_db()
    logger.info("run %s: %s", run.pk, reason)
    return run


def run_resume(run: TrainingRun) -> TrainingRun:
    """Queue a failed or cancelled run again: a worker goes on from its newest whole checkpoint, or from the start.

    Raises RunRefused where it is not over that way, is a stage, or the learner trains its agent meanwhile.
    """
    if not run.is_resumable:
        raise RunRefused(
            f"run {run.pk} is {run.status}; only failed and cancelled runs that are no stage resume"
        )
    stopped = TrainingRun.objects.filter(pk=run.pk, status=run.status)
    waits = {
        "status": Status.QUEUED,
        "reason": "",
        "next_step": "",
        "cancel_requested": False,
        "finished_at": None,
    }
    try:
        with transaction.atomic():
            updated = stopped.update(**waits)
    except IntegrityError as error:  # one run of the learner per agent
        raise RunRefused(
            f"the online learner trains {run.agent} already; resume run {run.pk} after it"
        ) from error
    if not updated:
        raise RunRefused(f"run {run.pk} was resumed by somebody else a moment ago")
    run_dispatch(run)
    run.refresh_from_db()
    return run


def runs_reclaim() -> list[TrainingRun]:
    """Queue the runs whose worker died again, so that another resumes them; one that killed too many of them fails."""
    requeued_runs = []
    for run in TrainingRun.objects.filter(status=Status.RUNNING):
        if worker_lives(run):
            continue
        row = TrainingRun.objects.filter(pk=run.pk, status=Status.RUNNING, worker=run.worker)
        if run.cancel_requested:
            row.update(status=Status.CANCELLED, finished_at=timezone.now())
        elif run.stage_of is not None:
            gone = f"its worker {run.worker} died; run {run.stage_of.pk} resumes it"
            row.update(status=Status.FAILED, finished_at=timezone.now(), reason=gone)
        elif run.asked_by and run.dispatched_at is None:
            # trained by a command in somebody's terminal: theirs to resume
            row.update(
                status=Status.FAILED,
                finished_at=timezone.now(),
                reason=f"its worker {run.worker} died",
                next_step=f"resume with: {PROGRAM} train_{run.method} --resume {run.pk}",
            )
        elif run.attempts >= MAX_ATTEMPTS:
            died = f"its worker died {run.attempts} times, the last was {run.worker}"
            if row.update(status=Status.FAILED, finished_at=timezone.now(), reason=died):
                run.refresh_from_db()
                run_failed_notify(run)
        elif row.update(status=Status.QUEUED, reason=f"its worker {run.worker} died", dispatched_at=None):
            logger.warning("run %s: its worker %s died, it is queued again", run.pk, run.worker)
            requeued_runs.append(run)
    return requeued_runs


def runs_redispatch() -> list[TrainingRun]:
    """Hand runs that wait to the workers again where the message got lost: nothing is trained, and nothing begins."""
    if TrainingRun.objects.filter(status=Status.RUNNING).exists():
        return []
    before = timezone.now() - REDISPATCH_AFTER
    # a stage is trained by the run that needs it
    lost = TrainingRun.objects.filter(status=Status.QUEUED, stage_of=None).filter(
        Q(dispatched_at__isnull=True) | Q(dispatched_at__lt=before)
    )
    found = []
    for run in lost.order_by("pk"):
        # of two clocks one hands it over
        if TrainingRun.objects.filter(pk=run.pk, dispatched_at=run.dispatched_at).update(
            dispatched_at=timezone.now()
        ):
            run_dispatch(run)
            found.append(run)
    return found


def run_log_tail(run: TrainingRun, lines: int = 40) -> str:
    """The last lines of what the run and its process said; empty where there is nothing on this machine.

    What a worker's process logs is in both files; the traceback of a failure is in train.log alone.
    """
    tail: list[str] = []
    for name in ("worker.log", "train.log"):
        try:
            with (run_folder(run) / name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 200 * lines))
                log_lines = file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except FileNotFoundError:
            continue
        if tail:
            errors = [place for place, line in enumerate(log_lines) if " ERROR " in line]
            log_lines = log_lines[errors[-1] :] if errors and run.status == Status.FAILED else []
        tail += log_lines
    return "\n".join(tail[-lines:])


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
    update_count = TrainingRun.objects.filter(pk=run.pk, status=run.status, worker=run.worker).update(
        status=Status.RUNNING,
        worker=_worker_name(),
        reason="",
        next_step="",
        started_at=run.started_at or timezone.now(),
        heartbeat_at=timezone.now(),
        finished_at=None,
        attempts=F("attempts") + 1,
        cancel_requested=False,
        phase="",
        phase_at=None,
    )
    if update_count != 1:
        raise RunRefused(f"run {run_id} was taken by another worker a moment ago")
    run.refresh_from_db()
    return run


def _worker_name() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def worker_lives(run: TrainingRun) -> bool:
    """True if the process that claimed a run still exists (same host), or gave a sign of life lately
    (another)."""
    host, _, process = run.worker.rpartition(":")[0].rpartition(":")
    if host == socket.gethostname() and process.isdigit():
        try:
            # a process id is used again after a restart: the start time tells the two apart
            return f"{psutil.Process(int(process)).create_time():.0f}" == run.worker.rpartition(":")[2]
        except psutil.NoSuchProcess:
            return False
    return run.heartbeat_at is not None and timezone.now() - run.heartbeat_at < LOST_AFTER


def run_finish(run: TrainingRun, status: str, *, reason: str = "", **facts: object) -> None:
    """End a run that this process holds; `facts` are further fields of its row.

    Raises RunRefused where another worker took it meanwhile and this one was to succeed: its work is not entered.
    """
    facts |= {
        "status": status,
        "reason": reason.removesuffix("."),
        "finished_at": timezone.now(),
        "phase": "",
        "phase_at": None,
    }
    held = TrainingRun.objects.filter(pk=run.pk, worker=run.worker, status=Status.RUNNING)
    if not held.update(**facts) and status == Status.SUCCEEDED:
        raise RunRefused(f"run {run.pk} was taken from {run.worker} while it trained")
    run.refresh_from_db()
    if status == Status.FAILED:
        run_failed_notify(run)


def run_refuse(run: TrainingRun, refusal: Exception) -> None:
    """End a run that this process holds with what refused it, and what to do about that."""
    if isinstance(refusal, DatasetTooSmall):
        run_finish(run, Status.REFUSED, reason=refusal.reason, next_step=refusal.next_step)
    else:
        run_finish(run, Status.REFUSED, reason=str(refusal))


def run_failed_notify(run: TrainingRun) -> None:
    """Log that a run failed for good, and send a notice where nobody watches it in a terminal."""
    logger.error("run %s failed: %s", run.pk, run.reason)
    if run.dispatched_at is not None or run.asked_by == LEARNER:
        message = f"run {run.pk} of {run.agent} failed: {run.reason}"
        notify("run_failed", message, run=run.pk, agent=run.agent, method=run.method, reason=run.reason)


def run_epochs(run: TrainingRun) -> list[Path]:
    """Folders of the adapters kept after whole epochs (`--checkpoints epoch`), in order; those on this machine."""
    found = (run_folder(run) / "epochs").glob("epoch-*")
    return sorted(found, key=lambda path: int(path.name.removeprefix("epoch-")))
