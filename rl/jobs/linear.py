"""Runs of linear policies: the feedback they learn from, what they would come to, and the fit itself. No torch."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.agents.base import Agent, Row, answer_plain
from rl.checksums import sums_write
from rl.datasets import PreparedDataset, snapshot_rows
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import method_chosen
from rl.jobs.progress import RunListener
from rl.linear.features import FAMILIES
from rl.linear.fit import MEMORY_GB, PENALTIES, SECONDS_PER_ROW, FittedPolicy, fit
from rl.linear.model import FIELDS, WEIGHTS, LinearPolicy
from rl.linear.rows import PAIRS_AND_SCORES, SCORES, LinearChoice, LinearRefused, answers_of, choices_of
from rl.models import TrainingRun
from rl.models.runs import RunRefused, run_folder
from rl.recipes import LinearRecipe
from rl.recipes.linear import AUTO

if TYPE_CHECKING:
    from rl.training.result import TrainResult

LIBRARIES = ("scikit-learn", "numpy", "scipy")

FEW_PROMPTS = 30
"""Training prompts below which it learns these prompts rather than what they have in common."""


def feedback_resolved(order: TrainOrder, recipe: LinearRecipe) -> LinearRecipe:
    """The recipe with the feedback that `auto` stands for: what `auto` of the other methods would learn from."""
    if recipe.feedback != AUTO:
        return recipe
    return recipe.with_knobs(**method_chosen(order.agent, "linear", **order.feedback_source).knobs)


def fitted_by(recipe: LinearRecipe, rows: Sequence[Row], agent: Agent) -> FittedPolicy:
    """The policy of a recipe on training rows. Raises LinearRefused."""
    families = FAMILIES
    if recipe.features != AUTO:
        families = tuple(names for names in FAMILIES if names[-1] == recipe.features)
    penalties = PENALTIES if recipe.penalty == AUTO else (float(recipe.penalty),)
    return fit(rows, agent, penalties=penalties, families=families, seed=recipe.seed)


def run_fit(run: TrainingRun, agent: Agent, listener: RunListener) -> TrainResult:
    """Train the linear policy of a claimed run. Writes nothing but its folder. Raises TrainingRefused."""
    from rl.training.result import TrainingRefused, TrainResult

    if run.snapshot is None:
        raise RunRefused(f"run {run.pk} has no snapshot to train on")
    began = time.perf_counter()
    recipe = LinearRecipe.from_dict(run.recipe)
    rows, eval_rows = (list(snapshot_rows(run.snapshot, split)) for split in ("train", "eval"))
    listener.on_start(1)
    listener.on_phase("fitting")
    try:
        linear_fit = fitted_by(recipe, rows, agent)
    except LinearRefused as refusal:
        raise TrainingRefused(str(refusal)) from refusal
    folder = run_folder(run) / "policy"
    linear_fit.policy.save(folder)
    sums_write(folder, [WEIGHTS])
    metrics = {**linear_fit.metrics, **eval_metrics(linear_fit.policy, eval_rows, agent)}
    listener.on_step(1, 1)  # no row of metrics: one fit draws no curve
    answers = linear_fit.policy.answers
    notes = [f"{len(answers)} answers, {linear_fit.words}" if answers else linear_fit.words]
    return TrainResult(
        method="linear",
        status="succeeded",
        checkpoint=str(folder),
        base_model="",
        base_model_hash="",
        steps=1,
        total_steps=1,
        seconds=time.perf_counter() - began,
        samples={"train": len(rows), "eval": len(eval_rows)},
        left_out=linear_fit.left_out,
        metrics=metrics,
        recipe=recipe.as_dict(),
        libraries={name: importlib.metadata.version(name) for name in LIBRARIES},
        notes=notes,
    )


def eval_metrics(policy: LinearPolicy, rows: Sequence[Row], agent: Agent) -> dict[str, float]:
    """`eval_accuracy` on the eval split: preferred answers held likelier, or answers to give that are chosen; none for
    scores, which say of one answer alone."""
    try:
        choices = choices_of(rows, agent)
    except LinearRefused:
        return {}  # no row, or none that can be read
    if choices.feedback == SCORES:
        return {}
    judged = [row for row in choices.rows if row.rejected or choices.feedback != PAIRS_AND_SCORES]
    if not judged:
        return {}
    right = [_is_right(policy, row) for row in judged]
    return {"eval_accuracy": sum(right) / len(right)}


def _is_right(policy: LinearPolicy, row: LinearChoice) -> bool:
    if policy.mode == FIELDS:
        return answer_plain(policy.options(row.messages)[0]) == answer_plain(row.answer)
    others = [row.rejected] if row.rejected else list(row.options or policy.answers)
    best, *rest = policy.scores(row.messages, [row.answer, *others])
    plain = policy.features_of(row.answer)
    return all(
        best > score for other, score in zip(others, rest, strict=True) if policy.features_of(other) != plain
    )


def plan_of(prepared: PreparedDataset, agent: Agent) -> dict[str, object]:
    """Facts of a dry run beyond the counts of its dataset. Raises TrainingRefused as the training would."""
    from rl.training.result import TrainingRefused

    try:
        choices = choices_of(prepared.rows("train"), agent)
        answers = answers_of(choices.rows, agent)
    except LinearRefused as refusal:
        raise TrainingRefused(str(refusal)) from refusal
    prompts = len({row.group for row in choices.rows})
    return {
        "estimated_steps": 1,
        "estimated_minutes": len(choices.rows) * SECONDS_PER_ROW / 60,
        "estimated_memory_gb": MEMORY_GB,
        "answers": len(answers.vocabulary),
        "doubt": teachability_warning(prompts),
        "preflight": {},
        "warning": "",
    }


def teachability_warning(prompts: int) -> str:
    """Warning that a training on so few prompts teaches little; empty where they are enough."""
    if prompts >= FEW_PROMPTS:
        return ""
    return (
        f"only {prompts:,} training prompts: the policy may memorise them and generalise little; rate about "
        f"{-(-(FEW_PROMPTS - prompts) * 17 // 100) * 10} more prompts"
    )
