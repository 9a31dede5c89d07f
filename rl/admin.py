"""The admin of rl: the registry on record, the settings of agents, and the workers' queue."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Field, Model
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django_q import admin as queue_admin
from django_q.models import Failure, OrmQ, Schedule, Success
from unfold import fields
from unfold.admin import ModelAdmin, TabularInline
from unfold.decorators import display
from unfold.paginator import InfinitePaginator
from unfold.widgets import UnfoldAdminPasswordWidget, UnfoldAdminTextareaWidget

from backend.admin_navigation import json_html
from backend.installation import as_typed
from feedback.selectors import decision_get, ratings_standing
from rl.base_models.service import base_model_resolve
from rl.base_models.sources import SourceRefused
from rl.datasets.feedback_types import NEUTRAL, rating_value
from rl.models import (
    AgentBase,
    AgentDefinition,
    Arm,
    Artifact,
    BenchmarkResult,
    Evaluation,
    Experiment,
    GateSettings,
    GoldenCase,
    LearnerSettings,
    Policy,
    RewardSettings,
    ServingSettings,
    Snapshot,
    Upstream,
)
from rl.upstreams import SETTINGS, TITLES, UpstreamRefused, key_place, upstream_fill

fields.prettify_json = json_html

# --- The registry: to be looked up, never changed ---------------------------------------------------------------


class RecordAdmin(ModelAdmin):
    """Rows that are history. Pages are not counted, so that a list of a million rows opens as quickly as one of ten."""

    paginator = InfinitePaginator
    show_full_result_count = False
    list_per_page = 50
    list_filter = ["agent"]
    ordering = ["-id"]

    def has_add_permission(self, *_: object, **__: object) -> bool:
        return False

    def has_change_permission(self, *_: object, **__: object) -> bool:
        return False

    def has_delete_permission(self, *_: object, **__: object) -> bool:
        return False


@admin.register(Policy)
class PolicyAdmin(RecordAdmin):
    """Policies and their files; `page` leads to figures, history and moves."""

    list_display = ["name", "agent", "kind", "stage", "feedback_count", "parent", "created_at", "page"]
    list_filter = ["agent", "stage", "kind"]
    list_select_related = ["parent"]
    search_fields = ["name", "base_model", "adapter_sha256"]
    readonly_fields = ["page", "created_at"]

    @display(description="page")
    def page(self, policy: Policy) -> SafeString:
        return _link(reverse("policy", args=[policy.name]), "Figures and moves")


def _record_register(
    model: type[Model], columns: str, search: str, *, agent: str = "agent", **shown: Callable[..., str]
) -> None:
    """Register a list of records. columns, search: names of fields; agent: the field that the list is filtered by;
    shown: columns that are no fields."""
    facts = {
        **shown,
        "list_display": [*columns.split(), "created_at"],
        "list_filter": [agent],
        "list_select_related": ["policy"] if "policy" in columns.split() else False,
        "search_fields": search.split(),
        "readonly_fields": ["created_at"],
    }
    admin.site.register(model, type(f"{model.__name__}Admin", (RecordAdmin,), facts))


@display(description="rows")
def _rows(_: RecordAdmin, snapshot: Snapshot) -> str:
    return ", ".join(f"{count:,} {split}" for split, count in snapshot.counts.items())


@display(description="size")
def _size(_: RecordAdmin, artifact: Artifact) -> str:
    return filesizeformat(artifact.bytes)


@display(description="score")
def _score(_: RecordAdmin, result: BenchmarkResult) -> str:
    own, base = (result.figures[side]["value"] for side in ("own", "base"))
    return f"{own:.1%}, base {base:.1%}"


_record_register(Snapshot, "id agent kind rows feedback_count simulated_share", "path sha256", rows=_rows)
_record_register(Evaluation, "id agent policy split samples against", "checkpoint base_model against")
_record_register(
    Artifact,
    "path policy format quantization size",
    "path sha256 policy__name",
    agent="policy__agent",
    size=_size,
)
_record_register(
    BenchmarkResult,
    "task policy score n metric harness",
    "task policy__name",
    agent="policy__agent",
    score=_score,
)


def _link(address: str, words: str) -> SafeString:
    return format_html('<a class="ratchet-link" href="{}">{}</a>', address, words)


# --- Settings of agents -----------------------------------------------------------------------------------------


LABELS = {
    "budget_usd": "Budget (USD a month)",
    "shadow_budget_usd": "Budget of the shadow (USD)",
    "route_loss": "Answers that may become worse",
    "max_kl": "Largest KL",
    "max_general_kl": "Largest KL on general prompts",
}
"""Labels of fields in forms whose names do not read as words."""


class LabelledAdmin(ModelAdmin):
    """Settings with LABELS."""

    def formfield_for_dbfield(
        self, db_field: Field[object, object], request: HttpRequest, **kwargs: object
    ) -> Any:
        """The field of a form with its label. A migration would hold a verbose_name."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            field.label = LABELS.get(db_field.name, field.label)
        return field


