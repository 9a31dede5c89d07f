"""The admin of golden cases: prompt and responses are written as text, and taken over from a decision that was made."""

from __future__ import annotations

import uuid
from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from unfold.admin import ModelAdmin
from unfold.decorators import display
from unfold.widgets import UnfoldAdminTextareaWidget

from rl.admin.filters import ByAgent
from rl.evaluation.golden import golden_of, prompt_read, prompt_written, responses_read, responses_written
from rl.models import GoldenCase


class PromptField(forms.CharField):
    """Chat messages, or one question in plain words."""

    def prepare_value(self, value: Any) -> Any:
        return value if isinstance(value, str) or value is None else prompt_written(value)

    def to_python(self, value: Any) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        try:
            return prompt_read(text)
        except ValueError as error:
            raise forms.ValidationError(f"this is no JSON list of messages: {error}") from error


class ResponsesField(forms.CharField):
    """Several responses in one field."""

    def prepare_value(self, value: Any) -> Any:
        return responses_written(value) if isinstance(value, list) else value

    def to_python(self, value: Any) -> Any:
        return responses_read(super().to_python(value) or "")


def _lines(rows: int) -> UnfoldAdminTextareaWidget:
    return UnfoldAdminTextareaWidget(attrs={"rows": rows})


class GoldenCaseForm(forms.ModelForm):
    messages = PromptField(
        widget=_lines(4),
        label="Prompt",
        help_text='What is asked, in plain words; or [{"role": "system", "content": "..."}, ...]',
    )
    accepted = ResponsesField(
        widget=_lines(3),
        required=False,
        help_text="Responses that are right, a line of --- between two; empty: any valid one",
    )
    forbidden = ResponsesField(
        widget=_lines(3),
        required=False,
        help_text="Responses that must never be given, a line of --- between two",
    )
    state = forms.JSONField(
        widget=_lines(3), required=False, help_text="What the app knows, as JSON, where the agent needs it"
    )

    class Meta:
        model = GoldenCase
        fields = ("agent", "name", "messages", "accepted", "forbidden", "state", "active")


@admin.register(GoldenCase)
class GoldenCaseAdmin(ModelAdmin):
    """Decisions that must be right; `?decision=` fills in a new one from a decision."""

    form = GoldenCaseForm
    list_display = ["name", "agent", "right", "active", "created_at"]
    list_filter = [ByAgent, "active"]
    search_fields = ["name", "agent"]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, Any]:
        decision_id = request.GET.get("decision", "")
        try:
            return golden_of(str(uuid.UUID(decision_id))) if decision_id else {}
        except ValueError:
            return {}

    @display(description="right, or never")
    def right(self, case: GoldenCase) -> str:
        rules = [*case.accepted, *(f"never: {text}" for text in case.forbidden)]
        return "; ".join(rules)[:120] or "any valid answer"
