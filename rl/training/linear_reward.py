"""Linear reward models: regularised logistic regression on what prompt and response hold (`rl.linear.fit`).

A small base with a score head has to find out by itself which word of a prompt goes with which value of a response; a
classifier is given each such pair as a feature. On 440 thumbs on objects of three values the bundled base ranked 46 %
of unseen responses rightly, the classifier 91 % (`benchmarks/reward_models.py`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rl.agents import get_agent
from rl.linear.fit import fit
from rl.linear.rows import LinearRefused
from rl.recipes import RewardModelRecipe
from rl.recipes.reward_model import FACTS
from rl.training.folder import folder_prepare
from rl.training.result import TrainingRefused, TrainResult
from rl.training.reward_metrics import held_out_metrics
from rl.training.reward_scores import LinearRewardModel
from rl.training.run_context import RunContext
from rl.training.trl_runs import versions

LIBRARIES = ("scikit-learn", "numpy", "scipy")


def linear_reward_train(
    context: RunContext[RewardModelRecipe],
    rows: Sequence[Mapping[str, Any]],
    targets: Sequence[float],
    held_out: Sequence[Mapping[str, Any]],
    held_out_targets: Sequence[float],
) -> TrainResult:
    """Fit a linear reward model into the run's folder; the checkpoint opens with `RewardModel.load`.

    targets, held_out_targets: what people said of each row, in [0, 1]; 1 of pairs. Raises TrainingRefused.
    """
    began = time.monotonic()
    _, notes = folder_prepare(context)
    context.note_all(notes)
    context.listener.on_start(1)
    context.phase("fitting")
    agent = get_agent(context.agent or "assistant")
    try:
        linear_fit = fit(_rows_with_targets(rows, targets), agent, seed=context.recipe.seed, judge=True)
    except LinearRefused as refusal:
        raise TrainingRefused(str(refusal)) from refusal
    model = LinearRewardModel(linear_fit.policy, _facts(context), context.hardware)
    own = [score for row in model.row_scores(rows) for score in row]
    model.facts |= {"mean": statistics.fmean(own), "std": statistics.pstdev(own)}
    metrics = dict(linear_fit.metrics)
    if held_out:
        scores = [(row[0], row[-1]) for row in model.row_scores(held_out)]
        held = held_out_metrics(scores, held_out_targets, context.recipe.objective)
        model.facts["held_out"] = dataclasses.asdict(held)
        metrics |= {name: value for name, value in model.facts["held_out"].items() if name != "curve"}
    folder = context.output_dir / "reward_model"
    linear_fit.policy.save(folder)
    half = folder / f".{FACTS}.{os.getpid()}"  # each process of a launch writes the same
    half.write_text(json.dumps(model.facts, indent=2) + "\n", "utf-8")
    half.replace(folder / FACTS)
    context.detail(f"{len(linear_fit.policy.rows):,} features of a response, {linear_fit.words}")
    context.listener.on_step(1, 1)  # no row of metrics: one fit draws no curve
    return TrainResult(
        method="reward_model",
        status="succeeded",
        checkpoint=str(folder),
        base_model=context.base_model,
        base_model_hash="",
        steps=1,
        total_steps=1,
        seconds=round(time.monotonic() - began, 2),
        samples={"train": len(rows), "eval": len(held_out)},
        left_out=linear_fit.left_out,
        metrics=metrics,
        recipe=context.recipe.as_dict(),
        hardware=dataclasses.asdict(context.hardware),
        libraries=versions(LIBRARIES),
        notes=context.notes,
        details=context.details,
    )


def _rows_with_targets(
    rows: Sequence[Mapping[str, Any]], targets: Sequence[float]
) -> list[Mapping[str, Any]]:
    """Rows with what people said where the fit looks for it, whatever else they hold."""
    return [
        row if "chosen" in row else {**row, "score": target}
        for row, target in zip(rows, targets, strict=True)
    ]


def _facts(context: RunContext[RewardModelRecipe]) -> dict[str, Any]:
    """Facts of the model's file but the scale of its scores, which is read off them."""
    recipe = context.recipe
    return {
        "objective": recipe.objective,
        "architecture": recipe.architecture,
        "base_model": "",
        "agent": context.agent,
    }
