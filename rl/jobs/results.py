"""Persistence of a run's outcome: result.json in its folder, its policy in the registry, the summary on its row."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.db import transaction

from rl import artifacts
from rl.checksums import file_sum, sums_check, sums_write
from rl.datasets.gate_distance import distance_of_snapshot
from rl.jobs.lifecycle import run_epochs, run_finish
from rl.jobs.stages import stages_of
from rl.jobs.teachability import teachability_warning
from rl.models import Policy, RewardModelVersion, TrainingRun
from rl.models.runs import run_folder
from rl.recipes import Recipe
from rl.registry import service as registry
from rl.registry.incumbents import incumbent_sync
from rl.registry.integrity import weights_name
from rl.registry.model_card import card_write

if TYPE_CHECKING:
    from rl.training.result import TrainResult


RESOLVED_KNOBS = ("sft_weight", "epochs", "min_steps")
"""Knobs that a training settles."""


def result_persist(run: TrainingRun, result: TrainResult) -> None:
    """The result beside the run's other files, and what its row wants of it."""
    folder = run_folder(run)
    if run.snapshot is not None and run.snapshot.simulated_share:
        result.notes.append(f"{100 * run.snapshot.simulated_share:.0f} % of the feedback was SIMULATED")
    if warning := run_warning(run):
        result.notes.insert(0, warning)
    if "not_fitted" in run.result:
        result.notes.insert(0, run.result["not_fitted"])
    if "why" in run.result:
        result.notes.insert(0, run.result["why"])
    result.save(folder / "result.json")
    if result.history.get("step"):
        result.plot(folder / "training.png")
    TrainingRun.objects.filter(pk=run.pk).update(
        recipe={
            **run.recipe,
            **{knob: result.recipe[knob] for knob in RESOLVED_KNOBS if knob in result.recipe},
        },
        base_model_hash=result.base_model_hash,
        libraries=result.libraries,
        steps_done=result.steps,
    )
    run.refresh_from_db()


def run_warning(run: TrainingRun) -> str:
    """Reason why a run with its dataset teaches nothing, or little; empty where nothing speaks against it."""
    if run.snapshot is None:
        return ""
    recipe = run.definition.recipe.from_dict(run.recipe)
    if not isinstance(recipe, Recipe):
        return ""  # what makes no steps says so by its own figures
    return teachability_warning(recipe, run.snapshot.counts.get("train", 0), run.snapshot.kind)


def policy_publish(run: TrainingRun, result: TrainResult, *, actor: str) -> Policy:
    """Copy the adapter to its place beside the others, then register it and end the run in one transaction.

    A crash before that transaction leaves a folder without a row, which the resumed run replaces: never a row
    without its files.
    """
    name = registry.policy_name_next(run.agent, run.feedback_count)
    home = (
        settings.RATCHET_HOME / run.output
        if run.output
        else settings.RATCHET_HOME / "policies" / run.agent / name
    )
    half = home.with_name(f".{home.name}.{run.pk}")
    shutil.rmtree(half, ignore_errors=True)
    half.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(result.checkpoint, half)
    sums_check(half, "train again")
    sums_write(half)
    if run.output and home.exists():
        shutil.copytree(half, home, dirs_exist_ok=True)
        shutil.rmtree(half)
    else:
        shutil.rmtree(home, ignore_errors=True)
        half.rename(home)
    result.checkpoint = str(home)
    kind = Policy.Kind.ADAPTER if run.definition.adapter else Policy.Kind.LINEAR
    artifacts.put(home)
    result.save(run_folder(run) / "result.json")
    incumbent_sync(run.agent)  # the policy is a child of the champion, which may be the app's own model
    with transaction.atomic():
        policy = registry.policy_register(
            run,
            name=name,
            adapter=home,
            kind=kind,
            adapter_sha256=file_sum(home / weights_name(kind)),
            feedback_count=run.feedback_count,
            actor=actor,
        )
        reason = f"stopped early: {result.stopped_early}" if result.stopped_early else ""
        run_finish(run, TrainingRun.Status.SUCCEEDED, reason=reason, **figures_of(run, result))
    card_write(policy)
    return policy


def figures_of(run: TrainingRun, result: TrainResult) -> dict[str, Any]:
    """Figures of a result stored in the run's row, without the histories."""
    return {
        "steps_done": result.steps,
        "result": {
            **({"why": run.result["why"]} if "why" in run.result else {}),
            "metrics": result.metrics,
            "samples": result.samples,
            "truncated": result.truncated,
            "left_out": result.left_out,
            "seconds": result.seconds,
            "notes": result.notes,
            "details": result.details,
            **({"preflight": result.preflight} if result.preflight else {}),
            **({"stopped_early": result.stopped_early} if result.stopped_early else {}),
            **({"best_step": result.best_step} if result.best_step else {}),
        },
    }


def train_report(
    run: TrainingRun, result: TrainResult, policy: Policy | None, judge: RewardModelVersion | None = None
) -> dict[str, object]:
    snapshot = run.snapshot
    distance = distance_of_snapshot(snapshot) if snapshot else None
    return {
        "run": run.pk,
        "method": run.method,
        "status": result.status,
        "policy": policy.name if policy else None,
        "reward_model": judge.name if judge else None,
        "ranking": judge.ranking if judge else None,
        "reward": run.recipe.get("reward"),
        "checkpoint": str(registry.home_path(judge.path)) if judge else result.checkpoint,
        "agent": run.agent,
        "why": run.result.get("why", ""),
        "stages": stages_of(run),
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
        "preflight": result.preflight,
        "evidence": distance.model_dump() if distance else None,
        "stopped_early": result.stopped_early,
        "best_step": result.best_step,
        "epochs": [str(folder) for folder in run_epochs(run)],
        "files": {
            "result": str(run_folder(run) / "result.json"),
            "plot": str(run_folder(run) / "training.png") if result.history.get("step") else None,
        },
    }
