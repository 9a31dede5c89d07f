"""The admin of experiments: set one up, see its arms and its history; starting and stopping is on its page."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display

from backend.facts_admin import FactAdmin, FactInline
from rl.admin.filters import ByAgent
from rl.models import Arm, Experiment, ExperimentEvent

COLOURS = {"draft": "info", "running": "primary", "stopped": "default"}
RULES = ["alpha", "tuning", "min_units", "guardrails", "slices", "on_win"]
SPLIT = ["ramp", "allocation", "floor", "group", "group_reserve"]


class ArmInline(TabularInline):
    model = Arm
    extra = 0
    fields = ["name", "policy", "weight", "is_control"]

    def _draft(self, experiment: Experiment | None) -> bool:
        return experiment is None or experiment.status == Experiment.Status.DRAFT

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._draft(obj) and super().has_add_permission(request, obj)

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        # the split of a running experiment is what its figures rest on
        return self._draft(obj) and super().has_change_permission(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return self._draft(obj) and super().has_delete_permission(request, obj)


class EventInline(FactInline):
    model = ExperimentEvent
    fields = ["kind", "actor", "reason", "created_at"]
    readonly_fields = fields


@admin.register(Experiment)
class ExperimentAdmin(ModelAdmin):
    """A draft can be changed; once it runs only what happens when it wins can."""

    list_display = ["name", "agent", "stated", "ramp", "metric", "page", "started_at", "ended_at"]
    list_filter = [ByAgent, "status", "allocation"]
    search_fields = ["name", "agent", "hypothesis"]
    ordering = ["-id"]
    inlines = [ArmInline, EventInline]
    fieldsets = [
        (None, {"fields": ["name", "agent", "hypothesis", "metric", "goal", "page"]}),
        ("Split", {"fields": SPLIT}),
        ("Rules", {"fields": RULES}),
        ("So far", {"fields": ["status", "reason", "created_by", "started_at", "ended_at"]}),
    ]
    always_read = ["page", "status", "reason", "created_by", "started_at", "ended_at"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        if obj is None or obj.status == Experiment.Status.DRAFT:
            return self.always_read
        fixed = ["name", "agent", "metric", "goal", *SPLIT, *[rule for rule in RULES if rule != "on_win"]]
        return [*self.always_read, *fixed]

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Experiment, form: Any, change: bool) -> None:
        if not change:
            obj.created_by = request.user.get_username()
        super().save_model(request, obj, form, change)

    @display(description="status", ordering="status", label=COLOURS)
    def stated(self, experiment: Experiment) -> str:
        return experiment.status

    @display(description="results")
    def page(self, experiment: Experiment) -> SafeString | str:
        if experiment.pk is None:
            return "–"
        address = reverse("experiment", args=[experiment.pk])
        return format_html('<a class="ratchet-link" href="{}">Results and actions</a>', address)


@admin.register(ExperimentEvent)
class ExperimentEventAdmin(FactAdmin):
    list_display = ["created", "experiment", "kind", "actor", "reason"]
    list_filter = ["kind"]
    search_fields = ["experiment__name", "actor", "reason"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[ExperimentEvent]:
        return super().get_queryset(request).select_related("experiment")
