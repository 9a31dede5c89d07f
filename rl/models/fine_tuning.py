"""Files and jobs of OpenAI's fine-tuning API. A job is a training run with the words it was asked in."""

from __future__ import annotations

import secrets
from pathlib import Path

from django.conf import settings
from django.db import models
from django.utils import timezone

from rl.models.policies import Policy
from rl.models.runs import TrainingRun

FOLDER = "training-files"
"""Folder of RATCHET_HOME with the uploaded files."""
GRADERS = "graders"
"""Folder of RATCHET_HOME with the graders of reinforcement jobs, named by their content."""
TUNED = "ft:"
"""Beginning of a fine-tuned model's name."""
TUNED_PARTS = 5
"""Parts of such a name: ft, base model, agent, suffix, number of the job."""


def file_name_new() -> str:
    return f"file-{secrets.token_hex(12)}"


def job_name_new() -> str:
    return f"ftjob-{secrets.token_hex(12)}"


class TrainingFile(models.Model):
    """A file that was uploaded to `/v1/files`: JSON lines to train or to validate on."""

    class Kind(models.TextChoices):
        CHAT = "chat", "conversations"
        PREFERENCE = "preference", "preferred and non-preferred outputs"
        PROMPT = "prompt", "prompts without an answer"

    name = models.CharField(max_length=40, unique=True, default=file_name_new, help_text="Its id, file-...")
    filename = models.CharField(max_length=255, help_text="Its name where it came from")
    kind = models.CharField(max_length=12, choices=Kind)
    rows = models.PositiveIntegerField(help_text="Examples in it")
    uploaded_by = models.CharField(max_length=200)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(kind__in=["chat", "preference", "prompt"]), name="training_file_kind_known"
            )
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def path(self) -> Path:
        return Path(settings.RATCHET_HOME) / self.stored_path

    @property
    def stored_path(self) -> str:
        """Path relative to RATCHET_HOME."""
        return f"{FOLDER}/{self.name}.jsonl"


class FineTuningJob(models.Model):
    """A training run that was asked for over `/v1/fine_tuning/jobs`. Its status and results are the run's."""

    name = models.CharField(max_length=40, unique=True, default=job_name_new, help_text="Its id, ftjob-...")
    run = models.OneToOneField(TrainingRun, on_delete=models.CASCADE, related_name="fine_tuning_job")
    model = models.CharField(max_length=500, help_text="The base model, as it was asked for")
    training_file = models.CharField(max_length=40, help_text="Id of the file; it may be deleted by now")
    validation_file = models.CharField(max_length=40, blank=True)
    suffix = models.CharField(max_length=64, blank=True)
    hyperparameters = models.JSONField(default=dict, help_text="As they were asked for")
    metadata = models.JSONField(default=dict)
    created_by = models.CharField(
        max_length=200, db_default="", help_text="Key that asked for it, such as key:3"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> str:
        """The id without its beginning."""
        return self.name.partition("-")[2]

    @property
    def tuned_model(self) -> str:
        """Name that the trained policy answers to: `ft:<base>:<agent>:<suffix>:<number>`."""
        base = self.run.base_model.rstrip("/").rpartition("/")[2].replace(":", "-")
        return f"{TUNED}{base}:{self.run.agent}:{self.suffix}:{self.key[:8]}"


def is_tuned_name(model: str) -> bool:
    """True for a fine-tuned model's name. An agent may be called `ft`: `ft:base` is not such a name."""
    return model.startswith(TUNED) and model.count(":") == TUNED_PARTS - 1


def job_of_model(model: str) -> FineTuningJob | None:
    """The job whose policy has this name, whatever became of it."""
    number = model.rpartition(":")[2]
    if not is_tuned_name(model) or not number.isalnum():
        return None
    jobs = FineTuningJob.objects.filter(name__startswith=f"ftjob-{number}").select_related("run")
    return next((job for job in jobs if job.tuned_model == model), None)


def policy_of_model(model: str) -> str:
    """The policy that answers to a fine-tuned model's name; empty where there is none."""
    job = job_of_model(model)
    policies = Policy.objects.filter(run=job.run) if job else Policy.objects.none()
    return policies.values_list("name", flat=True).first() or ""


def tuned_models() -> dict[str, str]:
    """Policy -> name of the fine-tuned model that it is."""
    jobs = FineTuningJob.objects.filter(run__policy__isnull=False).select_related("run__policy")
    return {job.run.policy.name: job.tuned_model for job in jobs}
