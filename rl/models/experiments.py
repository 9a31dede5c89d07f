"""Live experiments: an agent's traffic split between policies, and the history of changes."""

from __future__ import annotations

import math
import secrets

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from feedback.selectors import SLUG_PATTERN
from rl.models.runs import HistoryRow
from rl.recipes.experiment_metrics import GUARDRAILS, MetricError, guardrails_checked, metric_of
from rl.statistics.assignment import BASE, RAMP

experiment_slug = RegexValidator(
    SLUG_PATTERN, "A name is a slug of 1 to 64 lower-case letters, digits, - and _, such as shorter-answers."
)


def salt_new() -> str:
    return secrets.token_hex(16)


def guardrails_default() -> list[dict[str, object]]:
    return [dict(guardrail) for guardrail in GUARDRAILS]


class Experiment(models.Model):
    """A split of an agent's units between policies, and the rule by which it ends."""

    class Status(models.TextChoices):
        DRAFT = "draft"
        RUNNING = "running"
        STOPPED = "stopped"

    class Allocation(models.TextChoices):
        FIXED = "fixed", "fixed weights"
        THOMPSON = "thompson", "bandit: adaptive split (Thompson sampling)"

    class OnWin(models.TextChoices):
        PROPOSE = "propose", "propose the promotion; a person decides"
        PROMOTE = "promote", "promote it, if it passes the gate"

    name = models.CharField(max_length=64, unique=True, validators=[experiment_slug])
    agent = models.CharField(max_length=64, validators=[experiment_slug])
    hypothesis = models.TextField(blank=True, help_text="Hypothesis: what is expected, and why")
    status = models.CharField(max_length=8, choices=Status, default=Status.DRAFT)
    salt = models.CharField(max_length=64, default=salt_new, editable=False)
    ramp = models.PositiveSmallIntegerField(
        default=RAMP[0],
        choices=[(step, f"{step} %") for step in RAMP],
        help_text="Percent of units that take part",
    )
    allocation = models.CharField(max_length=8, choices=Allocation, default=Allocation.FIXED)
    epoch = models.PositiveIntegerField(default=0, editable=False, help_text="Times a bandit was reweighted")
    floor = models.FloatField(default=0.05, help_text="Minimum share of each arm of a bandit, above 0")
    group = models.CharField(
        max_length=64,
        blank=True,
        validators=[experiment_slug],
        help_text="Exclusion group: its experiments share no unit",
    )
    group_reserve = models.PositiveSmallIntegerField(
        default=50,
        choices=[(step, f"{step} %") for step in RAMP],
        help_text="Percent of its group's units reserved for it",
    )
    group_start = models.FloatField(
        default=0.0, editable=False, help_text="Start of its reserved part, percent of the group's units"
    )
    metric = models.CharField(max_length=80, default="thumbs_up")
    goal = models.CharField(
        max_length=8, choices=[("higher", "higher is better"), ("lower", "lower is better")], default="higher"
    )
    alpha = models.FloatField(
        default=0.05, help_text="Probability of a false alarm, over all looks (confidence sequences)"
    )
    tuning = models.PositiveIntegerField(
        default=1000, help_text="Number of units at which the intervals are tightest"
    )
    min_units = models.PositiveIntegerField(
        default=50, help_text="Units per arm before a verdict is acted on"
    )
    not_inferior = models.FloatField(
        default=0.0,
        db_default=0.0,
        help_text="Loss of the metric that must be ruled out, in its unit; a gain is not asked for then. 0: a gain "
        "is asked for",
    )
    shadow = models.PositiveSmallIntegerField(
        default=0,
        db_default=0,
        validators=[MaxValueValidator(100)],
        help_text="Percent of decisions that the challenger answers beside the answer a user gets; 0: users are split",
    )
    shadow_budget_usd = models.FloatField(
        null=True,
        blank=True,
        validators=[MinValueValidator(0.0)],
        help_text="US dollars for all shadow answers, which stop then; empty: no limit",
    )
    shadow_until = models.DateTimeField(null=True, blank=True, editable=False, help_text="A worker's lease")
    shadow_busy = models.PositiveSmallIntegerField(
        default=0, db_default=0, editable=False, help_text="Looks in a row at which the machine was too busy"
    )
    auto_ramp = models.BooleanField(
        default=False,
        db_default=False,
        help_text="The scheduler takes the share to 1, 5, 25 and 100 %; needs `not_inferior`",
    )
    guardrails = models.JSONField(default=guardrails_default, blank=True)
    slices = models.JSONField(default=list, blank=True, help_text="tag, source, or metadata.<key>")
    on_win = models.CharField(max_length=8, choices=OnWin, default=OnWin.PROPOSE)
    reason = models.TextField(blank=True, help_text="Why it was stopped")
    created_by = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    started_at = models.DateTimeField(null=True, blank=True, editable=False)
    ended_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["status", "agent"])]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=["draft", "running", "stopped"]), name="experiment_status_known"
            ),
            models.CheckConstraint(condition=Q(ramp__in=RAMP), name="experiment_ramp_known"),
            models.CheckConstraint(
                condition=Q(alpha__gt=0.0, alpha__lt=0.5), name="experiment_alpha_in_0_half"
            ),
            models.CheckConstraint(
                condition=Q(floor__gt=0.0, floor__lte=0.5), name="experiment_floor_in_0_half"
            ),
            models.CheckConstraint(
                condition=Q(tuning__gte=1, min_units__gte=2), name="experiment_counts_positive"
            ),
            # two concurrent starts must not both get the agent's units, or the same part of a group's
            models.UniqueConstraint(
                fields=["agent"],
                condition=Q(status="running", group=""),
                name="experiment_one_alone_per_agent",
            ),
            models.UniqueConstraint(
                fields=["group", "group_start"],
                condition=Q(status="running") & ~Q(group=""),
                name="experiment_one_per_place_in_group",
            ),
            models.CheckConstraint(
                condition=Q(status="draft") | Q(started_at__isnull=False), name="experiment_begun_has_start"
            ),
            models.CheckConstraint(
                condition=~Q(status="stopped") | Q(ended_at__isnull=False), name="experiment_stopped_has_end"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    def clean(self) -> None:
        try:
            metric_of(self.metric)
        except MetricError as error:
            raise ValidationError({"metric": str(error)}) from error
        try:
            self.guardrails = guardrails_checked(self.guardrails)
        except MetricError as error:
            raise ValidationError({"guardrails": str(error)}) from error
        if not 0 <= self.not_inferior < math.inf:
            raise ValidationError({"not_inferior": "expected a number of at least 0"})
        if self.auto_ramp and not self.not_inferior:
            raise ValidationError({"not_inferior": "expected the loss that a ramp rules out, such as 0.05"})
        given: object = self.slices
        if not isinstance(given, list) or not all(
            isinstance(name, str) and (name in ("tag", "source") or name.startswith("metadata."))
            for name in given
        ):
            raise ValidationError({"slices": 'expected a list of "tag", "source" or "metadata.<key>"'})


class Arm(models.Model):
    """One arm of an experiment: its policy, and its share of the units."""

    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="arms")
    name = models.CharField(max_length=64, validators=[experiment_slug])
    policy = models.ForeignKey(
        "rl.Policy",
        null=True,
        blank=True,
        on_delete=models.PROTECT,
        related_name="arms",
        help_text="Empty: the base model",
    )
    weight = models.FloatField(default=1.0, help_text="Its share, relative to the other arms' weights")
    is_control = models.BooleanField(
        default=False, help_text="Control: the arm that the others are compared with"
    )

    class Meta:
        ordering = ["-is_control", "id"]
        constraints = [
            models.UniqueConstraint(fields=["experiment", "name"], name="arm_once_per_name"),
            models.UniqueConstraint(
                fields=["experiment"], condition=Q(is_control=True), name="arm_one_control"
            ),
            models.CheckConstraint(condition=Q(weight__gt=0.0), name="arm_weight_positive"),
        ]

    def __str__(self) -> str:
        return self.key

    @property
    def key(self) -> str:
        """The arm's name in decisions."""
        return f"{self.experiment.name}/{self.name}"

    @property
    def policy_name(self) -> str:
        return self.policy.name if self.policy is not None else BASE


class ExperimentEvent(HistoryRow):
    """History of an experiment: who did what, when, why, with which figures. Append-only."""

    class Kind(models.TextChoices):
        CREATED = "created"
        STARTED = "started"
        RAMPED = "ramped"
        REWEIGHTED = "reweighted"
        MISMATCH = "mismatch", "sample ratio mismatch"
        HARM = "harm", "stopped for harm"
        PROPOSED = "proposed", "promotion proposed"
        PROMOTED = "promoted"
        HELD = "held", "promotion held back by the gate"
        STOPPED = "stopped"

    experiment = models.ForeignKey(Experiment, on_delete=models.CASCADE, related_name="events")
    kind = models.CharField(max_length=12, choices=Kind)
    actor = models.CharField(max_length=200, help_text="A user's name, a key, or the clock")
    reason = models.TextField(blank=True)
    figures = models.JSONField(default=dict, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.experiment}: {self.kind}"
