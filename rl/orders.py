"""Training that is asked for: what it would come to, and handing it to a worker. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from feedback.selectors import agents_known, feedback_counts
from rl.datasets import DatasetRefused, prepare_training_dataset
from rl.jobs import RunRefused, TrainOrder, run_dispatch, run_enqueue
from rl.methods import dataset_kind
from rl.models import TrainingRun
from rl.recipes import DATASET_CONFIG, Recipe, recipe_named
from rl.scores import score_summaries

SECONDS_PER_STEP = 0.5
"""Taken for a step where no run has finished yet: the bundled base with the cpu preset took 0.48 s on two cores."""


class TooLittleFeedback(ValueError):
    """Fewer ratings and comparisons than training needs; `found` is how many there are."""

    code = "invalid"

    def __init__(self, agent: str, found: int, needed: int) -> None:
        super().__init__(
            f"expected at least {needed} ratings and comparisons of agent {agent}, found {found}; rate more at "
            f"/rate/?agent={agent} or send them"
        )
        self.found = found
        self.fields = {"feedbackCount": f"{found} of {needed}"}


@dataclass(frozen=True)
class OrderEstimate:
    """What an order would come to."""

    feedback_count: int
    pairs: int
    """Training rows the feedback makes, of the kind the method is fed; 0 where `refused` says why not."""
    steps: int
    minutes: float
    by: str
    """What the time was worked out from."""
    score_mean: float | None
    score_std: float | None
    config: str
    base_model: str
    recipe: dict[str, Any]
    refused: str


def order_estimate(order: TrainOrder) -> OrderEstimate:
    """Steps and minutes of an order, without loading anything that trains.

    Raises TooLittleFeedback below DATASET_CONFIG["min_samples"] ratings and comparisons, RecipeError.
    """
    count, needed = feedback_counts(order.agent).feedback, int(DATASET_CONFIG["min_samples"])
    if count < needed:
        raise TooLittleFeedback(order.agent, count, needed)
    earlier = _earlier(order)
    config = order.config or (earlier.config if earlier else "") or "cpu"
    recipe: Recipe = recipe_named(order.method, config, settings.RATCHET_CONFIG.get(order.method)).with_knobs(
        **order.knobs
    )
    refused, pairs = "", 0
    try:
        prepared = prepare_training_dataset(
            order.agent,
            kind=dataset_kind(order.method, recipe.as_dict()),
            max_samples=order.max_samples,
            dry_run=True,
        )
        pairs = prepared.counts["train"]
    except DatasetRefused as refusal:
        refused = str(refusal)
    steps = recipe.steps(pairs)
    seconds, by = _seconds_per_step(earlier)
    score = score_summaries(order.agent, [timezone.now()])[0]
    return OrderEstimate(
        feedback_count=count,
        pairs=pairs,
        steps=steps,
        minutes=steps * seconds / 60,
        by=by,
        score_mean=score.mean,
        score_std=score.std,
        config=config,
        base_model=order.base_model or settings.RATCHET_BASE_MODEL,
        recipe=recipe.as_dict(),
        refused=refused,
    )


def _earlier(order: TrainOrder) -> TrainingRun | None:
    """The newest finished run of the same method and base model: of this agent, else of any."""
    runs = TrainingRun.objects.filter(
        status=TrainingRun.Status.SUCCEEDED,
        method=order.method,
        base_model=order.base_model or settings.RATCHET_BASE_MODEL,
        steps_done__gt=0,
    )
    return runs.filter(agent=order.agent).first() or runs.first()


def _seconds_per_step(earlier: TrainingRun | None) -> tuple[float, str]:
    seconds = earlier.result.get("seconds") if earlier else None
    if earlier is None or not seconds:
        return SECONDS_PER_STEP, f"{SECONDS_PER_STEP:g} s a step, taken as no run has finished yet"
    return (
        seconds / earlier.steps_done,
        f"{seconds / earlier.steps_done:.2g} s a step, as in run {earlier.pk}",
    )


def order_place(order: TrainOrder) -> TrainingRun:
    """Enter a run and hand it to the worker (`manage.py qcluster`). Both or neither.

    Raises TooLittleFeedback, DatasetRefused where the feedback makes no dataset, RecipeError.
    """
    estimate = order_estimate(order)
    if estimate.refused:
        raise DatasetRefused(estimate.refused)
    with transaction.atomic():
        run = run_enqueue(order)
        run_dispatch(run)
    return run


def agent_for(agent: str | None, *, from_file: bool) -> str:
    """The agent that was named, or the only one there is. Raises RunRefused when that is not clear."""
    if agent:
        return agent
    if from_file:
        return "assistant"
    known = agents_known()
    if len(known) == 1:
        return known[0]
    if not known:
        raise RunRefused(
            "no decisions are recorded yet; record some, import a file, or try "
            "`manage.py simulate widgets --rate simulated`"
        )
    raise RunRefused(f"there are several agents; expected --agent with one of {', '.join(known)}")
