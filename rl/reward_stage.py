"""The first stage of RLHF: the reward model that a run with the reward `auto` learns from, found or trained."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

from rl.jobs import RunRefused, TrainOrder
from rl.models import RewardModelVersion, TrainingRun
from rl.reward_models import (
    beats_a_coin,
    ranking_words,
    reward_model_champion,
    reward_model_judge,
    reward_model_order,
    reward_model_valid,
)
from rl.rewards.named import AUTO, MODEL

Status = TrainingRun.Status


class StageStopped(Exception):
    """Not an error: the stage was cancelled, or stopped with its worker, and kept its checkpoint."""

    def __init__(self, stage: TrainingRun) -> None:
        super().__init__(f"its reward model (run {stage.pk}) {stage.reason or 'stopped'}")
        self.cancelled = stage.cancel_requested


def waits_for_reward_model(run: TrainingRun) -> bool:
    """Whether a run's rewards name `auto`, which no reward model has taken the place of yet."""
    return AUTO in _specs(run)


def _specs(run: TrainingRun) -> list[str]:
    return [spec.strip() for spec in str(run.recipe.get("reward", "")).split(",")]


def reward_model_settle(
    run: TrainingRun,
    enter: Callable[[TrainOrder], TrainingRun],
    train: Callable[[TrainingRun], dict[str, Any]],
) -> RewardModelVersion:
    """Put a reward model in the place of `auto` in a claimed run's rewards, training it first where none holds.

    A stage that an earlier attempt began is gone on with. `enter` makes the row of a stage, `train` claims and trains
    it. Raises RunRefused where the reward model ranks held-out feedback no better than a coin, StageStopped where its
    training was stopped.
    """
    found = reward_model_valid(run.agent, run.base_model)
    if found is None:
        _stage_train(run, enter, train)
        found = reward_model_champion(run.agent)
    if found is None or not beats_a_coin(found.ranking):
        raise RunRefused(_coin(run, found))
    specs = [f"{MODEL}{found.name}" if spec == AUTO else spec for spec in _specs(run)]
    run.recipe = {**run.recipe, "reward": ",".join(specs)}
    said = f"reward auto: {found.name}, which {ranking_words(found.ranking)}"
    run.result = {**run.result, "why": "; ".join(filter(None, (run.result.get("why"), said)))}
    run.save(update_fields=["recipe", "result"])
    return found


def _stage_train(
    run: TrainingRun,
    enter: Callable[[TrainOrder], TrainingRun],
    train: Callable[[TrainingRun], dict[str, Any]],
) -> None:
    stage = run.stages.filter(method="reward_model").exclude(status=Status.REFUSED).order_by("-pk").first()
    if stage is None:
        stage = enter(reward_model_order(run.agent, run.base_model, actor=f"run {run.pk}"))
        TrainingRun.objects.filter(pk=stage.pk).update(stage_of=run)
        stage.refresh_from_db()
    if stage.status != Status.SUCCEEDED:
        report = train(stage)
        stage.refresh_from_db()
        if report["status"] == "cancelled":
            raise StageStopped(stage)
    version = RewardModelVersion.objects.get(run=stage)
    if not version.ranking:  # an attempt was killed between the two
        reward_model_judge(version, actor=f"run {run.pk}")
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # its weights make room for the policy's


def _coin(run: TrainingRun, found: RewardModelVersion | None) -> str:
    """Why there is no reward to learn from, and what to do."""
    newest = found or RewardModelVersion.objects.filter(agent=run.agent).order_by("-pk").first()
    said = f"{newest.name} {ranking_words(newest.ranking)}" if newest else "none was trained"
    return (
        f"--reward auto: no reward model of {run.agent} ranks held-out feedback better than a coin ({said}; the 95 % "
        f"interval must lie above 50 %): rate more at /rate/?agent={run.agent}, or learn from the ratings "
        f"directly with --method auto"
    )
