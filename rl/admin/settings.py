"""The admin of what an operator sets per agent: learning, serving, gate, rewards, and agents without code."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Field
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from backend.installation import as_typed
from rl.base_models.service import base_model_resolve
from rl.base_models.sources import SourceRefused
from rl.models import (
    AgentBase,
    AgentDefinition,
    GateSettings,
    LearnerSettings,
    RewardSettings,
    ServingSettings,
)


@admin.register(LearnerSettings)
class LearnerSettingsAdmin(ModelAdmin):
    """Learner settings of an agent: an operator may change them at any time."""

    list_display = ["agent", "enabled", "min_samples_to_retrain", "retrain_interval_hours", "method", "gate"]
    search_fields = ["agent"]


class AgentBaseForm(forms.ModelForm):
    """Refuses a text that names no base model."""

    class Meta:
        model = AgentBase
        fields = ["agent", "base_model"]

    def clean_base_model(self) -> str:
        try:
            return base_model_resolve(self.cleaned_data["base_model"]).name
        except SourceRefused as refusal:
            raise forms.ValidationError(str(refusal)) from refusal


@admin.register(AgentBase)
class AgentBaseAdmin(ModelAdmin):
    """The base model of an agent."""

    form = AgentBaseForm
    list_display = ["agent", "base_model"]
    search_fields = ["agent", "base_model"]


@admin.register(ServingSettings)
class ServingSettingsAdmin(ModelAdmin):
    """Serving settings of an agent: how it answers, and how much it tries out."""

    list_display = ["agent", "choose_temperature", "epsilon", "temperature", "max_tokens", "fallbacks"]
    search_fields = ["agent"]


@admin.register(GateSettings)
class GateSettingsAdmin(ModelAdmin):
    """The bounds of an agent's gate."""

    list_display = ["agent", "min_evidence", "alpha", "margin", "max_slice_loss", "max_kl"]
    search_fields = ["agent"]

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest, **kwargs: Any) -> Any:
        """The field of a form. Its help names a command, and a migration holds the help as it is in a checkout."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            field.help_text = as_typed(field.help_text)
        return field


@admin.register(RewardSettings)
class RewardSettingsAdmin(ModelAdmin):
    """Reward settings of an agent's decisions."""

    list_display = ["agent", "immediate_weight", "delayed_weight", "strategic_weight"]
    search_fields = ["agent"]


@admin.register(AgentDefinition)
class AgentDefinitionAdmin(ModelAdmin):
    """Agents that need no code."""

    list_display = ["slug", "title", "description"]
    search_fields = ["slug", "title"]
