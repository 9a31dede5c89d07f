"""Stages of a run: trainings that it needs first, as runs of their own.

A linear policy where `auto` chose the run; SFT where it starts from that; and for the reward `auto` the answer format
and the reward model. A stage that an earlier attempt began is continued.

PPO and GRPO learn nothing if no sampled answer is valid: each earns the worst reward. The base model is then shown
answers first (SFT, as in Ouyang et al. 2022, arXiv 2203.02155). A run that samples within the format needs that only
for a start with better answers, if people wrote or liked enough different ones.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl.datasets import DatasetRefused, prepare_training_dataset
from rl.datasets.demonstrations import draw_answers
from rl.datasets.feedback_types import Row
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import LINEAR, REWARD_MODEL, linear_beside, method_chosen
from rl.models import RewardModelVersion, TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused
from rl.recipes import BASE, DATASET_CONFIG, DISTIL, FORM, STAGE_STARTS
from rl.reward_models.service import (
    ranking_text,
    ranks_above_chance,
    reward_base_model,
    reward_model_judge,
    reward_model_valid,
)
from rl.rewards.catalogue import AUTO, MODEL

if TYPE_CHECKING:
    from rl.training.preflight import AnswerCheck

logger = logging.getLogger("rl.jobs.stages")

Status = TrainingRun.Status

STAGE_SHARE = 0.25
"""Share of a run's minutes that each of its stages may take."""

SFT_SHARE = 0.5
"""Share for the SFT stage that a run starts from: it teaches what people wrote."""

SFT = "sft"

MIN_LIKED_PROMPTS = 30
"""Fewest prompts with an answer that people wrote or liked for these to show the format and a good start."""

MOST_ALIKE = 0.9
"""If a larger share of them is one answer they show too little: a policy that was shown one answer tries no other, and
only an answer that is tried can be rewarded."""


@dataclass(frozen=True)
class StageRunner:
    """How the process that holds a run enters and trains its stages."""

    enter: Callable[[TrainOrder], TrainingRun]
    """Creates the stage's row, with its dataset."""
    train: Callable[[TrainingRun], Mapping[str, object]]
    """Claims and trains it, or resumes it; returns the training report."""


class StageStopped(Exception):
    """Not an error: the stage was cancelled, or stopped with its worker, and kept its checkpoint."""

    def __init__(self, stage: TrainingRun) -> None:
        super().__init__(
            f"its stage (run {stage.pk}, {stage.method}) did not finish: {stage.reason or 'stopped'}"
        )
        self.cancelled = stage.cancel_requested


def stage_limits(knobs: Mapping[str, Any], share: float = STAGE_SHARE) -> dict[str, object]:
    """Limits of a stage by its run's knobs: the same steps, and a `share` of the minutes."""
    limits: dict[str, Any] = {}
    if (steps := knobs.get("max_steps")) is not None and int(steps) > 0:
        limits["max_steps"] = int(steps)
    if minutes := float(knobs.get("minutes") or 0.0):
        limits["minutes"] = share * minutes
    return limits


def stages_of(run: TrainingRun) -> list[dict[str, object]]:
    """A run's stages in order, as reports, the API and pages show them."""
    return [
        {
            "run": stage.pk,
            "method": stage.method,
            "status": str(stage.status),
            "reason": stage.reason_and_step,
            "steps_done": stage.steps_done,
            "steps_total": stage.steps_total,
            "made": _result_name(stage),
            "why": stage.result.get("why", ""),
        }
        for stage in run.stages.order_by("pk").select_related("policy", "reward_model")
    ]


def _result_name(stage: TrainingRun) -> str:
    """Name of its policy or reward model; empty without one."""
    found = getattr(stage, "policy", None) or getattr(stage, "reward_model", None)
    return found.name if found else ""


def memory_release() -> None:
    """Free a stage's model before the next one is loaded."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def _started(run: TrainingRun, method: str) -> TrainingRun | None:
    """The run's stage of this method, unless it was refused."""
    return run.stages.filter(method=method).exclude(status=Status.REFUSED).order_by("-pk").first()


def _trained(run: TrainingRun, runner: StageRunner, wanted: TrainingRun | TrainOrder) -> TrainingRun:
    """The stage, trained to its end; an order enters a new one. Raises StageStopped, and what training raises."""
    stage = wanted
    if isinstance(stage, TrainOrder):
        stage = runner.enter(replace(stage, actor=f"run {run.pk}", stage_of=run.pk))
    if stage.status != Status.SUCCEEDED:
        report = runner.train(stage)
        stage.refresh_from_db()
        if report["status"] == "cancelled":
            raise StageStopped(stage)
    memory_release()
    return stage