def _settings_register(model: type[Model], columns: str, search: str = "agent") -> None:
    """Register settings that need nothing of their own."""
    facts = {"list_display": columns.split(), "search_fields": search.split()}
    admin.site.register(model, type(f"{model.__name__}Admin", (LabelledAdmin,), facts))


_settings_register(LearnerSettings, "agent enabled min_samples_to_retrain retrain_interval_hours method gate")
_settings_register(ServingSettings, "agent choose_temperature epsilon temperature max_tokens fallbacks")
_settings_register(RewardSettings, "agent immediate_weight delayed_weight strategic_weight")
_settings_register(AgentDefinition, "slug title description", "slug title")


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


@admin.register(GateSettings)
class GateSettingsAdmin(LabelledAdmin):
    """The bounds of an agent's gate."""

    list_display = ["agent", "min_evidence", "alpha", "margin", "not_inferior", "max_slice_loss", "max_kl"]
    search_fields = ["agent"]

    def formfield_for_dbfield(
        self, db_field: Field[object, object], request: HttpRequest, **kwargs: object
    ) -> object:
        """The field of a form. Its help names a command, and a migration holds the help as it is in a checkout."""
        field = super().formfield_for_dbfield(db_field, request, **kwargs)
        if field is not None:
            field.help_text = as_typed(field.help_text)
        return field


# --- Golden cases: prompt and responses are written as text, and taken over from a decision that was made -------


class PromptField(forms.CharField):
    """Chat messages, or one question in plain words."""

    def prepare_value(self, value: object) -> object:
        return value if isinstance(value, str) or value is None else prompt_written(value)

    def to_python(self, value: object) -> Any:
        text = super().to_python(value)
        if not text:
            return None
        try:
            return prompt_read(text)
        except ValueError as error:
            raise forms.ValidationError(f"this is no JSON list of messages: {error}") from error


class ResponsesField(forms.CharField):
    """Several responses in one field."""

    def prepare_value(self, value: object) -> object:
        return responses_written(value) if isinstance(value, list) else value

    def to_python(self, value: object) -> Any:
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
    list_filter = ["agent", "active"]
    search_fields = ["name", "agent"]

    def get_changeform_initial_data(self, request: HttpRequest) -> dict[str, object]:
        decision_id = request.GET.get("decision", "")
        try:
            return golden_of(str(uuid.UUID(decision_id))) if decision_id else {}
        except ValueError:
            return {}

    @display(description="right, or never")
    def right(self, case: GoldenCase) -> str:
        rules = [*case.accepted, *(f"never: {text}" for text in case.forbidden)]
        return "; ".join(rules)[:120] or "any valid answer"


# --- Experiments: a draft is set up here; starting and stopping is on its page ----------------------------------

RULES = ["alpha", "tuning", "min_units", "not_inferior", "guardrails", "slices", "on_win"]
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


@admin.register(Experiment)
class ExperimentAdmin(LabelledAdmin):
    """A draft can be changed; once it runs only what happens when it wins can."""

    list_display = ["name", "agent", "status", "ramp", "metric", "page", "started_at", "ended_at"]
    list_filter = ["agent", "status", "allocation"]
    search_fields = ["name", "agent", "hypothesis"]
    ordering = ["-id"]
    inlines = [ArmInline]
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

    def has_delete_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False

    def save_model(self, request: HttpRequest, obj: Experiment, form: object, change: bool) -> None:
        if not change:
            obj.created_by = request.user.get_username()
        super().save_model(request, obj, form, change)

    @display(description="results")
    def page(self, experiment: Experiment) -> SafeString | str:
        if experiment.pk is None:
            return "–"
        return _link(reverse("experiment", args=[experiment.pk]), "Results and actions")


# --- Upstreams: all their settings; an API key is typed and never shown -----------------------------------------


class UpstreamForm(forms.ModelForm):
    """The settings of an upstream, and a field for a new API key."""

    key = forms.CharField(
        required=False,
        strip=True,
        max_length=1000,
        widget=UnfoldAdminPasswordWidget(attrs={"autocomplete": "off"}, render_value=False),
        label="API key",
        help_text="Stored encrypted and never shown; empty: the present one stays",
    )

    class Meta:
        model = Upstream
        fields = [*SETTINGS]
        labels = {
            "url": TITLES["url"],
            "key_env": TITLES["key_env"],
            "timeout_s": "Timeout (s)",
            "connect_timeout_s": "Connection timeout (s)",
        }

    def clean(self) -> dict[str, object]:
        cleaned = super().clean() or self.cleaned_data
        if self.errors:
            return cleaned
        stored = Upstream.objects.filter(pk=self.instance.pk).first() or Upstream()
        values = {name: cleaned[name] for name in SETTINGS if name in cleaned}
        if values.get("key_env") == stored.key_env and cleaned.get("key"):
            values["key_env"] = ""  # the form sends the present variable along with a new key
        try:
            filled = upstream_fill(stored, values, cleaned.get("key") or "")
        except UpstreamRefused as refusal:
            for name, fault in refusal.fields.items():
                self.add_error(name if name in self.fields else None, fault)
            return cleaned
        self.instance.key_encrypted = filled.key_encrypted
        return cleaned | {"key_env": filled.key_env, "url": filled.url}


