"""Registered reward models: versions with their ranking of held-out feedback, their stage and their history."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import Q
from django.utils import timezone

from rl.models.runs import TrainingRun


class RewardModelVersion(models.Model):
    """A reward model of an agent, named `<agent>-rm-v<feedback count>`."""

    class Stage(models.TextChoices):
        CANDIDATE = "candidate"
        CHAMPION = "champion"
        RETIRED = "retired"
        REJECTED = "rejected"

    name = models.CharField(max_length=200, unique=True)
    agent = models.CharField(max_length=64)
    stage = models.CharField(max_length=16, choices=Stage, default=Stage.CANDIDATE)
    run = models.OneToOneField(
        TrainingRun, null=True, blank=True, on_delete=models.PROTECT, related_name="reward_model"
    )
    base_model = models.CharField(max_length=500)
    base_model_hash = models.CharField(max_length=100, blank=True)
    path = models.CharField(max_length=500, help_text="Folder, relative to RATCHET_HOME where inside it")
    sha256 = models.CharField(max_length=64, help_text="Of its file of weights")
    objective = models.CharField(max_length=16, help_text="pairwise, regression or binary")
    architecture = models.CharField(max_length=16, default="causal")
    feedback_count = models.PositiveIntegerField(help_text="Ratings and comparisons it was trained from")
    ranking = models.JSONField(
        default=dict,
        help_text="Share of held-out feedback ranked as people did, with its 95 % interval and what was ranked",
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["agent", "-id"]
        verbose_name = "reward model"
        indexes = [models.Index(fields=["agent", "stage"])]
        constraints = [
            models.UniqueConstraint(
                fields=["agent"], condition=Q(stage="champion"), name="reward_model_one_champion_per_agent"
            ),
            models.CheckConstraint(
                condition=Q(stage__in=["candidate", "champion", "retired", "rejected"]),
                name="reward_model_stage_known",
            ),
        ]

    def __str__(self) -> str:
        return self.name


class RewardModelEvent(models.Model):
    """Event of a reward model: who registered, judged or moved it, when, why, by which figures. Append-only."""

    class Kind(models.TextChoices):
        REGISTERED = "registered"
        EVALUATED = "evaluated"
        PROMOTED = "promoted"
        REFUSED = "refused", "not promoted"
        RETIRED = "retired"
        REJECTED = "rejected"

    reward_model = models.ForeignKey(RewardModelVersion, on_delete=models.PROTECT, related_name="events")
    kind = models.CharField(max_length=16, choices=Kind)
    from_stage = models.CharField(max_length=16, blank=True)
    to_stage = models.CharField(max_length=16, blank=True)
    actor = models.CharField(max_length=200, help_text="A user's name, or the command or job")
    reason = models.TextField(blank=True)
    forced = models.BooleanField(default=False)
    figures = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        constraints = [
            models.CheckConstraint(
                condition=Q(forced=False) | ~Q(reason=""), name="reward_model_event_forced_has_reason"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.reward_model}: {self.kind}"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self.pk is not None:
            raise ValidationError("A reward model's event is history: it is never changed.")
        super().save(*args, **kwargs)

    def delete(self, *args: Any, **kwargs: Any) -> tuple[int, dict[str, int]]:
        raise ValidationError("A reward model's event is history: it is never deleted.")
