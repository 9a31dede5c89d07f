"""An agent's serving settings: temperatures, exploration, fallbacks."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

from feedback.selectors import SLUG_PATTERN
from rl.models.policies import Policy

agent_slug = RegexValidator(SLUG_PATTERN)

IN_PROCESS = "in-process"
"""Backend that answers with llama.cpp in the web process."""


class ServingSettings(models.Model):
    """Serving defaults of an agent for requests that do not set them."""

    agent = models.CharField(max_length=64, unique=True, validators=[agent_slug])
    choose_temperature = models.FloatField(
        default=0.0,
        help_text="Temperature of choosing among candidates: 0 takes the best, 1 samples by the policy's "
        "probabilities",
    )
    epsilon = models.FloatField(
        default=0.0, help_text="Share of choices among candidates sampled uniformly (exploration), 0 to 1"
    )
    temperature = models.FloatField(
        null=True,
        blank=True,
        help_text="Temperature of free-text answers, 0 to 2; empty: greedy in process, else the server's default",
    )
    max_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Most tokens of an answer; empty: the agent's own limit"
    )
    fallbacks = models.JSONField(
        default=list,
        blank=True,
        help_text="Policies that step in where the champion fails, in this order, such as "
        '["support-bot-v214", "base"]; empty: the base model, or nobody for a hosted champion',
    )

    class Meta:
        ordering = ["agent"]
        verbose_name_plural = "serving settings"
        constraints = [
            models.CheckConstraint(
                condition=Q(epsilon__gte=0.0, epsilon__lte=1.0), name="serving_epsilon_in_0_1"
            ),
            models.CheckConstraint(
                condition=Q(choose_temperature__gte=0.0)
                & (Q(temperature__isnull=True) | Q(temperature__gte=0.0, temperature__lte=2.0)),
                name="serving_temperature_not_negative",
            ),
        ]

    def __str__(self) -> str:
        return self.agent

    def clean(self) -> None:
        named = self.fallbacks
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise ValidationError(
                {"fallbacks": 'expected a list of names such as ["support-bot-v214", "base"]'}
            )
        able = Policy.objects.filter(agent=self.agent, name__in=named).exclude(kind=Policy.Kind.RECORDED)
        known = {*able.values_list("name", flat=True), "base"}
        if unknown := [name for name in named if name not in known]:
            expected = f"expected policies of agent {self.agent} that can be asked, or base"
            raise ValidationError({"fallbacks": f"{expected}; found {unknown[0]!r}"})