@admin.register(Upstream)
class UpstreamAdmin(ModelAdmin):
    """Endpoints of providers, with timeouts and prices."""

    form = UpstreamForm
    fields = [*SETTINGS, "key"]
    list_display = ["name", "url", "model", "dialect", "key_kept"]
    search_fields = ["name", "url", "model"]

    @display(description="API key")
    def key_kept(self, upstream: Upstream) -> str:
        return key_place(upstream)

    def get_readonly_fields(self, request: HttpRequest, obj: Upstream | None = None) -> list[str]:
        return ["name"] if obj else []


# --- The workers' queue: the pages of its library in this admin's clothes ---------------------------------------


class EndedTaskAdmin(ModelAdmin):
    """What ended tasks share: the result first, and nothing to save."""

    list_filter = ()
    fields = ("result", "func", "args", "kwargs", "started", "stopped", "attempt_count", "id")

    def has_change_permission(self, request: HttpRequest, obj: object = None) -> bool:
        return False


class SuccessAdmin(EndedTaskAdmin, queue_admin.TaskAdmin):
    """Jobs that went through."""

    list_display = ("name", "func", "stopped", "time_taken")


class FailureAdmin(EndedTaskAdmin, queue_admin.FailAdmin):
    """Jobs that broke off, with the error."""

    list_display = ("name", "func", "stopped", "short_result")


class ScheduleAdmin(queue_admin.ScheduleAdmin, ModelAdmin):
    """Jobs that run by the clock."""


class QueueAdmin(queue_admin.QueueAdmin, ModelAdmin):
    """Jobs that wait for a worker."""


# Importing the library's pages has registered them: the queue's only where the database is the broker.
for model, page in (
    (Success, SuccessAdmin),
    (Failure, FailureAdmin),
    (Schedule, ScheduleAdmin),
    (OrmQ, QueueAdmin),
):
    if admin.site.is_registered(model):
        admin.site.unregister(model)
        admin.site.register(model, page)


SEPARATOR = "---"
"""A line of it stands between two responses where several are written into one field."""


def golden_of(decision_id: str) -> dict[str, object]:
    """Draft of a golden case: the decision's prompt and state, and by its ratings, its response or their
    corrections as accepted, or the response as forbidden. {} for no decision."""
    decision = decision_get(decision_id)
    if decision is None:
        return {}
    ratings = list(ratings_standing(decision.agent).filter(decision=decision))
    values = [rating_value(row.thumb, row.stars, row.score) for row in ratings]
    verdicts = [value for value in values if value is not None]
    accepted = list(dict.fromkeys(row.correction for row in ratings if row.correction))
    forbidden: list[str] = []
    if verdicts:
        liked = sum(verdicts) / len(verdicts) > NEUTRAL
        (accepted if liked else forbidden).append(decision.response)
    questions = [turn.get("content") for turn in decision.messages if turn.get("role") == "user"]
    return {
        "agent": decision.agent,
        "name": " ".join(str(questions[-1] if questions else "").split())[:80],
        "messages": decision.messages,
        "state": decision.state,
        "accepted": accepted,
        "forbidden": [text for text in forbidden if text not in accepted],
    }


def prompt_written(messages: object) -> str:
    """Messages as they are edited: one question in plain words, anything longer as JSON."""
    if isinstance(messages, list) and len(messages) == 1 and set(messages[0]) == {"role", "content"}:
        content = messages[0]["content"]
        if messages[0]["role"] == "user" and isinstance(content, str) and content.strip()[:1] != "[":
            return content
    return json.dumps(messages, ensure_ascii=False, indent=2)


def prompt_read(text: str) -> object:
    """The reverse: plain words are one question. Raises ValueError for a list that is no JSON."""
    if text.strip()[:1] != "[":
        return [{"role": "user", "content": text.strip()}]
    return json.loads(text)


def responses_written(responses: list[str]) -> str:
    return f"\n{SEPARATOR}\n".join(responses)


def responses_read(text: str) -> list[str]:
    """The responses between lines of dashes; empty ones are none."""
    found: list[str] = []
    lines: list[str] = []
    for line in [*text.replace("\r\n", "\n").split("\n"), SEPARATOR]:
        if line.strip() == SEPARATOR:
            found.append("\n".join(lines).strip("\n"))
            lines = []
        else:
            lines.append(line)
    return [response for response in found if response.strip()]
