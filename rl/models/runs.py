"""Immutable snapshots, training runs with their metrics, the split of prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils import timezone

from rl.recipes.base import Method
from rl.recipes.methods import method_named

TRAINING = "training"
"""Phase of a run in which steps are made."""

LEARNER = "online learner"
"""Author of runs that the online learner started."""


def method_title(slug: str) -> str:
    """A training method's name as people write it: DPO, Reward model."""
    words = slug.replace("_", " ")
    return words.capitalize() if words != slug or slug == "linear" else slug.upper()


class HistoryRow(models.Model):
    """What happened to something, when and why. Append-only."""

    class Meta:
        abstract = True

    def save(self, *args: object, **kwargs: Any) -> None:
        if self.pk is not None:
            raise ValidationError("An event is history: it is never changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: object, **kwargs: object) -> tuple[int, dict[str, int]]:
        raise ValidationError("An event is history: it is never deleted.")


class Snapshot(models.Model):
    """An immutable dataset file with its hash, counts and query."""

    class Kind(models.TextChoices):
        PAIRS = "pairs", "preference pairs"
        LABELS = "labels", "good and bad responses"
        SCORES = "scores", "scored responses"
        CORRECTIONS = "corrections", "demonstrations"
        PROMPTS = "prompts", "prompts"
        PAIRS_AND_SCORES = "pairs_and_scores", "preference pairs and scored responses"

    agent = models.CharField(max_length=64)
    kind = models.CharField(max_length=16, choices=Kind)
    path = models.CharField(max_length=500, help_text="Relative to RATCHET_HOME")
    sha256 = models.CharField(max_length=64)
    counts = models.JSONField(default=dict, help_text="Rows per split")
    sources = models.JSONField(default=dict, help_text="Rows per kind of evidence")
    left_out = models.JSONField(default=dict, help_text="What was left out: {reason: count}")
    query = models.JSONField(
        default=dict, help_text="What was asked: agent, source, margins, caps, newest feedback seen"
    )
    feedback_count = models.PositiveIntegerField(help_text="Ratings and comparisons that it was made from")
    simulated_share = models.FloatField(
        default=0.0, help_text="Share of that feedback given by a simulated rater, 0 to 1"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "-id"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(simulated_share__gte=0.0, simulated_share__lte=1.0),
                name="snapshot_simulated_share_in_0_1",
            ),
        ]

    def __str__(self) -> str:
        return f"snapshot {self.pk}: {self.agent}, {sum(self.counts.values())} {self.kind}"


