"""What the worker (`manage.py qcluster`) runs: each task starts the command that does it, as a child of its own."""

from __future__ import annotations

import logging
import subprocess
import sys

from django.conf import settings
from django.utils import timezone

from rl.jobs import worker_lives
from rl.models import TrainingRun

logger = logging.getLogger("rl.tasks")


def train(run_id: int) -> str:
    """Train a queued run in a process of its own, whose memory is free again after it. Returns the run's status.

    The command claims the run, so a task that is delivered twice trains it once. A refusal is the run's reason; a child
    that died without a word leaves the run failed.
    """
    run = TrainingRun.objects.get(pk=run_id)
    command = [
        sys.executable,
        str(settings.BASE_DIR / "manage.py"),
        f"train_{run.method}",
        "--queued",
        str(run_id),
        "--json",
    ]
    child = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    run.refresh_from_db()
    unfinished = (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING)
    if child.returncode != 0 and run.status in unfinished and not _held_by_another(run):
        said = child.stderr.strip().splitlines()
        reason = f"the process that trained it ended with {child.returncode}: {said[-1] if said else 'it said nothing'}"
        TrainingRun.objects.filter(pk=run.pk, status=run.status, worker=run.worker).update(
            status=TrainingRun.Status.FAILED, reason=reason[:2000], finished_at=timezone.now()
        )
        logger.error("run %s failed: %s", run_id, reason)
        run.refresh_from_db()
    return str(run.status)


def _held_by_another(run: TrainingRun) -> bool:
    """Whether a worker that lives has it: ours was refused the claim then, and the run is not ours to fail."""
    return run.status == TrainingRun.Status.RUNNING and worker_lives(run)
