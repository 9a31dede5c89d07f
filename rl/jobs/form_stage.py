"""The stage of RLHF before its reward model: the form of an answer, where the base model gives few valid ones.

What samples its own answers freely learns nothing where its agent can act on none of them: each earns the worst reward.
So the base model is first shown answers (SFT, as in Ouyang et al. 2022, arXiv 2203.02155), and the run starts from that
policy. A run that samples within the form of the answer needs no form to be shown; there the stage is for a first taste
alone, where people wrote or liked enough different answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rl.agents.random_answers import draw_answers
from rl.datasets import DatasetRefused, PreparedDataset, prepare_training_dataset
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.stages import StageRunner, memory_release, stage_limits, stage_started, stage_trained
from rl.models import TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import RunRefused
from rl.recipes import BASE, DATASET_CONFIG, FORM
from rl.recipes.methods import method_named

if TYPE_CHECKING:
    from rl.training.preflight import AnswerCheck

METHOD = "sft"
"""Of the stage's run."""

MIN_LIKED_PROMPTS = 30
"""Prompts with an answer that people wrote or liked from which these show the form, and a first taste with it."""

MOST_ALIKE = 0.9
"""Share of these that are one and the same answer from which on they do not: what was shown nothing else tries nothing
else, and what is rewarded has to be tried before it is found."""


def form_stage_run(
    run: TrainingRun, look: Callable[[], AnswerCheck | None], stage_runner: StageRunner
) -> None:
    """Have a claimed run that samples its answers start from a policy that gives valid ones, trained first where the
    base model gives them to fewer than half of its prompts.

    look: has the base model answer a few prompts of the run; None for an agent of free text.

    A run that starts from a policy already, or is to train whatever its rewards say, is left alone, and so is one that
    samples within the form where people liked too few different answers; a stage that an earlier attempt began is gone
    on with. Raises RunRefused where no form can be shown to a base model without a valid
    answer, or was shown in vain; StageStopped where the training was stopped.
    """
    if run.recipe.get("start_from", BASE) != BASE or run.recipe.get("allow_constant_reward"):
        return
    has_form = method_named(run.method).recipe.from_dict(run.recipe).constrains
    stage = stage_started(run, METHOD)
    if stage is None:
        before = look()
        memory_release()
        if before is None or not before.few or (has_form and not _liked_enough(_liked_answers(run.agent))):
            return
        order = form_order(run)
        if order is None and before.valid:
            return  # some are valid: that is enough to begin with, and the run's own probe looks closer
        if order is None:
            raise RunRefused(
                f"{before.words()}: sampled answers are not valid for agent {run.agent}, so they cannot be "
                f"rewarded, and fewer than {DATASET_CONFIG['min_samples']} rated prompts have a valid "
                "answer to train the answer format on: correct or rate valid answers at "
                f"/rate/?agent={run.agent}, or take a larger base model"
            )
        stage = stage_runner.enter(order)
    stage_trained(stage, stage_runner)
    memory_release()
    after = stage.result.get("preflight", {}).get("after") or {}
    if after.get("valid") == 0 and not has_form:
        raise RunRefused(
            f"the answer format was trained first (run {stage.pk}, sft), and still none of {after['asked']} "
            f"answers is valid for agent {run.agent} (one is {after['example']!r}: "
            f"{after['problem']}): correct or rate more valid answers at /rate/?agent={run.agent}, or take "
            "a larger base model"
        )
    run.recipe = {**run.recipe, "start_from": stage.policy.name}
    message = (
        f"answer format: run {stage.pk} trained it first ({_figures(stage)}); this run starts from "
        f"{stage.policy.name}"
    )
    run.result = {**run.result, "why": "; ".join(filter(None, (run.result.get("why"), message)))}
    run.save(update_fields=["recipe", "result"])


def form_order(run: TrainingRun) -> TrainOrder | None:
    """Order of the SFT stage that teaches a run's base model the form; None where too few answers can.

    The answers people wrote or liked, where they are enough and not all alike; else valid answers to the judged
    prompts, liked or not, drawn by lot; else what people wrote or liked, few or alike.
    """
    need, served = int(DATASET_CONFIG["min_samples"]), agent_served(run.agent)
    liked = _liked_answers(run.agent)
    choice: tuple[dict[str, str], int, str] = (
        {"feedback": "corrections"},
        len(liked),
        "answers people wrote or liked",
    )
    if not _liked_enough(liked):
        drawn = {
            kind: len(draw_answers(_rows(_prepare(run.agent, kind)), served)) for kind in ("scores", "pairs")
        }
        kind = max(drawn, key=drawn.__getitem__)
        if drawn[kind] >= need:
            description = "valid answers, liked or not, to rated prompts"
            choice = {"feedback": kind, "teacher": FORM}, drawn[kind], description
    knobs, count, description = choice
    if count < need:
        return None
    return TrainOrder(
        run.agent,
        METHOD,
        base_model=run.base_model,
        # a run goes on from a LoRA with a LoRA, and from whole weights with whole weights
        knobs={
            **knobs,
            "start_from": BASE,
            **stage_limits(run.recipe),
            **({"lora_r": 0} if run.recipe.get("lora_r") == 0 else {}),
        },
        actor=f"run {run.pk}",
        reason=f"first stage of run {run.pk}, as its base model gives few valid answers: {count:,} {description}",
        stage_of=run.pk,
    )


def _liked_answers(agent: str) -> list[str]:
    """Answers that people wrote or liked, one for each training prompt."""
    return [repr(row["completion"]) for row in _rows(_prepare(agent, "corrections"))]


def _liked_enough(answers: list[str]) -> bool:
    """True where so many answers, and not all alike, show a form and a first taste with it."""
    alike = max(Counter(answers).values(), default=0)
    return len(answers) >= MIN_LIKED_PROMPTS and alike <= MOST_ALIKE * len(answers)


def _prepare(agent: str, kind: str) -> PreparedDataset | None:
    try:
        return prepare_training_dataset(agent, kind=kind, dry_run=True)
    except DatasetRefused:
        return None


def _rows(prepared: PreparedDataset | None) -> list[dict[str, Any]]:
    return list(prepared.rows("train")) if prepared else []


def _figures(stage: TrainingRun) -> str:
    looks = stage.result.get("preflight", {})
    shares = [f"{100 * looks[when]['share']:.0f} % {when}" for when in ("before", "after") if when in looks]
    return f"valid answers: {', '.join(shares)}" if shares else "sft"
