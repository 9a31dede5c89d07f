"""Status, events, checkpoint and result files of a job, derived from its run."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.conf import settings

from rl.fine_tuning.jobs import AUTO, METHODS, jobs_of
from rl.gates.verdict import OPEN
from rl.models import FineTuningJob, Policy, PolicyEvent, RunMetric, TrainingRun
from rl.models.fine_tuning import GRADERS
from rl.registry.checklist import policy_verdict
from rl.rewards.graders import PREFIX

Status = TrainingRun.Status

STATUSES = {
    Status.QUEUED: "queued",
    Status.RUNNING: "running",
    Status.SUCCEEDED: "succeeded",
    Status.FAILED: "failed",
    Status.REFUSED: "failed",
    Status.CANCELLED: "cancelled",
}
"""Status of a run -> the job's."""

METRICS = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_mean_token_accuracy",
    "rewards/accuracies": "train_reward_accuracy",
    "reward": "train_mean_reward",
    "eval_reward": "valid_mean_reward",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
    "eval_rewards/accuracies": "valid_reward_accuracy",
}
"""Figure of a step -> its name at OpenAI."""


@dataclass(frozen=True)
class Event:
    """One event of a job."""

    id: str
    at: datetime
    message: str
    level: str = "info"
    data: Mapping[str, object] = field(default_factory=dict)
    """Figures of a step."""


@dataclass(frozen=True)
class ResultFile:
    """A result of a job as a file. It is written when it is asked for, and stored nowhere."""

    id: str
    filename: str
    created_at: datetime
    content: bytes


def job_status(job: FineTuningJob) -> str:
    """Status in OpenAI's words. A job runs until its policy was judged and can answer."""
    return "running" if job.run.is_followed else STATUSES[Status(job.run.status)]


def tuned_policy(job: FineTuningJob) -> Policy | None:
    """The policy of a job that succeeded; None before, and of a job that made none."""
    return getattr(job.run, "policy", None) if job_status(job) == "succeeded" else None


def job_error(job: FineTuningJob) -> dict[str, object] | None:
    """Why a job failed, or None."""
    if job_status(job) != "failed":
        return None
    refused = job.run.status == Status.REFUSED
    code = "invalid_training_file" if refused else "training_failed"
    return {"code": code, "message": job.run.reason_and_step, "param": "training_file" if refused else None}


def trained_tokens(job: FineTuningJob) -> int | None:
    """Tokens the training has read, all passes together; None where the method does not count them."""
    if job_status(job) != "succeeded":
        return None
    counts = [row.values.get("num_tokens") for row in job.run.metrics.all()]
    found = [count for count in counts if isinstance(count, (int, float)) and math.isfinite(count)]
    return int(found[-1]) if found else None


def hyperparameters_shown(job: FineTuningJob) -> dict[str, float | str]:
    """The hyperparameters as they were asked for; `auto` as the number that it became, once the run has it."""
    recipe = job.run.recipe
    asked = {name: job.hyperparameters.get(name, AUTO) for name in _method_of(job)[1].hyperparameters}
    if job.run.snapshot_id is None:
        return asked
    batch = recipe.get("batch_size", 1) * recipe.get("gradient_accumulation", 1)
    settled: dict[str, float | str] = {
        "n_epochs": math.ceil(recipe.get("epochs", 1)),
        "batch_size": batch // recipe.get("num_generations", 1),
        "eval_interval": recipe.get("eval_steps") or AUTO,
        "eval_samples": recipe.get("eval_prompts", AUTO),
        "learning_rate_multiplier": 1.0,
        "beta": recipe.get("beta", 0.1),
    }
    return {name: settled[name] if value == AUTO else value for name, value in asked.items()}


def method_shown(job: FineTuningJob) -> dict[str, object]:
    name = _method_of(job)[0]
    grader = {"grader": _grader_of(job)} if name == "reinforcement" else {}
    return {"type": name, name: {**grader, "hyperparameters": hyperparameters_shown(job)}}


def _grader_of(job: FineTuningJob) -> object:
    file = settings.RATCHET_HOME / GRADERS / str(job.run.recipe.get("reward", "")).removeprefix(PREFIX)
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None  # the run keeps its name


def _method_of(job: FineTuningJob) -> tuple[str, Any]:
    return next((name, method) for name, method in METHODS.items() if method.method == job.run.method)


# --- Events -------------------------------------------------------------------------------------------------


def job_events(job: FineTuningJob) -> list[Event]:
    """Everything that happened to a job, newest first."""
    return list(_events(job))[::-1]