def _settle(run: TrainingRun, note: str, **knobs: object) -> None:
    """Stores knobs that a stage decided, with the reason."""
    run.recipe = {**run.recipe, **knobs}
    run.result = {**run.result, "why": "; ".join(filter(None, (run.result.get("why"), note)))}
    run.save(update_fields=["recipe", "result"])


def _sft_order(run: TrainingRun, share: float, reason: str, **knobs: object) -> TrainOrder:
    knobs |= {"start_from": BASE, **stage_limits(run.recipe, share)}
    return TrainOrder(run.agent, SFT, base_model=run.base_model, knobs=knobs, reason=reason)


# --- A linear policy, and SFT on what people wrote ---


def linear_stage_run(run: TrainingRun, runner: StageRunner) -> None:
    """Train the linear policy beside a run of `auto`; feedback that teaches none stops nothing. Raises StageStopped."""
    try:
        stage: TrainingRun | TrainOrder | None = _started(run, LINEAR)
        if stage is None and (beside := linear_beside(run.agent, run.base_model)) is not None:
            stage = TrainOrder(run.agent, LINEAR, knobs=beside.knobs, reason=beside.reason)
        if stage is not None:
            _trained(run, runner, stage)
    except ValueError as refusal:
        logger.warning("run %s: no linear policy beside it: %s", run.pk, refusal)


def start_stage_run(run: TrainingRun, runner: StageRunner) -> None:
    """Train SFT on what people wrote and liked, or on one policy's answers, if the run starts from that. Raises
    StageStopped, and what training raises."""
    start = str(run.recipe.get("start_from"))
    if start not in STAGE_STARTS:
        return
    shown = "one policy's unrated answers" if start == DISTIL else "what people wrote and liked"
    reason = f"first stage of run {run.pk}: {shown}"
    order = _started(run, SFT) or _sft_order(run, SFT_SHARE, reason, **STAGE_STARTS[start])
    stage = _trained(run, runner, order)
    note = f"run {stage.pk} (sft) came first; this run starts from {stage.policy.name}"
    _settle(run, note, start_from=stage.policy.name)


# --- The answer format ---


def form_stage_run(run: TrainingRun, look: Callable[[], AnswerCheck | None], runner: StageRunner) -> None:
    """Train the answer format, if fewer than half of the base model's answers are valid.

    look: has the base model answer some of the run's prompts; None for free text.

    Does nothing for a run that starts from a policy or allows constant rewards, nor for one that samples within the
    format where people liked too few different answers. Raises RunRefused if no format can be shown to a base model
    without any valid answer, or was shown in vain; StageStopped.
    """
    if run.recipe.get("start_from", BASE) != BASE or run.recipe.get("allow_constant_reward"):
        return
    has_form = run.definition.recipe.from_dict(run.recipe).constrains
    wanted: TrainingRun | TrainOrder | None = _started(run, SFT)
    if wanted is None:
        before = look()
        memory_release()
        if before is None or not before.few or (has_form and not _liked_enough(_liked_answers(run.agent))):
            return
        wanted = form_order(run)
        if wanted is None and before.valid:
            return  # Enough to begin with; the run's own check looks closer.
        if wanted is None:
            raise RunRefused(
                f"{before.words()}: sampled answers are not valid for agent {run.agent}, so they cannot be "
                f"rewarded, and fewer than {DATASET_CONFIG['min_samples']} rated prompts have a valid "
                "answer to train the answer format on: correct or rate valid answers at "
                f"/rate/?agent={run.agent}, or take a larger base model"
            )
    stage = _trained(run, runner, wanted)
    looks = stage.result.get("preflight", {})
    after = looks.get("after") or {}
    if after.get("valid") == 0 and not has_form:
        raise RunRefused(
            f"the answer format was trained first (run {stage.pk}, sft), and still none of {after['asked']} "
            f"answers is valid for agent {run.agent} (one is {after['example']!r}: "
            f"{after['problem']}): correct or rate more valid answers at /rate/?agent={run.agent}, or take "
            "a larger base model"
        )
    shares = [f"{100 * looks[when]['share']:.0f} % {when}" for when in ("before", "after") if when in looks]
    figures = f"valid answers: {', '.join(shares)}" if shares else "sft"
    note = f"answer format: run {stage.pk} trained it first ({figures}); this run starts from {stage.policy.name}"
    _settle(run, note, start_from=stage.policy.name)


