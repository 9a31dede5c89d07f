"""Table of auto-labeller runs: what each learnt, its calibration, and where its model lies."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class LabelRun(models.Model):
    """One label model of an agent, trained on ratings by people."""

    agent = models.CharField(max_length=64)
    base_model = models.CharField(max_length=500, help_text="Whose embeddings it reads")
    path = models.CharField(max_length=500, help_text="Folder of the model, relative to RATCHET_HOME")
    features = models.JSONField(default=list, help_text="What suggestions are made from")
    left_out = models.JSONField(default=dict, help_text="Features that were not used, and why")
    ratings = models.PositiveIntegerField(help_text="Ratings by people that it learnt from")
    suggested = models.PositiveIntegerField(default=0, help_text="Decisions it suggested a rating for")
    figures = models.JSONField(
        default=dict, help_text="Accuracy, Brier score, calibration, on folds left out"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "-id"])]

    def __str__(self) -> str:
        return f"{self.agent}-labels-{self.pk}"
