"""On which side of the split each prompt stands: written down when it is first seen, never changed."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class PromptSplit(models.Model):
    """One prompt's side. The hash is of agent and messages, so it names the prompt alone; nothing of it can be read."""

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