def form_order(run: TrainingRun) -> TrainOrder | None:
    """Order of the SFT that teaches the answer format; None with too few answers.

    It shows the answers that people wrote or liked, if these are enough and not all alike; else random valid answers to
    the rated prompts; else what people wrote or liked, few or alike.
    """
    need, served = int(DATASET_CONFIG["min_samples"]), agent_served(run.agent)
    liked = _liked_answers(run.agent)
    knobs, count, description = {"feedback": "corrections"}, len(liked), "answers people wrote or liked"
    if not _liked_enough(liked):
        drawn = {
            kind: len(draw_answers(_train_rows(run.agent, kind), served)) for kind in ("scores", "pairs")
        }
        kind = max(drawn, key=drawn.__getitem__)
        if drawn[kind] >= need:
            knobs, count = {"feedback": kind, "teacher": FORM}, drawn[kind]
            description = "valid answers, liked or not, to rated prompts"
    if count < need:
        return None
    reason = (
        f"first stage of run {run.pk}, as its base model gives few valid answers: {count:,} {description}"
    )
    return _sft_order(run, STAGE_SHARE, reason, **knobs)


def _liked_answers(agent: str) -> list[str]:
    """Answers that people wrote or liked, one per training prompt."""
    return [repr(row["completion"]) for row in _train_rows(agent, "corrections")]


def _liked_enough(answers: list[str]) -> bool:
    """True if there are enough answers and they are not all alike."""
    alike = max(Counter(answers).values(), default=0)
    return len(answers) >= MIN_LIKED_PROMPTS and alike <= MOST_ALIKE * len(answers)


def _train_rows(agent: str, kind: str) -> list[Row]:
    """Training rows of a kind; [] if there are too few."""
    try:
        return list(prepare_training_dataset(agent, kind=kind, dry_run=True).rows("train"))
    except DatasetRefused:
        return []


# --- The reward model ---


def waits_for_reward_model(run: TrainingRun) -> bool:
    """True if the run's rewards name `auto`, which no reward model has replaced yet."""
    return AUTO in _specs(run)


def _specs(run: TrainingRun) -> list[str]:
    return [spec.strip() for spec in str(run.recipe.get("reward", "")).split(",")]


def reward_model_resolve(run: TrainingRun, runner: StageRunner) -> RewardModelVersion:
    """Replace `auto` in a claimed run's rewards by a reward model, trained first if none is valid.

    Raises RunRefused if it ranks held-out feedback no better than chance, StageStopped if its training was stopped.
    """
    version = reward_model_valid(run.agent, run.base_model)
    if version is None:
        stage = _started(run, REWARD_MODEL) or reward_model_order(
            run.agent, run.base_model, knobs=stage_limits(run.recipe)
        )
        stage = _trained(run, runner, stage)
        made = RewardModelVersion.objects.get(run=stage)
        if not made.ranking:  # The process was killed between training and evaluation.
            reward_model_judge(made)
            memory_release()
        if not ranks_above_chance(made.ranking):
            raise RunRefused(_coin(run, made))
        version = made
    reward = ",".join(f"{MODEL}{version.name}" if spec == AUTO else spec for spec in _specs(run))
    _settle(run, f"reward auto: {version.name}, which {ranking_text(version.ranking)}", reward=reward)
    return version


def _coin(run: TrainingRun, found: RewardModelVersion) -> str:
    """Why there is no reward to learn from, and what to do."""
    return (
        f"--reward auto: no reward model of {run.agent} ranks held-out feedback better than chance ({found.name} "
        f"{ranking_text(found.ranking)}; "
        f"the 95 % interval must lie above 50 %): rate more at /rate/?agent={run.agent}, or learn from the "
        "ratings directly with --method auto"
    )


def reward_model_order(
    agent: str, base_model: str, *, knobs: Mapping[str, object] | None = None
) -> TrainOrder:
    """Order of a reward model for a policy on `base_model`, by the objective that fits the feedback. knobs: limits."""
    base = reward_base_model(base_model)
    chosen = method_chosen(agent, REWARD_MODEL, base_model=base)
    return TrainOrder(
        agent,
        chosen.method,
        base_model=base,
        knobs={**chosen.knobs, **(knobs or {})},
        reason=chosen.reason,
        actor="rlhf",
    )
