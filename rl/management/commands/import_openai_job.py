"""Train a fine-tuning job of OpenAI here: its downloaded training file, with the settings of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError
from pydantic import ValidationError

from backend.bodies import faults_of
from backend.command import CommandOptions, RatchetCommand, Result
from rl.fine_tuning.bodies import JobSettings
from rl.fine_tuning.files import FineTuningRefused, file_delete, file_store
from rl.fine_tuning.jobs import AGENT, job_create
from rl.models import FineTuningJob, TrainingFile
from rl.models.fine_tuning import TUNED_PARTS, is_tuned_name

ACTOR = "import_openai_job"


class Options(CommandOptions):
    job: Path
    """The job as OpenAI's API writes it (JSON). Example: job.json"""
    training: Path
    """Its training file. Example: train.jsonl"""
    validation: Path | None = None
    """F: Its validation file. Example: --validation valid.jsonl"""
    model: str = ""
    """NAME: Base model (default: what FINE_TUNING_MODELS names for the job's model). Example: --model smollm2"""
    agent: str = ""
    """SLUG: Agent that the policy is for (default: assistant). Example: --agent support-bot"""


class Command(RatchetCommand[Options, Result]):
    help = (
        "Train a fine-tuning job of OpenAI here: queue a run with its training file, method, hyperparameters, seed and "
        "suffix. Example: manage.py import_openai_job job.json train.jsonl --model bundled"
    )

    def work(self, options: Options) -> Result:
        try:
            job = _imported(options)
        except OSError as error:
            raise CommandError(f"{error.filename} cannot be read: {error.strerror}") from error
        except ValidationError as error:
            faults = "; ".join(f"{name}: {fault}" for name, fault in faults_of(error).items())
            raise CommandError(f"{options.job}: {faults}") from error
        except FineTuningRefused as refusal:
            raise CommandError(str(refusal)) from refusal
        return {"job": job.name, "run": job.run.pk, "model": job.tuned_model}


def _imported(options: Options) -> FineTuningJob:
    told = _job_read(options.job)
    settings = _settings_of(told)
    if options.agent:
        settings.metadata[AGENT] = options.agent
    stored: list[TrainingFile] = []
    try:
        for path in filter(None, (options.training, options.validation)):
            with path.open("rb") as file:
                stored.append(file_store(file, path.name, actor=ACTOR))
        training, validation = [*stored, None][:2]
        assert training is not None  # the first file is always given
        order = settings.order(options.model or str(told.get("model", "")), training, validation)
        return job_create(order, actor=ACTOR)
    except (FineTuningRefused, OSError):
        for kept in stored:
            file_delete(kept)
        raise


def _job_read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: expected a fine-tuning job as JSON: {error}") from error
    if not isinstance(told, dict):
        raise CommandError(f"{path}: expected a fine-tuning job, found {type(told).__name__}")
    return told


def _settings_of(told: dict[str, Any]) -> JobSettings:
    """The settings among the fields of a job. Its suffix stands in its model's name alone."""
    wanted = {name: told[name] for name in ("method", "seed", "metadata") if told.get(name)}
    if "method" not in wanted and told.get("hyperparameters"):
        wanted["hyperparameters"] = told["hyperparameters"]
    model = str(told.get("fine_tuned_model") or "")
    if is_tuned_name(model):
        wanted["suffix"] = model.split(":")[TUNED_PARTS - 2]
    return JobSettings.model_validate(wanted)
