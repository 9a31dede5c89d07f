"""Admin of feedback: the settings of agents. Decisions and what was said of them have pages of their own."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from unfold.admin import ModelAdmin

from backend.installation import PROGRAM
from feedback.accounts import admin as accounts_admin  # noqa: F401  (Django looks for pages in this file alone)
from feedback.models import AgentSettings, Decision
from feedback.storage.sampling import ratings_wanted_refresh

RENEWED_AT_ONCE = 20_000
"""Decisions of an agent that follow its changed settings while a page waits."""


@admin.register(AgentSettings)
class AgentSettingsAdmin(ModelAdmin):
    """Settings of an agent, which an operator may change at any time."""

    list_display = [
        "agent",
        "ratings_wanted",
        "overlap_share",
        "overlap_ratings",
        "collection_rate",
        "aggregation",
    ]
    search_fields = ["agent"]

    def save_model(self, request: HttpRequest, obj: AgentSettings, form: Any, change: bool) -> None:
        """Decisions recorded before follow, where there are not too many for a page to wait for."""
        super().save_model(request, obj, form, change)
        if not {"agent", "ratings_wanted", "overlap_share", "overlap_ratings"} & set(form.changed_data):
            return
        many = Decision.objects.filter(agent=obj.agent).order_by()[: RENEWED_AT_ONCE + 1].count()
        if many > RENEWED_AT_ONCE:
            messages.warning(
                request,
                "The new number of wanted ratings applies to new decisions. To apply it to the more than "
                f"{RENEWED_AT_ONCE:,} earlier ones run: {PROGRAM} renew_queue --agent {obj.agent}",
            )
        elif changed := ratings_wanted_refresh(obj.agent):
            messages.info(
                request, f"{changed:,} decisions recorded earlier now have another number of wanted ratings."
            )
