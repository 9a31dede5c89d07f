"""Training that is asked for: what it would come to, and handing it to a worker. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from backend.installation import PROGRAM
from feedback.selectors import agent_slugs, feedback_counts
from rl.agents.base import Agent
from rl.datasets import DatasetRefused, PreparedDataset, prepare_training_dataset
from rl.datasets.stats import score_summaries
from rl.jobs.lifecycle import TrainOrder, base_model_for, run_dispatch, run_enqueue
from rl.jobs.method_selection import NOTHING_TEACHES, REWARD_MODEL, MethodChoice, method_chosen
from rl.jobs.plan import row_rules
from rl.jobs.run_recipe import MemoryEstimate, memory_at_most, recipe_sized
from rl.jobs.stages import reward_model_order, stage_limits
from rl.jobs.teachability import teachability_warning
from rl.linear.fit import MEMORY_GB, SECONDS_PER_ROW
from rl.linear.rows import LinearRefused, answers_of, choices_of
from rl.models import TrainingRun
from rl.models.runs import LEARNER, RunRefused
from rl.recipes import DATASET_CONFIG, DISTIL, RewardModelRecipe, recipe_named
from rl.recipes.methods import dataset_kind
from rl.recipes.reward_model import LINEAR
from rl.reward_models.service import reward_model_valid
from rl.rewards.catalogue import AUTO, opened_in_training

SECONDS_PER_STEP = 0.5
"""Default seconds of a step where no run has finished yet: the bundled base with the cpu preset took 0.48 s
on two cores."""


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
class StageEstimate:
    """One stage of an order: a reward model that is trained first, or the policy itself."""

    method: str
    samples: int
    """Training rows the feedback makes, of the kind the method is fed; 0 where `refused` says why not."""
    steps: int
    minutes: float
    minutes_source: str
    memory: MemoryEstimate
    config: str
    base_model: str
    recipe: Mapping[str, object]
    refusal: str
    warning: str
    """Reason why it would teach nothing, or little; empty where nothing speaks against it."""


@dataclass(frozen=True)
class OrderEstimate:
    """Estimate of an order: its stages, one after the other, the policy's last."""

    feedback_count: int
    score_mean: float | None
    score_std: float | None
    stages: tuple[StageEstimate, ...]
    reward_model: str = ""
    """The registered reward model that an order with the reward `auto` would use; empty where one is trained first."""

    @property
    def policy(self) -> StageEstimate:
        return self.stages[-1]

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def minutes(self) -> float:
        return sum(stage.minutes for stage in self.stages)

    @property
    def refusal(self) -> str:
        return next((stage.refusal for stage in self.stages if stage.refusal), "")


def order_estimate(order: TrainOrder) -> OrderEstimate:
    """Steps, minutes and memory of an order, without loading anything that trains.

    Raises TooLittleFeedback below DATASET_CONFIG["min_samples"] ratings, comparisons, outcomes, demonstrations and
    traces together, RecipeError.
    """
    counts, needed = feedback_counts(order.agent), int(DATASET_CONFIG["min_samples"])
    count = counts.feedback
    asked = order.source == "db" and not _rewards_itself(order) and not _distils(order)
    if asked and counts.evidence < needed:
        raise TooLittleFeedback(order.agent, count, needed)
    stages, reward_model = [_stage(order)], ""
    if AUTO in str(stages[0].recipe.get("reward", "")).split(","):
        judge = reward_model_valid(order.agent, base_model_for(order))
        reward_model = judge.name if judge else ""
        if judge is None:
            limits = stage_limits(stages[0].recipe)
            stages.insert(0, _stage(reward_model_order(order.agent, base_model_for(order), knobs=limits)))
    score = score_summaries(order.agent, [timezone.now()])[0]
    return OrderEstimate(count, score.mean, score.std, tuple(stages), reward_model)


def _rewards_itself(order: TrainOrder) -> bool:
    """True if it samples its own answers and rewards them without anything learnt from people: prompts will
    do."""
    specs = str(order.knobs.get("reward", "")).split(",")
    if not order.definition.rewarded:
        return False
    return bool(specs[0]) and not any(opened_in_training(spec.strip()) for spec in specs)


def _distils(order: TrainOrder) -> bool:
    """True if it learns from answers that nobody rated."""
    return DISTIL in (order.knobs.get("sources"), order.knobs.get("start_from"))


