"""Agents without code, and base models of agents, as set in the admin."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models

from feedback.selectors import SLUG_PATTERN
from rl.agents import AGENTS
from rl.agents.template import TemplateAgent, places_of, schema_check


class AgentBase(models.Model):
    """The base model of an agent. Without a row: the base of its newest run, else RATCHET_BASE_MODEL."""

    agent = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    base_model = models.CharField(
        max_length=500,
        help_text="Its training begins here, and it answers before there is a champion: bundled, smollm2, a model "
        "that was added, a folder, a hub name, a GGUF file, ollama:NAME or package:NAME",
    )

    class Meta:
        ordering = ["agent"]
        verbose_name = "base model of an agent"
        verbose_name_plural = "base models"

    def __str__(self) -> str:
        return f"{self.agent}: {self.base_model}"


class AgentDefinition(models.Model):
    """An agent without code: a system prompt, a prompt template and a JSON schema of the answer."""

    slug = models.CharField(max_length=64, unique=True, validators=[RegexValidator(SLUG_PATTERN)])
    title = models.CharField(max_length=100)
    description = models.CharField(max_length=300, blank=True)
    system_prompt = models.TextField(blank=True)
    template = models.TextField(
        default="{question}",
        help_text="The prompt, with {name} for each value of the state: Ticket: {ticket}",
    )
    schema = models.JSONField(null=True, blank=True, help_text="JSON schema of the answer; empty: free text")
    suggested_tags = models.JSONField(default=list, blank=True, help_text='["too long", "wrong"]')
    max_new_tokens = models.PositiveIntegerField(default=128, help_text="Longest answer, in tokens")

    class Meta:
        ordering = ["slug"]
        verbose_name = "agent without code"
        verbose_name_plural = "agents without code"

    def __str__(self) -> str:
        return self.slug

    @property
    def agent(self) -> TemplateAgent:
        return TemplateAgent(
            slug=self.slug,
            title=self.title,
            description=self.description,
            system_prompt=self.system_prompt,
            template=self.template,
            schema=self.schema,
            suggested_tags=tuple(self.suggested_tags),
            max_new_tokens=self.max_new_tokens,
        )

    def clean(self) -> None:
        # forms end lines with CR LF, which would be in every prompt
        self.system_prompt = self.system_prompt.replace("\r\n", "\n")
        self.template = self.template.replace("\r\n", "\n")
        faults: dict[str, Any] = {}
        if self.slug in AGENTS:
            faults["slug"] = f"{self.slug} is an agent with a file of its own; choose another slug"
        if not places_of(self.template):
            faults["template"] = "expected at least one {name}, which takes a value of the state"
        if self.schema is not None:
            try:
                schema_check(self.schema)
            except ValueError as error:
                faults["schema"] = str(error)
        tags = self.suggested_tags
        if not isinstance(tags, list) or not all(isinstance(tag, str) and tag for tag in tags):
            faults["suggested_tags"] = 'expected a list of texts, such as ["too long"]'
        if not 1 <= (self.max_new_tokens or 0) <= 8192:
            faults["max_new_tokens"] = "expected 1 to 8192 tokens"
        if faults:
            raise ValidationError(faults)
