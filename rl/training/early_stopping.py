"""Early stopping on the eval split: when a run is evaluated, when it ends, and which checkpoint it keeps.

A recipe with `patience` above 0 is evaluated some `EVALUATIONS` times, each time beside a checkpoint; it stops after so
many evaluations without a better one, and its weights are those of the best. Saving, loading and counting the best is
transformers' own (`load_best_model_at_end`); the count of evaluations in vain is read from the log, so that a resumed
run stops where an uninterrupted one does (transformers' `EarlyStoppingCallback` would start anew).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar
from transformers import TrainerCallback

from rl.recipes import DPORecipe, Recipe

EVALUATIONS = 16
"""Evaluations of a run whose recipe does not say after how many steps."""

FEWEST_TO_STOP = 64
"""Eval rows from which they may end a run: the accuracy of 64 rows has a standard error of 6 points, that of the 30
which 300 rated prompts give one of 9, more than a policy gains between two evaluations. A run with fewer makes the
steps of its recipe."""


def stops_early(recipe: Recipe, eval_rows: int) -> bool:
    """True if the eval split may end such a run."""
    return recipe.patience > 0 and eval_rows >= FEWEST_TO_STOP


def evaluation_interval(recipe: Recipe, steps: int) -> int:
    """Optimiser steps between evaluations of a run of `steps`: the recipe's, or a sixteenth of the run."""
    return recipe.eval_steps or max(1, math.ceil(steps / EVALUATIONS))


def stopping_arguments(recipe: Recipe, steps: int, eval_rows: int) -> dict[str, Any]:
    """Keyword arguments for transformers' TrainingArguments; none where the eval split cannot end the run."""
    if not stops_early(recipe, eval_rows):
        return {}
    interval = evaluation_interval(recipe, steps)
    return {
        "eval_strategy": "steps",
        "eval_steps": interval,
        "save_steps": interval,
        "load_best_model_at_end": True,
        "metric_for_best_model": RANKING_LOSS if isinstance(recipe, DPORecipe) else LOSS,
        "greater_is_better": False,
    }


LOSS, RANKING_LOSS = "eval_loss", "eval_ranking_loss"
"""Metrics that are least in the best checkpoint: of DPO the ranking loss, of the others the loss itself.
DPO's loss adds the chosen responses' likelihood and is raised by overconfidence, and neither changes which
response comes first."""

SCALES = (-9.0, 6.0)
"""Bounds of the natural logarithm of the scale that `ranking_loss` looks for."""


def ranking_loss(differences: Sequence[float]) -> float:
    """Log-loss of pairs, in nats, at the scale a >= 0 that makes it least: mean of log(1 + exp(-a d)).

    differences: log p(chosen) - log p(rejected) of each pair, nats. What is chosen among candidates does not depend on
    the scale, so a policy that is as right but surer of itself is as good; a coin has ln 2, and none is worse.
    """
    found = np.asarray(differences, dtype=float)

    def loss(log_scale: float) -> float:
        return float(np.logaddexp(0.0, -math.exp(log_scale) * found).mean())

    least = float(minimize_scalar(loss, bounds=SCALES, method="bounded").fun)
    return min(math.log(2), round(least, 4))  # what the search leaves open decides nothing


def best_evaluation(log: Sequence[Mapping[str, Any]], metric: str = LOSS) -> tuple[int, int]:
    """The step of the first of the best evaluations in a log, and how many evaluations followed it; (0, 0) without
    any. A later evaluation of the same step stands for it."""
    values = {int(row["step"]): float(row[metric]) for row in log if metric in row}
    if not values:
        return 0, 0
    steps = sorted(values)
    # a value that is not a number is never the best
    best = min(steps, key=lambda step: (math.isnan(values[step]), values[step], step))
    return best, len(steps) - 1 - steps.index(best)


class EarlyStopping(TrainerCallback):
    """Ends a run after `patience` evaluations without a better one, and evaluates its last step too."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.reason = ""
        """Reason why the run was ended early; empty while it was not."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best, since = best_evaluation(state.log_history, args.metric_for_best_model)
        if since >= self.patience and state.global_step < state.max_steps:
            self.reason = (
                f"at step {state.global_step} of {state.max_steps}: {since} evaluations without an "
                f"improvement on the eval split, best at step {best}"
            )
            control.should_training_stop = True
            control.should_save = True