def _stage(order: TrainOrder) -> StageEstimate:
    earlier, adapter = _earlier(order), order.definition.adapter
    config = order.config or (earlier.config if earlier else "") or order.definition.preset("cpu")
    recipe = recipe_named(order.method, config, settings.RATCHET_CONFIG.get(order.method)).with_knobs(
        **order.knobs
    )
    kind, refusal_text, samples = dataset_kind(order.method, recipe.as_dict()), "", 0
    try:
        prepared = prepare_training_dataset(
            order.agent,
            kind=kind,
            source=order.feedback_file,
            rules=row_rules(recipe),
            max_samples=order.max_samples,
            dry_run=True,
        )
        samples = prepared.counts["train"]
        recipe = recipe_sized(order, recipe, prepared, None, "cpu")
    except DatasetRefused as refusal:
        refusal_text = str(refusal)
    if not adapter and not refusal_text:
        refusal_text = _no_choice(order.served, prepared)
    steps = recipe.steps(samples) if adapter else 1
    base_model = base_model_for(order)
    seconds, by = _seconds_per_step(earlier)
    is_linear = not adapter or (isinstance(recipe, RewardModelRecipe) and recipe.is_linear)
    if is_linear:
        seconds, by = SECONDS_PER_ROW * samples, f"{1000 * SECONDS_PER_ROW:g} ms a row, one fit"
    return StageEstimate(
        method=order.method,
        samples=samples,
        steps=steps,
        minutes=min(steps * seconds / 60, recipe.as_dict().get("minutes") or math.inf),
        minutes_source=by,
        memory=MemoryEstimate(MEMORY_GB, "Python with numpy, scipy and scikit-learn; no base model")
        if is_linear
        else memory_at_most(base_model, recipe, 2 if kind in ("pairs", "labels") else 1),
        config=config,
        base_model=base_model,
        recipe=recipe.as_dict(),
        refusal=refusal_text,
        warning=""
        if refusal_text or is_linear
        else teachability_warning(recipe.fit_to_rows(samples), samples, kind),
    )


def _no_choice(agent: Agent, prepared: PreparedDataset) -> str:
    """Reason that a linear policy cannot learn from a dataset; empty where it can."""
    try:
        answers_of(choices_of(prepared.rows("train"), agent).rows, agent)
    except LinearRefused as refusal:
        return str(refusal)
    return ""


def _earlier(order: TrainOrder) -> TrainingRun | None:
    """The newest finished run of the same method and base model: of this agent, else of any."""
    runs = TrainingRun.objects.filter(
        status=TrainingRun.Status.SUCCEEDED,
        method=order.method,
        base_model=base_model_for(order),
        steps_done__gt=0,
    )
    # a fit tells nothing of a step; exclude() alone would leave out runs whose recipe has no architecture
    runs = runs.filter(~Q(recipe__architecture=LINEAR) | Q(recipe__architecture__isnull=True))
    return runs.filter(agent=order.agent).first() or runs.first()


def _seconds_per_step(earlier: TrainingRun | None) -> tuple[float, str]:
    seconds = earlier.result.get("seconds") if earlier else None
    if earlier is None or not seconds:
        return SECONDS_PER_STEP, f"{SECONDS_PER_STEP:g} s a step (assumed; no run has finished yet)"
    return (
        seconds / earlier.steps_done,
        f"{seconds / earlier.steps_done:.2g} s a step, as in run {earlier.pk}",
    )


def base_model_wanted(agent: str, wanted: str, **more: Any) -> str:
    """The base model that a training by this method, or by the one `auto` takes, is for. `more` as in
    `order_automatic`."""
    return base_model_for(TrainOrder(agent, REWARD_MODEL if wanted == REWARD_MODEL else "sft", **more))


LIMITS = ("minutes", "max_steps")
"""Knobs that limit a training by steps."""


