"""Fine-tuning jobs: from OpenAI's words to a queued training run."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet

from backend.bodies import SLUG_PATTERN
from rl.base_models.service import base_model_choices, base_model_default, base_model_resolve
from rl.base_models.sources import SourceRefused
from rl.datasets import DatasetRefused
from rl.fine_tuning.files import FineTuningRefused, UnknownObject
from rl.jobs.estimates import order_place
from rl.jobs.lifecycle import TrainOrder, run_cancel
from rl.models import FineTuningJob, Policy, TrainingFile
from rl.models.fine_tuning import GRADERS, is_tuned_name, policy_of_model
from rl.models.runs import RunRefused
from rl.recipes import DATASET_CONFIG, RecipeError
from rl.registry.service import RegistryRefused, policy_reject
from rl.rewards.graders import PREFIX, GraderError, grader_read, models_named, runs_code
from rl.serving.base import ServingRefused
from rl.serving.routing import target_of

AGENT = "agent"
"""Key of a job's metadata that names the agent its policy is for."""
DEFAULT_AGENT = "assistant"
AUTO = "auto"
GROUP = 8
"""Answers to each example of a reinforcement job whose batch size is named."""


@dataclass(frozen=True)
class JobMethod:
    """One of OpenAI's methods."""

    method: str
    """Ours."""
    kind: str
    """Kind of file that it reads."""
    hyperparameters: tuple[str, ...]


METHODS = {
    "supervised": JobMethod(
        "sft", TrainingFile.Kind.CHAT, ("n_epochs", "batch_size", "learning_rate_multiplier")
    ),
    "dpo": JobMethod(
        "dpo", TrainingFile.Kind.PREFERENCE, ("n_epochs", "batch_size", "learning_rate_multiplier", "beta")
    ),
    "reinforcement": JobMethod(
        "grpo",
        TrainingFile.Kind.PROMPT,
        ("n_epochs", "batch_size", "learning_rate_multiplier", "eval_interval", "eval_samples"),
    ),
}


@dataclass(frozen=True)
class JobOrder:
    """Order of a job, its files found."""

    model: str
    training: TrainingFile
    validation: TrainingFile | None = None
    method: str = "supervised"
    hyperparameters: Mapping[str, float | str] = field(default_factory=dict)
    """Number or `auto` by OpenAI's name."""
    seed: int | None = None
    suffix: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    grader: object = None
    """OpenAI's JSON of the grader of a reinforcement job."""


def jobs_of(caller: str | None) -> QuerySet[FineTuningJob]:
    """Jobs that a key asked for, named as key:3; None: of everybody, for people with the role."""
    found = FineTuningJob.objects.select_related("run__policy")
    return found if caller is None else found.filter(created_by=caller)


def job_get(name: str, caller: str | None) -> FineTuningJob:
    """The caller's job of an id. Raises UnknownObject, also for a job of another key."""
    found = jobs_of(caller).filter(name=name[:40]).first()
    if found is None:
        raise UnknownObject("fine_tuning_job_id", f"there is no fine-tuning job {name[:80]!r}")
    return found


def job_create(order: JobOrder, *, actor: str, caller: str = "") -> FineTuningJob:
    """Queue the training run of a job. Its policy is judged; the gate and a person decide whether an agent gets it.

    caller: whose job it is, such as key:3. Raises FineTuningRefused.
    """
    agent = order.metadata.get(AGENT) or DEFAULT_AGENT
    if not re.fullmatch(SLUG_PATTERN, agent):
        raise FineTuningRefused(
            "metadata", f"{AGENT}: expected an agent such as support-bot, found {agent!r}"
        )
    _files_check(order)
    base_model, knobs = _start_of(order.model)
    if order.method == "reinforcement":
        knobs["reward"] = _grader_store(order.grader)
    training = TrainOrder(
        agent,
        METHODS[order.method].method,
        base_model=base_model,
        knobs=knobs | _knobs_of(order),
        source="file",
        data_file=order.training.path,
        validation_file=order.validation.path if order.validation else None,
        actor=actor,
    )
    try:
        with transaction.atomic():
            _files_hold(order)
            run = order_place(training, judge=True)
            return FineTuningJob.objects.create(
                run=run,
                model=order.model,
                training_file=order.training.name,
                validation_file=order.validation.name if order.validation else "",
                suffix=order.suffix,
                hyperparameters=dict(order.hyperparameters),
                metadata=dict(order.metadata),
                created_by=caller,
            )
    except DatasetRefused as refusal:
        words = str(refusal).replace(str(order.training.path), order.training.filename)
        raise FineTuningRefused("training_file", words) from refusal
    except RecipeError as refusal:
        raise FineTuningRefused("hyperparameters", str(refusal)) from refusal


def job_cancel(job: FineTuningJob, *, actor: str) -> FineTuningJob:
    """Cancel a job's run. Raises FineTuningRefused where it has ended."""
    try:
        job.run = run_cancel(job.run, actor=actor)
    except RunRefused as refusal:
        raise FineTuningRefused("", f"job {job.name} cannot be cancelled: {refusal}") from refusal
    return job


