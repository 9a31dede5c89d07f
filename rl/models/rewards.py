"""Rewards of decisions, agents' reward settings, and registered reward models."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from feedback.selectors import SLUG_PATTERN
from rl.agents.base import HORIZONS, RewardFacts
from rl.models.runs import TrainingRun
from rl.recipes import DATASET_CONFIG
from rl.rewards.catalogue import RewardRefused, reward_named
from rl.rewards.horizons import outcomes_parsed, weights_checked

agent_slug = RegexValidator(SLUG_PATTERN)
WEIGHTS = RewardFacts().weights
REWARD_THRESHOLD = DATASET_CONFIG["reward_threshold"]


def _range_condition(name: str, low: float, high: float) -> Q:
    return Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__gte": low, f"{name}__lte": high})


class RewardRecord(models.Model):
    """Reward of a decision by what was known then. Never changed: a later calculation supersedes it.

    Only the id of the decision is stored, as `feedback` erases units without knowing of rewards.
    """

    decision = models.UUIDField(help_text="Id of the decision")
    agent = models.CharField(max_length=64)
    raw = models.FloatField(null=True, help_text="In [-2, 2]; empty without any evidence")
    value = models.FloatField(null=True, help_text="The same in [0, 1]")
    immediate = models.FloatField(null=True, help_text="What was known at once, in [-2, 2]")
    delayed = models.FloatField(null=True, help_text="What people and the app said later, in [-2, 2]")
    strategic = models.FloatField(null=True, help_text="What it led to, in [-2, 2]")
    components = models.JSONField(help_text="Each horizon with its weight and its parts")
    simulated = models.BooleanField(default=False, help_text="True if simulated ratings are part of it")
    measured = models.BooleanField(
        default=False,
        help_text="True if an outcome, a trace or a configured reward function is part of it",
    )
    rows_said = models.PositiveIntegerField(
        help_text="Rows of feedback on the decision that it was made from"
    )
    basis = models.CharField(max_length=64, help_text="SHA-256 of its numbers")
    supersedes = models.OneToOneField(
        "self", null=True, blank=True, on_delete=models.PROTECT, related_name="superseded_by"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["decision", "-id"]), models.Index(fields=["agent", "raw"])]
        constraints = [
            # with the one-to-one `supersedes`, one chain per decision: two concurrent calculations add one row
            models.UniqueConstraint(
                fields=["decision"],
                condition=Q(supersedes__isnull=True),
                name="reward_one_first_per_decision",
            ),
            models.CheckConstraint(condition=_range_condition("value", 0.0, 1.0), name="reward_value_in_0_1"),
            *(
                models.CheckConstraint(
                    condition=_range_condition(name, -2.0, 2.0), name=f"reward_{name}_in_2_2"
                )
                for name in ("raw", *HORIZONS)
            ),
        ]

    def __str__(self) -> str:
        return (
            f"{self.agent} {str(self.decision)[:8]}: {'nothing' if self.raw is None else f'{self.raw:+.2f}'}"
        )


class RewardSettings(models.Model):
    """Reward settings of one agent. Without a row: those of its file."""

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    immediate_weight = models.FloatField(default=WEIGHTS["immediate"], help_text="What is known at once")
    delayed_weight = models.FloatField(default=WEIGHTS["delayed"], help_text="Ratings, comparisons, outcomes")
    strategic_weight = models.FloatField(
        default=WEIGHTS["strategic"], help_text="Tasks of the trace, strategic outcomes"
    )
    threshold = models.FloatField(
        default=REWARD_THRESHOLD,
        help_text="Reward in [0, 1] from which a response that nobody rated is a good one; below it is a bad one",
    )
    functions = models.JSONField(
        default=dict,
        blank=True,
        help_text='Reward functions that speak at once, with weights: {"agent": 1, "efficiency": 0.5}; '
        "empty: the agent's own",
    )
    outcomes = models.JSONField(
        default=dict,
        blank=True,
        help_text='What outcomes say: {"ticket_reopened": {"good": 0, "bad": 1, "horizon": "delayed"}}; '
        "added to the agent's own",
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "reward settings"
        constraints = [
            models.CheckConstraint(
                condition=Q(threshold__gt=0.0, threshold__lt=1.0), name="reward_threshold_within_0_1"
            ),
        ]

    def __str__(self) -> str:
        return self.agent

    @property
    def weights(self) -> dict[str, float]:
        return {name: getattr(self, f"{name}_weight") for name in HORIZONS}

    def clean(self) -> None:
        faults: dict[str, object] = {}
        try:
            if not any(weights_checked(self.weights).values()):
                faults["delayed_weight"] = "at least one of the weights must be above 0"
        except ValueError as error:
            faults["delayed_weight"] = str(error)
        try:
            outcomes_parsed(self.outcomes)
        except ValueError as error:
            faults["outcomes"] = str(error)
        if not 0 < self.threshold < 1:
            faults["threshold"] = f"expected a number between 0 and 1, found {self.threshold:g}"
        if not isinstance(self.functions, dict):
            faults["functions"] = 'expected {"name": weight}'
        else:
            for name, weight in self.functions.items():
                try:
                    reward_named(str(name), code_execution=True)
                    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not weight > 0:
                        raise RewardRefused(f"the weight of {name} must be above 0, found {weight!r}")
                except RewardRefused as error:
                    faults["functions"] = str(error)
        if faults:
            raise ValidationError(faults)


class RewardModelVersion(models.Model):
    """A reward model of an agent, named `<agent>-rm-v<feedback count>`."""

    name = models.CharField(max_length=200, unique=True)
    agent = models.CharField(max_length=64)
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
        indexes = [models.Index(fields=["agent"])]

    def __str__(self) -> str:
        return self.name
