"""The first stage of RLHF: the reward model that a run with the reward `auto` learns from, found or trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import REWARD_MODEL, method_chosen
from rl.jobs.stages import StageRunner, memory_release, stage_limits, stage_started, stage_trained
from rl.models import RewardModelVersion, TrainingRun
from rl.models.runs import RunRefused
from rl.reward_models.service import (
    ranking_text,
    ranks_above_chance,
    reward_base_model,
    reward_model_champion,
    reward_model_judge,
    reward_model_valid,
)
from rl.rewards.catalogue import AUTO, MODEL


def waits_for_reward_model(run: TrainingRun) -> bool:
    """True if a run's rewards name `auto`, which no reward model has taken the place of yet."""
    return AUTO in _specs(run)


def _specs(run: TrainingRun) -> list[str]:
    return [spec.strip() for spec in str(run.recipe.get("reward", "")).split(",")]


def reward_model_resolve(run: TrainingRun, stage_runner: StageRunner) -> RewardModelVersion:
    """Put a reward model in the place of `auto` in a claimed run's rewards, training it first where none holds.

    A stage that an earlier attempt began is gone on with. Raises RunRefused where the reward model ranks held-out
    feedback no better than a coin, StageStopped where its training was stopped.
    """
    version = reward_model_valid(run.agent, run.base_model)
    if version is None:
        _stage_train(run, stage_runner)
        version = reward_model_champion(run.agent)
    if version is None or not ranks_above_chance(version.ranking):
        raise RunRefused(_coin(run, version))
    specs = [f"{MODEL}{version.name}" if spec == AUTO else spec for spec in _specs(run)]
    run.recipe = {**run.recipe, "reward": ",".join(specs)}
    note = f"reward auto: {version.name}, which {ranking_text(version.ranking)}"
    run.result = {**run.result, "why": "; ".join(filter(None, (run.result.get("why"), note)))}
    run.save(update_fields=["recipe", "result"])
    return version


def _stage_train(run: TrainingRun, stage_runner: StageRunner) -> None:
    stage = stage_started(run, REWARD_MODEL)
    if stage is None:
        stage = stage_runner.enter(
            reward_model_order(
                run.agent,
                run.base_model,
                actor=f"run {run.pk}",
                stage_of=run.pk,
                knobs=stage_limits(run.recipe),
            )
        )
    stage_trained(stage, stage_runner)
    version = RewardModelVersion.objects.get(run=stage)
    if not version.ranking:  # an attempt was killed between the two
        reward_model_judge(version, actor=f"run {run.pk}")
    memory_release()  # its weights make room for the policy's


def _coin(run: TrainingRun, found: RewardModelVersion | None) -> str:
    """Reason why there is no reward to learn from, and what to do."""
    newest = found or RewardModelVersion.objects.filter(agent=run.agent).order_by("-pk").first()
    finding = f"{newest.name} {ranking_text(newest.ranking)}" if newest else "no reward model is trained"
    return (
        f"--reward auto: no reward model of {run.agent} ranks held-out feedback better than chance ({finding}; "
        f"the 95 % interval must lie above 50 %): rate more at /rate/?agent={run.agent}, or learn from the "
        "ratings directly with --method auto"
    )


def reward_model_order(
    agent: str,
    base_model: str,
    *,
    actor: str = "rlhf",
    stage_of: int | None = None,
    knobs: Mapping[str, Any] | None = None,
) -> TrainOrder:
    """Order to train a reward model for a policy on `base_model`, by the objective that fits the agent's
    feedback. stage_of: the run that needs it; knobs: its limits."""
    base = reward_base_model(base_model)
    chosen = method_chosen(agent, REWARD_MODEL, base_model=base)
    return TrainOrder(
        agent,
        chosen.method,
        base_model=base,
        knobs={**chosen.knobs, **(knobs or {})},
        reason=chosen.reason,
        actor=actor,
        stage_of=stage_of,
    )