def _events(job: FineTuningJob) -> Iterator[Event]:
    run = job.run

    def event(
        name: str,
        at: datetime,
        message: str,
        level: str = "info",
        data: Mapping[str, object] | None = None,
    ) -> Event:
        return Event(f"ftevent-{job.key}-{name}", at, message, level, data or {})

    yield event("created", job.created_at, f"Created fine-tuning job: {job.name} (run {run.pk})")
    if run.started_at:
        yield event("started", run.started_at, "Fine-tuning job started")
    if run.snapshot is not None:
        counts = ", ".join(f"{count:,} {split}" for split, count in run.snapshot.counts.items())
        yield event("examples", run.started_at or run.created_at, f"Examples: {counts}")
    for row in run.metrics.all():
        if figures := _figures(row):
            words = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in figures.items())
            yield event(
                f"step-{row.step}",
                row.at,
                f"Step {row.step}/{run.steps_total}: {words}",
                data={"step": row.step, "total_steps": run.steps_total, **figures},
            )
    if run.phase_words and run.phase_at and job_status(job) == "running":
        yield event("phase", run.phase_at, f"Now: {run.phase_words}")
    if run.finished_at is None:
        return
    for number, note in enumerate(run.result.get("notes", [])):
        yield event(f"note-{number}", run.finished_at, note)
    if (error := job_error(job)) is not None:
        yield event("failed", run.finished_at, str(error["message"]), "error")
    elif run.status == Status.CANCELLED:
        yield event("cancelled", run.finished_at, run.reason or "cancelled")
    if (policy := tuned_policy(job)) is not None:
        judged_at, words = verdict_of(policy)
        at = judged_at or run.finished_at
        yield event("model", run.finished_at, f"New fine-tuned model created: {job.tuned_model}")
        yield event("verdict", at, words, data={"policy": policy.name, "stage": policy.stage})
        yield event("succeeded", at, "The job has successfully completed")


def verdict_of(policy: Policy) -> tuple[datetime | None, str]:
    """The gate's verdict on a policy in words, and when it was judged."""
    gated = policy.events.filter(kind=PolicyEvent.Kind.GATED).first()
    verdict = policy_verdict(policy)
    words = verdict.words
    if verdict.state == OPEN and gated is not None:  # it could not be compared; the event says why
        words = gated.reason
    if verdict.action is not None:
        words = f"{words} Next: {verdict.action.words}."
    return (gated.created_at if gated else None), words


def _figures(row: RunMetric) -> dict[str, float]:
    values = {METRICS[name]: value for name, value in row.values.items() if name in METRICS}
    return {name: float(v) for name, v in values.items() if isinstance(v, (int, float)) and math.isfinite(v)}


# --- Checkpoint and results ---------------------------------------------------------------------------------


def checkpoint_of(job: FineTuningJob) -> dict[str, object] | None:
    """The one checkpoint that is kept: the best on the eval split, else the last. None before the job succeeded."""
    if tuned_policy(job) is None:
        return None
    step = int(job.run.result.get("best_step") or job.run.steps_done)
    rows = [row for row in job.run.metrics.all() if row.step <= step]
    metrics = {name: value for row in rows for name, value in _figures(row).items()}
    return {"step": step, "metrics": {"step": step, **metrics}}


def result_files(job: FineTuningJob) -> list[ResultFile]:
    """The figures of each step, and the gate's verdict with its report; none before the job succeeded."""
    policy, at = tuned_policy(job), job.run.finished_at
    if policy is None or at is None:
        return []
    rows = [(row.step, _figures(row)) for row in job.run.metrics.all()]
    table = io.StringIO()
    names = [name for name in METRICS.values() if any(name in figures for _, figures in rows)]
    writer = csv.DictWriter(table, ["step", *names])
    writer.writeheader()
    writer.writerows({"step": step, **figures} for step, figures in rows if figures)
    gated = policy.events.filter(kind=PolicyEvent.Kind.GATED).first()
    verdict = {
        "fine_tuned_model": job.tuned_model,
        "policy": policy.name,
        "stage": policy.stage,
        "verdict": verdict_of(policy)[1],
        "report": gated.verdicts if gated else {},
    }
    metrics_name, verdict_name = result_names(job)
    return [
        ResultFile(metrics_name, "step_metrics.csv", at, table.getvalue().encode()),
        ResultFile(verdict_name, "verdict.json", at, json.dumps(verdict, indent=1).encode()),
    ]


def result_names(job: FineTuningJob) -> list[str]:
    """Ids of a job's result files."""
    return [f"file-{job.key}-{what}" for what in ("metrics", "verdict")] if tuned_policy(job) else []


def result_file_get(name: str, caller: str | None) -> ResultFile | None:
    """The result file of an id, of one of the caller's jobs; None where there is none."""
    key, _, what = name.removeprefix("file-").partition("-")
    job = jobs_of(caller).filter(name=f"ftjob-{key[:40]}").first() if what else None
    return next((file for file in result_files(job) if file.id == name), None) if job else None
