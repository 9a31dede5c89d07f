"""Table of an agent's serving settings: temperatures, and the share of exploration."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

from feedback.selectors import SLUG_PATTERN

agent_slug = RegexValidator(SLUG_PATTERN)

IN_PROCESS = "in-process"
"""Name of the backend that answers with llama.cpp in the web process itself."""


class ServingSettings(models.Model):
    """Serving settings of an agent where a request does not say; without a row, the defaults here."""

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