def model_delete(name: str, *, actor: str) -> None:
    """Take a fine-tuned model out of service for good: its policy is rejected. Raises FineTuningRefused."""
    policy = Policy.objects.filter(name=policy_of_model(name)).first()
    if policy is None:
        raise UnknownObject(
            "model", f"there is no fine-tuned model {name[:200]!r}; only such are deleted here"
        )
    try:
        policy_reject(policy, actor=actor, reason="deleted as a fine-tuned model")
    except RegistryRefused as refusal:
        raise FineTuningRefused("model", str(refusal)) from refusal


def _files_check(order: JobOrder) -> None:
    wanted = METHODS[order.method].kind
    for param, file in (("training_file", order.training), ("validation_file", order.validation)):
        if file is not None and file.kind != wanted:
            raise FineTuningRefused(
                param,
                f"the method {order.method} needs a file of {TrainingFile.Kind(wanted).label}, and {file.name} holds "
                f"{TrainingFile.Kind(file.kind).label}",
            )
    if order.training == order.validation:
        raise FineTuningRefused("validation_file", "expected another file than training_file")
    rows = order.training.rows + (order.validation.rows if order.validation else 0)
    if rows < (needed := int(DATASET_CONFIG["min_samples"])):
        raise FineTuningRefused("training_file", f"expected at least {needed} examples, found {rows}")


def _files_hold(order: JobOrder) -> None:
    """Keep the files from being deleted until the job is there. Raises FineTuningRefused for one that is gone."""
    names = [file.name for file in (order.training, order.validation) if file is not None]
    held = TrainingFile.objects.select_for_update().filter(name__in=names)
    if len(held) != len(names) or not all(file.path.is_file() for file in held):
        raise FineTuningRefused("training_file", "a file of this job is gone; upload it again")


def _start_of(model: str) -> tuple[str, dict[str, object]]:
    """The base model that `model` names, with the knobs that start from a fine-tuned one. Raises FineTuningRefused."""
    if is_tuned_name(model):
        found = Policy.objects.filter(name=policy_of_model(model)).exclude(stage=Policy.Stage.REJECTED)
        if (policy := found.first()) is None:
            raise FineTuningRefused("model", f"there is no fine-tuned model {model[:200]!r}")
        return policy.base_model, {"start_from": policy.name}
    choices = list(dict.fromkeys([*base_model_choices(), base_model_default().name]))
    named = model
    if model not in choices:
        patterns = settings.FINE_TUNING_MODELS
        named = next((base for name, base in patterns.items() if fnmatch.fnmatchcase(model, name)), "")
        if not named:
            known = ", ".join([*choices, *patterns])
            raise FineTuningRefused(
                "model",
                f"expected one of {known}; found {model[:80]!r}. An operator adds base models with `model add` and "
                "names of other models with FINE_TUNING_MODELS",
            )
    try:
        return base_model_resolve(named).name, {}
    except SourceRefused as refusal:
        raise FineTuningRefused("model", str(refusal)) from refusal


def _grader_store(told: object) -> str:
    """Keep a grader under its content's hash; returns the spec of its reward. Raises FineTuningRefused."""
    try:
        grader = grader_read(told)
    except GraderError as error:
        raise FineTuningRefused("grader", str(error)) from error
    if runs_code(grader) and not settings.ENABLE_CODE_EXECUTION:
        raise FineTuningRefused("grader", "graders with Python code need ENABLE_CODE_EXECUTION=true")
    for model in models_named(grader):
        try:
            target_of(model)
        except ServingRefused as refusal:
            raise FineTuningRefused("grader", f"score_model: {refusal}") from refusal
    text = grader.model_dump_json()
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    folder: Path = settings.RATCHET_HOME / GRADERS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    half = folder / f".{name}.{os.getpid()}"
    half.write_text(text, "utf-8")
    half.replace(folder / name)
    return f"{PREFIX}{name}"


def _knobs_of(order: JobOrder) -> dict[str, object]:
    """Our knobs of a job's hyperparameters; `auto` leaves a knob to the preset of the machine."""
    given = {name: value for name, value in order.hyperparameters.items() if value != AUTO}
    knobs: dict[str, object] = {} if order.seed is None else {"seed": order.seed}
    if "n_epochs" in given:
        knobs["epochs"] = given["n_epochs"]
    if "batch_size" in given:
        # at OpenAI examples; GRPO counts the answers to them
        group = GROUP if order.method == "reinforcement" else 1
        knobs |= {"batch_size": int(given["batch_size"]) * group, "gradient_accumulation": 1}
    if "learning_rate_multiplier" in given:
        knobs["learning_rate"] = f"{given['learning_rate_multiplier']}x"
    for name, knob in (("beta", "beta"), ("eval_interval", "eval_steps"), ("eval_samples", "eval_prompts")):
        if name in given:
            knobs[knob] = given[name]
    return knobs
