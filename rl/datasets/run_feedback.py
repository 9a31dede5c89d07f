"""The feedback behind a run: what its dataset's rows are made of, and what its reward models learnt from."""

from __future__ import annotations

import uuid
from collections.abc import Collection

from rl.datasets import PreparedDataset
from rl.datasets.buffer import buffer_ids, feedback_read, feedback_resolve
from rl.models import RewardModelVersion, TrainingRun
from rl.models.runs import LEARNER
from rl.recipes import BasicRecipe
from rl.rewards.catalogue import MODEL


def run_feedback_resolve(
    run: TrainingRun, prepared: PreparedDataset, recipe: BasicRecipe, new: Collection[uuid.UUID]
) -> None:
    """Note which feedback a run really reads, and how much. new: ids of what it may learn from for the first time.

    A policy that answers prompts for a reward has learnt from what the reward's models learnt from; of the agent's own
    judgement, or a function, it has learnt no feedback at all.
    """
    rows = {split: set(ids) for split, ids in prepared.feedback.items()}
    _settle(run, rows, str(recipe.as_dict().get("reward", "")), new)


def run_rewards_resolve(run: TrainingRun) -> None:
    """The same for a run on prompts whose reward `auto` has just become a reward model."""
    learner = run.asked_by == LEARNER
    new = run.learnt.values_list("feedback", flat=True) if learner else buffer_ids(run.agent, but=run)
    _settle(run, {}, str(run.recipe.get("reward", "")), list(new))


def _settle(
    run: TrainingRun, rows: dict[str, set[uuid.UUID]], specs: str, new: Collection[uuid.UUID]
) -> None:
    count = len(rows.get("train", ()))
    for model in reward_models(specs):
        for split, ids in feedback_read(model).items():
            rows.setdefault(split, set()).update(ids)
        count += model.feedback_count
    for stage in run.stages.filter(method="sft", status=TrainingRun.Status.SUCCEEDED):
        for split, ids in feedback_read(stage).items():
            rows.setdefault(split, set()).update(ids)
        count = max(count, stage.feedback_count)  # mostly the feedback its reward model read
    run.feedback_count = count
    run.save(update_fields=["feedback_count"])
    if new:
        feedback_resolve(run, new, rows, left_out=run.asked_by == LEARNER)


def reward_models(specs: str) -> list[TrainingRun]:
    """The runs of the reward models that reward specs name, as `model:RUN` or `model:NAME`."""
    names = [spec.strip().removeprefix(MODEL) for spec in specs.split(",") if spec.strip().startswith(MODEL)]
    runs = {int(name) for name in names if name.isdigit()}
    registered = RewardModelVersion.objects.filter(name__in=names, run__isnull=False)
    runs |= {run for run in registered.values_list("run", flat=True) if run is not None}
    return list(TrainingRun.objects.filter(pk__in=runs))
