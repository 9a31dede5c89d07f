"""Benchmark results: a policy and its base on the same items of a task, kept per item."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone

from rl.models.policies import Policy


class BenchmarkResult(models.Model):
    """One task's figures of a policy beside its base's, all in [0, 1]. The newest of a policy and task counts."""

    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="benchmarks")
    task = models.CharField(max_length=100, help_text="Name of the task")
    task_version = models.CharField(max_length=50, blank=True)
    task_sha256 = models.CharField(
        max_length=64, blank=True, help_text="Of the task's files; empty for a task of the hub"
    )
    source = models.CharField(max_length=500, help_text="`bundled`, `hub`, or the path of the task's folder")
    harness = models.CharField(max_length=50, help_text="Program that asked and scored, with its version")
    metric = models.CharField(max_length=100)
    fewshot = models.PositiveSmallIntegerField(default=0, help_text="Solved examples before each item")
    chat_template = models.BooleanField(help_text="Whether items were asked as chat messages")
    items_limit = models.PositiveIntegerField(
        null=True, blank=True, help_text="First items of the task alone; empty: all"
    )
    n = models.PositiveIntegerField(help_text="Items that both sides answered")
    figures = models.JSONField(
        help_text="own, base: value and standard error; difference: value with its 95 % interval and p"
    )
    items = models.JSONField(help_text="Per item its hash, and the scores of policy and base")
    base_model_hash = models.CharField(max_length=100)
    seconds = models.FloatField()
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["policy", "task", "-id"])]
        constraints = [models.CheckConstraint(condition=Q(n__gte=1), name="benchmark_has_items")]

    def __str__(self) -> str:
        return f"{self.task} of {self.policy}"
