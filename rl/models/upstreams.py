"""Upstreams: the endpoints of providers that hosted policies answer with."""

from __future__ import annotations

from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Q

from feedback.selectors import SLUG_PATTERN


class Upstream(models.Model):
    """An endpoint that answers with language models: a provider's, or a server of the team's own.

    The API key stands in an environment variable (`key_env`), or encrypted in the database (`key_encrypted`), under a
    key kept outside it. It is never shown, logged or exported.
    """

    class Dialect(models.TextChoices):
        OPENAI = "openai", "OpenAI chat completions"
        RESPONSES = "responses", "OpenAI responses"
        ANTHROPIC = "anthropic", "Anthropic messages"

    class Schemas(models.TextChoices):
        JSON_SCHEMA = "json_schema", "JSON schema"
        JSON_OBJECT = "json_object", "JSON object without a schema"
        NONE = "none", "not at all"

    name = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    url = models.CharField(max_length=500, help_text="Base URL, such as https://api.openai.com/v1")
    model = models.CharField(max_length=200, help_text="The provider's model id, such as gpt-5-mini")
    dialect = models.CharField(max_length=16, choices=Dialect, default=Dialect.OPENAI)
    schemas = models.CharField(
        max_length=16,
        choices=Schemas,
        default=Schemas.JSON_SCHEMA,
        help_text="How the endpoint is told the form of an answer",
    )
    key_env = models.CharField(
        max_length=100, blank=True, help_text="Environment variable that holds the API key"
    )
    key_encrypted = models.TextField(blank=True, editable=False)
    timeout_s = models.FloatField(default=60.0, help_text="Seconds an answer may take")
    connect_timeout_s = models.FloatField(default=5.0, help_text="Seconds a connection may take")
    concurrency = models.PositiveIntegerField(default=128, help_text="Requests at once, at most, per process")
    context_tokens = models.PositiveIntegerField(
        null=True, blank=True, help_text="Prompt and answer together, in tokens; empty: unknown"
    )
    forward_fields = models.BooleanField(
        default=False, help_text="Send the request's `metadata` and `user` to the endpoint"
    )
    price_in = models.FloatField(
        null=True,
        blank=True,
        help_text="US dollars per million prompt tokens; empty: the bundled price table",
    )
    price_cached = models.FloatField(
        null=True, blank=True, help_text="US dollars per million prompt tokens that the provider had cached"
    )
    price_out = models.FloatField(null=True, blank=True, help_text="US dollars per million tokens answered")
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(
                condition=Q(dialect__in=["openai", "responses", "anthropic"]), name="upstream_dialect_known"
            ),
            models.CheckConstraint(
                condition=Q(timeout_s__gt=0) & Q(connect_timeout_s__gt=0), name="upstream_timeouts_positive"
            ),
            models.CheckConstraint(condition=Q(key_env="") | Q(key_encrypted=""), name="upstream_one_key"),
        ]

    def __str__(self) -> str:
        return self.name
