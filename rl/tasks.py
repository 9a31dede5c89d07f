"""Tasks of the workers (`manage.py serve`): each starts the command that does it, as a child process."""

from __future__ import annotations

import logging

from django.conf import settings
from django.utils import timezone

from backend.notifications import notify
from feedback.transfer.telemetry import spans_expire
from rl import tracking
from rl.datasets.reward_records import rewards_calculate
from rl.evaluation.judging import round_opened
from rl.jobs import child_process
from rl.jobs.child_process import command_run
from rl.jobs.lifecycle import run_failed_notify, run_log_tail, runs_reclaim, runs_redispatch, worker_lives
from rl.models import Experiment, JudgingRound, TrainingRun
from rl.models.runs import run_folder
from rl.online import learner
from rl.serving.claims import claims_expire
from rl.serving.publication import reconcile

logger = logging.getLogger("rl.tasks")

Status = TrainingRun.Status
REWARDS_AT_ONCE = 200_000
"""Rewards calculated in one task: at some 2,000 a second well within the cluster's timeout. The rest waits a day."""


def train(run_id: int) -> str:
    """Train a queued run in a process of its own, whose memory is free again after it; then what follows from it,
    unless that process did so itself (`rl.online.pipeline.run_train`).

    The command claims the run, so a task that is delivered twice trains it once. A refusal is the run's reason. Where
    the child was killed the run is queued and handed over again. Returns the run's status.
    """
    run = TrainingRun.objects.get(pk=run_id)
    if run.status == Status.QUEUED:
        log = run_folder(run) / "worker.log"
        status = command_run([f"train_{run.method}", "--queued", str(run_id), "--json"], log)
        run.refresh_from_db()
        given_back = run.status == Status.QUEUED and run.dispatched_at is None
        over = not run.is_unfinished
        if status > 0 and not (given_back or over or _claimed_by_another(run)):
            _fail(run, status)
        elif status < 0 or given_back:
            # killed, or cut off from the database: nobody needs to wait until the clock misses it
            TrainingRun.objects.filter(pk=run.pk, status=Status.QUEUED).update(dispatched_at=None)
            runs_reclaim()
            runs_redispatch()
    if run.kept_run.is_followed:
        follow_up(run.kept_run.pk)
    run.refresh_from_db()
    return str(run.status)


def follow_up(run_id: int) -> str:
    """Judge, promote, export and deploy what a run brought, in a process of its own. Returns where that stands."""
    run = TrainingRun.objects.get(pk=run_id)
    if run.follow_up in TrainingRun.FOLLOW_UP_PENDING:
        command_run(["run_pipeline", "--run", str(run_id), "--json"], run_folder(run) / "worker.log")
        run.refresh_from_db()
    return str(run.follow_up)


def base_model_add(text: str) -> str:
    """Add a base model that a page or REST named: see `rl.jobs.child_process`."""
    return child_process.base_model_add(text)


def judging_round_answer(round_id: int) -> str:
    """Generate the answers of a judging round in a process of its own. Returns the round's status."""
    log = settings.RATCHET_HOME / "cache" / "judging" / f"{round_id}.log"
    status = command_run(["judging_round", "answer", str(round_id), "--json"], log)
    judging = JudgingRound.objects.get(pk=round_id)
    if status < 0:
        judging = round_opened(
            judging, f"the process that generated the answers was ended by signal {-status}"
        )
    return str(judging.status)


def shadow_answer(experiment_id: int, lease: str) -> str:
    """Ask what waits for a shadow, in a process of its own. Returns the experiment's status.

    lease: when the turn was to end. One that waited so long that another was handed over asks nothing.
    """
    experiment = Experiment.objects.get(pk=experiment_id)
    mine = Experiment.objects.filter(pk=experiment_id, shadow_until=lease)
    until = timezone.now() + learner.SHADOW_LEASE
    if not mine.update(shadow_until=until):
        return str(experiment.status)
    log = settings.RATCHET_HOME / "cache" / "shadows" / f"{experiment_id}.log"
    command_run(["experiment", "shadow", experiment.name, "--json"], log, uses_device=False)
    Experiment.objects.filter(pk=experiment_id, shadow_until=until).update(shadow_until=None)
    experiment.refresh_from_db()
    return str(experiment.status)


def tick() -> list[str]:
    """Scheduled check: see `rl.online.learner.tick`. What is new goes to MLflow; what waited long enough goes away."""
    done = learner.tick()
    tracking.sync_quietly()
    claims_expire()
    spans_expire()
    return done


def engines() -> list[str]:
    """Bring the adapters on the team's own servers up to date, between two ticks."""
    return reconcile()


def rewards() -> dict[str, object]:
    """Calculate pending rewards, once a day; operators are notified of agents whose rewards fail."""
    found = rewards_calculate(limit=REWARDS_AT_ONCE)
    for agent, why in found.refused.items():
        notify("clock_failed", f"rewards of {agent} failed: {why}", agent=agent, task="rewards", reason=why)
    return found.model_dump()


def _fail(run: TrainingRun, status: int) -> None:
    """A child that ended without a word to its run."""
    last_line = run_log_tail(run, 1)
    reason = f"the process that trained it ended with {status}: {last_line or 'no message'}"
    held = TrainingRun.objects.filter(pk=run.pk, status=run.status, worker=run.worker)
    if held.update(status=Status.FAILED, reason=reason[:2000], finished_at=timezone.now()):
        run.refresh_from_db()
        run_failed_notify(run)


def _claimed_by_another(run: TrainingRun) -> bool:
    """True if a worker that lives has it: ours was refused the claim then, and the run is not ours to
    fail."""
    return run.status == Status.RUNNING and worker_lives(run)