class TrainingRun(models.Model):
    """One training job: all that is needed to repeat it, and its figures."""

    class Status(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        REFUSED = "refused"
        CANCELLED = "cancelled"

    class FollowUp(models.TextChoices):
        WANTED = "wanted"
        DONE = "done"
        JUDGE = "judge", "evaluate it; a person promotes it"
        EXPORT = "export", "export its files"
        FAILED = "failed"

    RESUMABLE = (Status.RUNNING, Status.FAILED, Status.CANCELLED)
    FOLLOW_UP_PENDING = (FollowUp.WANTED, FollowUp.JUDGE, FollowUp.EXPORT)

    agent = models.CharField(max_length=64)
    method = models.CharField(max_length=32)
    status = models.CharField(max_length=16, choices=Status, default=Status.QUEUED)
    reason = models.TextField(blank=True, help_text="Why it was refused, failed or cancelled")
    next_step = models.TextField(
        blank=True,
        default="",
        db_default="",
        help_text="What to do about the reason; pages have a button for it",
    )
    snapshot = models.ForeignKey(
        Snapshot, null=True, blank=True, on_delete=models.PROTECT, related_name="runs"
    )
    feedback_count = models.PositiveIntegerField(
        default=0,
        help_text="Ratings, comparisons, outcomes, traces and demonstrations that its training rows are of",
    )
    base_model = models.CharField(max_length=500)
    base_model_hash = models.CharField(max_length=100, blank=True)
    config = models.CharField(max_length=32, blank=True, help_text="Preset the recipe started from")
    recipe = models.JSONField(default=dict)
    seed = models.PositiveBigIntegerField(default=42)
    code_version = models.CharField(max_length=64, blank=True)
    libraries = models.JSONField(default=dict)
    hardware = models.JSONField(default=dict)
    output = models.CharField(
        max_length=500, blank=True, help_text="Folder, relative to RATCHET_HOME where inside it"
    )
    data_file = models.CharField(
        max_length=500,
        blank=True,
        default="",
        db_default="",
        help_text="File it reads, relative to RATCHET_HOME; empty: recorded feedback, or a command's file",
    )
    validation_file = models.CharField(
        max_length=500,
        blank=True,
        default="",
        db_default="",
        help_text="File whose prompts are held out; empty: none",
    )
    steps_total = models.PositiveIntegerField(default=0)
    steps_done = models.PositiveIntegerField(default=0)
    phase = models.CharField(max_length=200, blank=True, help_text="What its process does now, in words")
    phase_at = models.DateTimeField(null=True, blank=True, help_text="When that began")
    asked_by = models.CharField(
        max_length=200, blank=True, help_text="A person, a key, a command or the learner"
    )
    worker = models.CharField(max_length=200, blank=True, help_text="host:pid that claimed it")
    attempts = models.PositiveSmallIntegerField(default=0, help_text="Times a worker took it")
    cancel_requested = models.BooleanField(default=False)
    dispatched_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was last handed to the workers"
    )
    follow_up = models.CharField(
        max_length=16,
        choices=FollowUp,
        blank=True,
        help_text="Judging, promoting, exporting, deploying its policy",
    )
    export_as = models.CharField(
        max_length=64,
        blank=True,
        default="",
        help_text="Form its policy is to be exported in (`gguf:q8_0`, `onnx`, `ollama`); empty: the usual one",
    )
    compare = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Opponent of an evaluation: `incumbent`, `base` or a policy; empty: the one the gate asks for",
    )
    follow_ups = models.PositiveSmallIntegerField(default=0, help_text="Times that was begun")
    stage_of = models.ForeignKey(
        "self",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="stages",
        help_text="The run that needed this one first: its reward model was trained here",
    )
    result = models.JSONField(
        default=dict, help_text="Final figures, without the histories (those are in result.json)"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, blank=True)
    heartbeat_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "-id"]), models.Index(fields=["status"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=["queued", "running", "succeeded", "failed", "refused", "cancelled"]),
                name="run_status_known",
            ),
            models.CheckConstraint(
                condition=Q(status__in=["queued", "running"]) | Q(finished_at__isnull=False),
                name="run_ended_has_end",
            ),
            # two schedulers at once, on two machines, must not both start the agent's retraining
            models.UniqueConstraint(
                fields=["agent"],
                condition=Q(asked_by="online learner", status__in=["queued", "running"]),
                name="run_one_learner_per_agent",
            ),
        ]

    def __str__(self) -> str:
        return f"run {self.pk}: {self.method} for {self.agent}, {self.status}"

    @property
    def definition(self) -> Method:
        """The method itself. Raises RecipeError where a plugin's method is installed no more."""
        return method_named(self.method)

    @property
    def seconds(self) -> float | None:
        if self.started_at is None:
            return None
        return ((self.finished_at or timezone.now()) - self.started_at).total_seconds()

    @property
    def is_unfinished(self) -> bool:
        """True if it is at work, or waits for a worker."""
        return self.status in (self.Status.QUEUED, self.Status.RUNNING)

    @property
    def reason_and_step(self) -> str:
        """The reason, and what to do about it."""
        return f"{self.reason}: {self.next_step}" if self.next_step else self.reason

    @property
    def is_resumable(self) -> bool:
        """True if a person can hand it to the workers again. A stage is resumed by the run that needs it."""
        return self.status in (self.Status.FAILED, self.Status.CANCELLED) and self.stage_of_id is None

    @property
    def is_followed(self) -> bool:
        """True if its policy still waits to be judged or exported, or that is being done."""
        return self.status == self.Status.SUCCEEDED and self.follow_up in self.FOLLOW_UP_PENDING

    @property
    def method_reason(self) -> str:
        """Why `auto` took the method; empty if it was named."""
        why = str(self.result.get("why", ""))
        return why.partition(": ")[2] if why.startswith("auto took ") else ""

    @property
    def kept_run(self) -> TrainingRun:
        """The run whose policy is kept: this one, or its stage whose policy was better on the eval split."""
        kept = self.result.get("kept_run", self.pk)
        return self if kept == self.pk else self.stages.get(pk=kept)

    @property
    def phase_words(self) -> str:
        """The phase with its steps; empty between phases."""
        steps = self.phase.endswith(TRAINING) and self.steps_total
        return f"{self.phase}, step {self.steps_done} of {self.steps_total}" if steps else self.phase


class RunMetric(models.Model):
    """Figures of one optimiser step."""

    run = models.ForeignKey(TrainingRun, on_delete=models.CASCADE, related_name="metrics")
    step = models.PositiveIntegerField()
    values = models.JSONField(
        help_text="loss, rewards/accuracies, rewards/margins, kl, learning_rate, tokens_per_second"
    )
    at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["run", "step"]
        constraints = [models.UniqueConstraint(fields=["run", "step"], name="metric_once_per_step")]

    def __str__(self) -> str:
        return f"run {self.run_id} step {self.step}"


class RunRefused(ValueError):
    """A run cannot start, resume or be found; the message says why and what to do."""

    code = "conflict"


def run_folder(run: TrainingRun) -> Path:
    """Folder of a run's checkpoints, log and result, inside RATCHET_HOME."""
    return settings.RATCHET_HOME / "runs" / str(run.pk)


class PromptSplit(models.Model):
    """The split of one prompt, fixed when it is first seen. The hash is of agent and messages."""

    class Split(models.TextChoices):
        TRAIN = "train"
        EVAL = "eval"
        HOLDOUT = "holdout"

    prompt_hash = models.CharField(primary_key=True, max_length=64)
    agent = models.CharField(max_length=64)
    split = models.CharField(max_length=8, choices=Split)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        indexes = [models.Index(fields=["agent", "split"], name="prompt_split_by_agent")]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(split__in=["train", "eval", "holdout"]), name="prompt_split_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.prompt_hash[:8]}: {self.split}"
