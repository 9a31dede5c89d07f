"""Stages of a run: runs of their own that are trained first, within it, and are gone on with where it is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rl.jobs.lifecycle import TrainOrder
from rl.models import TrainingRun

Status = TrainingRun.Status


@dataclass(frozen=True)
class StageRunner:
    """Functions by which the process that holds a run enters and trains a stage of it."""

    enter: Callable[[TrainOrder], TrainingRun]
    """Makes its row, with its dataset."""
    train: Callable[[TrainingRun], dict[str, Any]]
    """Claims and trains it, or goes on with it; returns the training report."""


STAGE_SHARE = 0.25
"""Share of a run's minutes that each of its stages may take."""

SFT_SHARE = 0.5
"""Share of the SFT stage that a run starts from: it teaches what people wrote."""


def stage_limits(knobs: Mapping[str, Any], share: float = STAGE_SHARE) -> dict[str, Any]:
    """Knobs of a stage by which the limits that a run's knobs name hold for it too: its steps, and its `share` of the
    minutes."""
    limits: dict[str, Any] = {}
    if (steps := knobs.get("max_steps")) is not None and int(steps) > 0:
        limits["max_steps"] = int(steps)
    if minutes := float(knobs.get("minutes") or 0.0):
        limits["minutes"] = share * minutes
    return limits


class StageStopped(Exception):
    """Not an error: the stage was cancelled, or stopped with its worker, and kept its checkpoint."""

    def __init__(self, stage: TrainingRun) -> None:
        super().__init__(
            f"its stage (run {stage.pk}, {stage.method}) did not finish: {stage.reason or 'stopped'}"
        )
        self.cancelled = stage.cancel_requested


def stage_started(run: TrainingRun, method: str) -> TrainingRun | None:
    """The stage of a method that an earlier attempt of a run began; None where it began none, or it was refused."""
    return run.stages.filter(method=method).exclude(status=Status.REFUSED).order_by("-pk").first()


def stage_trained(stage: TrainingRun, stage_runner: StageRunner) -> None:
    """Train a stage to its end, unless it is there. Raises StageStopped, and what refuses or fails."""
    if stage.status == Status.SUCCEEDED:
        return
    report = stage_runner.train(stage)
    stage.refresh_from_db()
    if report["status"] == "cancelled":
        raise StageStopped(stage)


def stages_of(run: TrainingRun) -> list[dict[str, Any]]:
    """The stages of a run in their order, as reports, the API and pages tell them."""
    return [
        {
            "run": stage.pk,
            "method": stage.method,
            "status": str(stage.status),
            "reason": stage.reason,
            "steps_done": stage.steps_done,
            "steps_total": stage.steps_total,
            "made": _result_name(stage),
            "why": stage.result.get("why", ""),
        }
        for stage in run.stages.order_by("pk").select_related("policy", "reward_model")
    ]


def _result_name(stage: TrainingRun) -> str:
    """Name of the policy or reward model that came of it; empty where none did."""
    found = getattr(stage, "policy", None) or getattr(stage, "reward_model", None)
    return found.name if found else ""


def memory_release() -> None:
    """Give back what a stage's model took, before the next one is loaded."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
