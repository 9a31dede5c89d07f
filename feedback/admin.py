"""Admin of feedback: recorded facts, read-only, and the settings of agents, editable."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin
from unfold.decorators import action, display

from backend.facts_admin import AgentFilter, FactAdmin, FactInline, admin_link
from backend.installation import PROGRAM
from feedback.accounts import admin as accounts_admin  # noqa: F401  (Django looks for pages in this file alone)
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.erasure.withdrawals import (
    WithdrawalSelection,
    decisions_withdraw,
    trained_text,
    withdrawal_restore,
)
from feedback.explorer.previews import turns_of
from feedback.models import (
    AgentSettings,
    Comparison,
    Decision,
    Outcome,
    Rating,
    Suggestion,
    Trace,
    Withdrawal,
)
from feedback.selectors import agent_slugs
from feedback.storage.bodies import Body
from feedback.storage.facts import COMPARISON, DECISION, RATING
from feedback.storage.sampling import ratings_wanted_refresh

RENEWED_AT_ONCE = 20_000
"""Decisions of an agent that follow its changed settings while a page waits."""


class ByAgent(AgentFilter):
    known = staticmethod(agent_slugs)


class ByAgentOfDecision(ByAgent):
    path = "decision__agent"


class ByAgentOfLeft(ByAgent):
    path = "left__agent"


class StandingFilter(admin.SimpleListFilter):
    """Filter by standing: current rows, or superseded and withdrawn ones."""

    title = "standing"
    parameter_name = "standing"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "stands"), ("no", "replaced or taken back")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        stands = {"superseded_by__isnull": True, "withdrawn": False}
        if self.value() == "yes":
            return queryset.filter(**stands)
        return queryset.exclude(**stands) if self.value() == "no" else queryset


def _short(text: str, characters: int = 70) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= characters else one_line[: characters - 1] + "…"


def verdict_of(rating: Rating) -> str:
    """A rating as a word or two."""
    if rating.withdrawn:
        return "taken back"
    if rating.thumb:
        return rating.get_thumb_display()
    if rating.stars is not None:
        return "★" * rating.stars
    if rating.score is not None:
        return f"{rating.score:.2f} of 1"
    return "corrected" if rating.correction is not None else "notes"


VERDICT_COLOURS = {"good": "success", "bad": "danger", "taken back": "warning"}
KIND_COLOURS = {"a person": "info", "simulated": "warning"}


def other_fields(fieldsets: list[Any], body: Body, shown: set[str]) -> list[Any]:
    """A set of the declared fields that no set has and that are not shown otherwise, or none."""
    placed = shown.union(*(options["fields"] for _, options in fieldsets))
    others = [name for name in body.names if name not in placed]
    return [("Other", {"fields": others})] if others else []


class RatingInline(FactInline):
    model = Rating
    fields = [
        "created_at", "rater", "rater_kind", "verdict",
        *(name for name in RATING.names if name not in ("rater", "rater_kind", "thumb", "stars", "score")),
    ]  # fmt: skip
    readonly_fields = fields
    ordering = ["created_at"]

    @display(description="verdict")
    def verdict(self, rating: Rating) -> str:
        return verdict_of(rating)


class OutcomeInline(FactInline):
    model = Outcome
    fields = ["at", "name", "value"]
    readonly_fields = fields


@admin.register(Decision)
class DecisionAdmin(FactAdmin):
    list_display = [
        "shown_id",
        "agent",
        "asked",
        "answered",
        "policy",
        "rated",
        "source",
        "created",
    ]
    list_filter = [ByAgent, "source"]
    search_fields = ["response", "policy", "unit", "run_id"]
    search_help_text = "Finds in responses, policies, units and run ids"
    ordering = ["-created_at", "-id"]
    inlines = [RatingInline, OutcomeInline]
    actions = ["withdraw"]
    fieldsets = [
        (None, {"fields": ["agent", "conversation", "response", "reasoning", "candidates"]}),
        ("Made by", {"fields": ["policy", "arm", "unit", "propensity"]}),
        ("In the app", {"fields": ["source", "run_id", "created_at", "tags", "state", "metadata", "trace"]}),
        ("Cost", {"fields": ["latency_ms", "tokens_in", "tokens_out"]}),
        ("Queue", {"fields": ["ratings_human", "ratings_wanted", "prompt_hash"]}),
    ]
    fieldsets += other_fields(fieldsets, DECISION, {"messages"})  # as a conversation
    readonly_fields = ["conversation", "prompt_hash", "created_at", "ratings_human", "ratings_wanted"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Decision]:
        queryset = super().get_queryset(request)
        if request.resolver_match and request.resolver_match.url_name == "feedback_decision_changelist":
            return queryset.defer("state", "candidates", "metadata", "tags")
        return queryset

    @action(description="Withdraw: exclude from training", permissions=["withdraw"])
    def withdraw(self, request: HttpRequest, queryset: QuerySet[Decision]) -> None:
        ids = tuple(queryset.order_by().values_list("pk", flat=True))
        done = decisions_withdraw(WithdrawalSelection(ids=ids), actor=request.user.get_username())
        trained = trained_text(done.trained_on) if done.trained_on else "nothing was trained on them"
        messages.success(request, f"{done.decisions:,} decisions withdrawn; {trained}.")

    def has_withdraw_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(SCOPE_PERMISSIONS["operate"])

    @display(description="decision")
    def shown_id(self, decision: Decision) -> str:
        return str(decision.pk)[:8]

    @display(description="asked")
    def asked(self, decision: Decision) -> str:
        return _short(next((turn.text for turn in reversed(turns_of(decision.messages))), ""))

    @display(description="answered")
    def answered(self, decision: Decision) -> str:
        return _short(decision.response)

    @display(description="ratings by people", ordering="ratings_human")
    def rated(self, decision: Decision) -> str:
        return f"{decision.ratings_human} of {decision.ratings_wanted}"

    @display(description="prompt")
    def conversation(self, decision: Decision) -> str:
        return "\n\n".join(f"{turn.role}: {turn.text}" for turn in turns_of(decision.messages))


@admin.register(Rating)
class RatingAdmin(FactAdmin):
    list_display = ["created", "of_decision", "rater", "kind", "verdict", "tags", "said", "stands"]
    list_filter = [ByAgentOfDecision, "rater_kind", "thumb", StandingFilter]
    search_fields = ["rater", "notes", "correction"]
    ordering = ["-created_at", "-id"]
    fields = ["decision", *RATING.names, "supersedes", "withdrawn", "created_at"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Rating]:
        return (
            super()
            .get_queryset(request)
            .select_related("decision", "superseded_by")
            .defer("decision__messages", "decision__state", "decision__candidates", "decision__metadata")
        )

    @display(description="decision")
    def of_decision(self, rating: Rating) -> SafeString | str:
        return admin_link(rating.decision)

    @display(description="given by", ordering="rater_kind", label=KIND_COLOURS)
    def kind(self, rating: Rating) -> str:
        return rating.get_rater_kind_display()

    @display(description="verdict", label=VERDICT_COLOURS)
    def verdict(self, rating: Rating) -> str:
        return verdict_of(rating)

    @display(description="said")
    def said(self, rating: Rating) -> str:
        return _short(rating.correction or rating.notes or "–")

    @display(description="stands", boolean=True)
    def stands(self, rating: Rating) -> bool:
        return not rating.withdrawn and getattr(rating, "superseded_by", None) is None


@admin.register(Comparison)
class ComparisonAdmin(FactAdmin):
    list_display = ["created", "of_left", "of_right", "rater", "kind", "preference", "stands"]
    list_filter = [ByAgentOfLeft, "rater_kind", "preference", StandingFilter]
    search_fields = ["rater", "notes"]
    ordering = ["-created_at", "-id"]
    fields = ["left", "right", *COMPARISON.names, "supersedes", "withdrawn", "created_at"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Comparison]:
        heavy = ("messages", "state", "candidates", "metadata", "response")
        return (
            super()
            .get_queryset(request)
            .select_related("left", "right", "superseded_by")
            .defer(*(f"{side}__{name}" for side in ("left", "right") for name in heavy))
        )

    @display(description="left")
    def of_left(self, comparison: Comparison) -> SafeString | str:
        return admin_link(comparison.left)

    @display(description="right")
    def of_right(self, comparison: Comparison) -> SafeString | str:
        return admin_link(comparison.right)

    @display(description="given by", ordering="rater_kind", label=KIND_COLOURS)
    def kind(self, comparison: Comparison) -> str:
        return comparison.get_rater_kind_display()

    @display(description="stands", boolean=True)
    def stands(self, comparison: Comparison) -> bool:
        return not comparison.withdrawn and getattr(comparison, "superseded_by", None) is None


@admin.register(Outcome)
class OutcomeAdmin(FactAdmin):
    list_display = ["at", "of_decision", "name", "value", "created"]
    list_filter = [ByAgentOfDecision]
    search_fields = ["name"]
    ordering = ["-at", "-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Outcome]:
        return (
            super()
            .get_queryset(request)
            .select_related("decision")
            .defer("decision__messages", "decision__state", "decision__candidates", "decision__metadata")
        )

    @display(description="decision")
    def of_decision(self, outcome: Outcome) -> SafeString | str:
        return admin_link(outcome.decision)


@admin.register(Withdrawal)
class WithdrawalAdmin(FactAdmin):
    """Decisions withdrawn from training, and restored."""

    list_display = ["id", "decisions_count", "reason", "actor", "created", "restored_at"]
    search_fields = ["reason", "actor"]
    ordering = ["-id"]
    readonly_fields = ["created_at", "restored_at"]
    actions = ["restore"]

    @action(description="Restore: include in training again", permissions=["restore"])
    def restore(self, request: HttpRequest, queryset: QuerySet[Withdrawal]) -> None:
        count = 0
        for number in queryset.filter(restored_at=None).values_list("pk", flat=True):
            count += withdrawal_restore(number, actor=request.user.get_username())
        messages.success(request, f"{count:,} decisions count again.")

    def has_restore_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm(SCOPE_PERMISSIONS["operate"])


@admin.register(Trace)
class TraceAdmin(FactAdmin):
    list_display = ["created", "agent", "run_id", "started_at", "finished_at"]
    list_filter = [ByAgent]
    search_fields = ["run_id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Trace]:
        queryset = super().get_queryset(request)
        if request.resolver_match and request.resolver_match.url_name == "feedback_trace_changelist":
            return queryset.defer("steps", "metadata")
        return queryset


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


@admin.register(Suggestion)
class SuggestionAdmin(FactAdmin):
    """Ratings that a label model suggested, and how people resolved them."""

    list_display = ["labeller", "of_decision", "good", "outcome", "created"]
    list_filter = [ByAgentOfDecision, "outcome"]
    search_fields = ["labeller"]
    ordering = ["-id"]
    readonly_fields = ["created_at", "settled_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Suggestion]:
        whole = ("messages", "state", "candidates", "metadata")
        rows = super().get_queryset(request).select_related("decision")
        return rows.defer(*(f"decision__{name}" for name in whole))

    @display(description="decision")
    def of_decision(self, suggestion: Suggestion) -> SafeString | str:
        return admin_link(suggestion.decision)