def order_automatic(
    agent: str,
    wanted: str = "auto",
    *,
    knobs: Mapping[str, object] | None = None,
    rewards: bool = True,
    chosen: MethodChoice | None = None,
    **more: Any,
) -> TrainOrder:
    """An order by the method that was asked for, or the one that fits the feedback (`auto`), with why and the knobs it
    needs; `knobs` lie over these. `more` are further fields of TrainOrder.

    chosen: the method, where it was chosen already. rewards: PPO and GRPO that nobody named a reward for, here or in
    RATCHET_CONFIG, learn from the reward model `auto`.
    Raises RecipeError for an unknown method.
    """
    if chosen is None:
        chosen = method_chosen(agent, wanted, base_model=base_model_wanted(agent, wanted, **more))
    own = {**chosen.knobs, **(knobs or {})}
    if not chosen.definition.adapter:  # a fit takes seconds
        own = {knob: value for knob, value in own.items() if knob not in LIMITS}
    named = "reward" in own or "reward" in settings.RATCHET_CONFIG.get(chosen.method, {})
    if rewards and chosen.definition.rewarded and not named:
        own["reward"] = AUTO
    return TrainOrder(agent, chosen.method, knobs=own, reason=chosen.reason, **more)


STARTING_S = 40
"""Seconds that a worker takes to load the libraries and the model, beside the steps: 38 were measured on two cores."""


def seconds_of(expected: OrderEstimate) -> float:
    """Seconds from a worker's taking an order to its policy."""
    return STARTING_S + 60 * expected.minutes


def automatic_plan(agent: str) -> dict[str, Any]:
    """Method, samples, steps, seconds and doubt of the training that `auto` would start now; or why it would be
    refused."""
    try:
        chosen = method_chosen(agent, base_model=base_model_wanted(agent, "auto"))
        if chosen.why == NOTHING_TEACHES:
            return {
                "refusal": "dislikes alone do not show what a good answer is: like or correct a few more answers"
            }
        expected = order_estimate(order_automatic(agent, chosen=chosen))
    except ValueError as refusal:
        return {"refusal": str(refusal)}
    return {
        "refusal": expected.refusal,
        "method": chosen.method.upper(),
        "reason": chosen.why,
        "samples": expected.policy.samples,
        "steps": expected.steps,
        "seconds": seconds_of(expected),
        "warning": expected.policy.warning,
    }


def order_place(order: TrainOrder, *, follow: bool = False, judge: bool = False) -> TrainingRun:
    """Enter a run and hand it to the worker (`manage.py serve`). Both or neither. An identical run that waits is it.

    follow: judge the policy it makes when it is done, and do what the gate and the agent's learner settings say.
    judge: judge it and ask the gate, and leave each move to a person.

    Raises TooLittleFeedback, DatasetRefused where the feedback makes no dataset, RecipeError.
    """
    estimate = order_estimate(order)
    if estimate.refusal:
        raise DatasetRefused(estimate.refusal)
    wanted = TrainingRun.FollowUp.WANTED if follow else TrainingRun.FollowUp.JUDGE if judge else ""
    with transaction.atomic():
        _orders_lock(order.agent)
        waiting = TrainingRun.objects.filter(
            agent=order.agent,
            method=order.method,
            base_model=base_model_for(order),
            config=order.config or "",
            follow_up=wanted,
            status=TrainingRun.Status.QUEUED,
            snapshot=None,
            cancel_requested=False,
            data_file="",
        ).exclude(asked_by=LEARNER)
        same = next((run for run in waiting if run.recipe == order.knobs), None)
        if same is not None and order.source == "db":  # each job over a file is a run of its own
            return same
        run = run_enqueue(order)
        run.result["estimated_s"] = seconds_of(estimate)
        TrainingRun.objects.filter(pk=run.pk).update(follow_up=wanted, result=run.result)
        run_dispatch(run)
    run.refresh_from_db()
    return run


def _orders_lock(agent: str) -> None:
    """Wait until no other transaction orders a training of this agent. Its end lets the next one go on.

    No row of the agent is sure to exist, so none can be locked. SQLite's transactions are one at a time already.
    """
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [f"training of {agent}"])


def agent_for(agent: str | None, *, from_file: bool) -> str:
    """The agent that was named, or the only one there is. Raises RunRefused when that is not clear."""
    if agent:
        return agent
    if from_file:
        return "assistant"
    known = agent_slugs()
    if len(known) == 1:
        return known[0]
    if not known:
        raise RunRefused(
            "no decisions are recorded yet; record some, import a file, or try "
            f"`{PROGRAM} simulate widgets --rate simulated`"
        )
    raise RunRefused(f"there are several agents; expected --agent with one of {', '.join(known)}")
