"""Evidence on policies beyond evaluations: judging rounds and benchmark results.

A judging round is a blind side-by-side comparison of a policy's generated answers with its opponent's.
"""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.utils import timezone

from rl.models.policies import Policy
from rl.statistics.assignment import BASE
from rl.statistics.sequential import BETTER, NOT_WORSE, OPEN, WORSE


class JudgingRound(models.Model):
    """A policy against an opponent on random prompts that neither was trained on."""

    class Status(models.TextChoices):
        WAITING = "waiting", "waits for a worker"
        ANSWERING = "answering", "answers are generated"
        RUNNING = "running"
        ENDED = "ended"
        FAILED = "failed"

    class Verdict(models.TextChoices):
        BETTER = BETTER, "better"
        NOT_WORSE = NOT_WORSE, "not worse by more than the margin"
        WORSE = WORSE, "worse"
        OPEN = OPEN, "open"

    agent = models.CharField(max_length=64)
    policy = models.ForeignKey(Policy, on_delete=models.PROTECT, related_name="judging_rounds")
    opponent = models.ForeignKey(
        Policy,
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="judging_rounds_against",
        help_text="Empty: the base model",
    )
    status = models.CharField(max_length=12, choices=Status, default=Status.WAITING)
    prompts = models.PositiveIntegerField(help_text="Prompts, at most")
    raters = models.PositiveSmallIntegerField(default=1, help_text="Judgements that each prompt needs")
    margin = models.FloatField(
        default=0.1, help_text="Loss of win share below one half that counts as not worse, in [0, 0.5)"
    )
    attempt = models.PositiveIntegerField(help_text="Number of the round against this opponent, from 1")
    alpha = models.FloatField(help_text="Probability that a policy no better is called better")
    verdict = models.CharField(max_length=12, choices=Verdict, blank=True, help_text="Empty until it ended")
    result = models.JSONField(
        default=dict, blank=True, help_text="Counts and interval at the end; answers may be erased later"
    )
    reason = models.TextField(blank=True, help_text="Why it failed, was stopped, or has fewer prompts")
    created_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["agent", "status"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(raters__gte=1) & Q(prompts__gte=1), name="judging_has_prompts"
            ),
            models.CheckConstraint(
                condition=Q(margin__gte=0) & Q(margin__lt=0.5), name="judging_margin_known"
            ),
            models.CheckConstraint(
                condition=~Q(status="ended") | ~Q(verdict=""), name="judging_end_has_verdict"
            ),
        ]

    def __str__(self) -> str:
        return f"judging round {self.pk} of {self.policy}"

    @property
    def opponent_name(self) -> str:
        return self.opponent.name if self.opponent is not None else BASE

    @property
    def is_open(self) -> bool:
        """True while its pairs can be judged."""
        return self.status in (self.Status.ANSWERING, self.Status.RUNNING)


class JudgedPair(models.Model):
    """Both answers to one prompt. The prompt is in the decision it was taken from."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    round = models.ForeignKey(JudgingRound, on_delete=models.CASCADE, related_name="pairs")
    decision = models.UUIDField(help_text="The recorded decision whose prompt was asked")
    answer = models.TextField(help_text="The policy's")
    other_answer = models.TextField(help_text="The opponent's")
    same = models.BooleanField(help_text="Both answers do the same: a tie that nobody is asked about")

    class Meta:
        ordering = ["round", "id"]
        constraints = [
            models.UniqueConstraint(fields=["round", "decision"], name="judged_pair_once_per_decision")
        ]

    def __str__(self) -> str:
        return f"pair of round {self.round_id}"


class PairJudgement(models.Model):
    """One rater's judgement of a pair. Evidence only: no training reads it."""

    class Preference(models.TextChoices):
        POLICY = "policy"
        OPPONENT = "opponent"
        TIE = "tie"
        BOTH_BAD = "both_bad", "both bad"

    pair = models.ForeignKey(JudgedPair, on_delete=models.CASCADE, related_name="judgements")
    rater = models.CharField(max_length=200)
    preference = models.CharField(max_length=8, choices=Preference)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["pair", "rater"], name="judgement_once_per_rater")]

    def __str__(self) -> str:
        return f"{self.rater}: {self.preference}"


class BenchmarkResult(models.Model):
    """A policy and its base on the same items of a task, all figures in [0, 1]. The newest per policy
    and task counts."""

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
