"""The admin of rl: the policy registry an operator lives on, and what its policies came from."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.urls import URLPattern, path, reverse
from django.utils.decorators import method_decorator
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.http import require_POST
from unfold.admin import ModelAdmin
from unfold.decorators import display

from backend.facts_admin import AgentFilter, FactAdmin, FactInline, admin_link
from feedback.selectors import agents_known
from rl import admin_golden as admin_golden
from rl import experiment_admin as experiment_admin
from rl import registry
from rl.models import (
    AgentDefinition,
    Artifact,
    Evaluation,
    GateSettings,
    LabelRun,
    LearnerSettings,
    Policy,
    PolicyEvent,
    RewardRecord,
    RewardSettings,
    RunMetric,
    ServingSettings,
    Snapshot,
    TrainingRun,
)
from rl.selectors import policy_overview, share_of

STAGE_COLOURS = {
    "candidate": "info",
    "challenger": "primary",
    "champion": "success",
    "retired": "default",
    "rejected": "danger",
}
STATUS_COLOURS = {
    "queued": "info",
    "running": "primary",
    "succeeded": "success",
    "failed": "danger",
    "refused": "warning",
    "cancelled": "warning",
}


class ByAgent(AgentFilter):
    known = staticmethod(agents_known)


class ByAgentOfPolicy(ByAgent):
    path = "policy__agent"


def _percent(figures: dict[str, Any], name: str) -> str:
    share = share_of(figures, name)
    if share is None:
        return "–"
    return f"{share.percent} [{share.interval}]" if share.interval else share.percent


@admin.register(Policy)
class PolicyAdmin(FactAdmin):
    """Stage, lineage, figures, files and history of a policy; the moves go through rl.registry."""

    list_display = [
        "named",
        "agent",
        "staged",
        "accuracy",
        "gain",
        "learnt_from",
        "parent_link",
        "created",
    ]
    list_filter = [ByAgent, "stage"]
    search_fields = ["name", "base_model", "adapter_sha256"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]
    fieldsets = [
        (
            "Files",
            {"fields": ["base_model", "base_model_hash", "adapter_path", "adapter_sha256", "created_at"]},
        )
    ]
    change_form_outer_before_template = "admin/rl/policy/overview.html"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Policy]:
        return super().get_queryset(request).select_related("parent")

    @display(description="name", ordering="name")
    def named(self, policy: Policy) -> SafeString:
        return format_html('<span class="ratchet-time">{}</span>', policy.name)

    @display(description="from ratings", ordering="feedback_count")
    def learnt_from(self, policy: Policy) -> int:
        return policy.feedback_count

    @display(description="stage", ordering="stage", label=STAGE_COLOURS)
    def staged(self, policy: Policy) -> str:
        return policy.stage

    @display(description="accuracy [95 %]")
    def accuracy(self, policy: Policy) -> str:
        return _percent(policy.metrics, "preference_accuracy")

    @display(description="gain, points [95 %]")
    def gain(self, policy: Policy) -> str:
        difference = share_of(policy.metrics, "difference")
        if difference is None:
            return "–"
        return f"{difference.points} [{difference.points_interval}] over {policy.metrics.get('against', '?')}"

    @display(description="parent", ordering="parent__name")
    def parent_link(self, policy: Policy) -> SafeString | str:
        return admin_link(policy.parent)

    def get_urls(self) -> list[URLPattern]:
        move = path(
            "<path:object_id>/move/", self.admin_site.admin_view(self.move_view), name="rl_policy_move"
        )
        return [move, *super().get_urls()]

    def may_move(self, request: HttpRequest) -> bool:
        """The fields of a policy cannot be edited by anyone; who may change policies may move them."""
        return request.user.has_perm("rl.change_policy")

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        policy = self.get_object(request, unquote(object_id))
        context = dict(extra_context or {})
        if policy is not None:
            context |= {
                "overview": policy_overview(policy),
                "moves": [*registry.MOVES[policy.stage]] if self.may_move(request) else [],
                "may_roll_back": policy.stage == Policy.Stage.CHAMPION and self.may_move(request),
                "stage_colours": STAGE_COLOURS,
                "move_url": reverse("admin:rl_policy_move", args=[policy.pk]),
            }
        return super().change_view(request, object_id, form_url, context)

    @method_decorator(require_POST)
    def move_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Promote, reject, retire or roll back: one service, and what it says is shown."""
        if not self.may_move(request):
            raise PermissionDenied
        policy = self.get_object(request, unquote(object_id))
        if policy is None:
            raise Http404(f"no policy {object_id}")
        move, reason = request.POST.get("move", ""), request.POST.get("reason", "").strip()
        actor = request.user.get_username()
        try:
            moved = registry.policy_move(
                policy, move, actor=actor, reason=reason, force=request.POST.get("force") == "on"
            )
        except registry.RegistryRefused as refusal:
            messages.error(request, str(refusal))
        else:
            messages.success(request, f"{moved.name} is {moved.stage} now.")
        return redirect("admin:rl_policy_change", policy.pk)


class RunMetricInline(FactInline):
    model = RunMetric
    fields = ["step", "figures", "at"]
    readonly_fields = fields
    per_page = 25
    collapsible = True

    @display(description="figures")
    def figures(self, metric: RunMetric) -> str:
        return ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in metric.values.items()
        )


@admin.register(TrainingRun)
class TrainingRunAdmin(FactAdmin):
    list_display = [
        "shown_id",
        "agent",
        "method",
        "stated",
        "progress",
        "base_model",
        "policy_link",
        "created",
    ]
    list_filter = [ByAgent, "status", "method"]
    search_fields = ["agent", "base_model", "reason", "output"]
    ordering = ["-id"]
    inlines = [RunMetricInline]
    fieldsets = [
        (
            None,
            {
                "fields": [
                    "agent",
                    "method",
                    "status",
                    "reason",
                    "page",
                    "snapshot",
                    "steps_done",
                    "steps_total",
                ]
            },
        ),
        ("How", {"fields": ["base_model", "base_model_hash", "config", "seed", "recipe"]}),
        ("Where", {"fields": ["hardware", "libraries", "code_version", "worker", "output"]}),
        ("When", {"fields": ["created_at", "started_at", "heartbeat_at", "finished_at"]}),
        ("Result", {"fields": ["result"]}),
    ]
    readonly_fields = ["page", "created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[TrainingRun]:
        return super().get_queryset(request).select_related("policy", "snapshot")

    @display(description="run", ordering="id")
    def shown_id(self, run: TrainingRun) -> str:
        return f"run {run.pk}"

    @display(description="status", ordering="status", label=STATUS_COLOURS)
    def stated(self, run: TrainingRun) -> str:
        return run.status

    @display(description="steps")
    def progress(self, run: TrainingRun) -> str:
        return f"{run.steps_done} of {run.steps_total}"

    @display(description="policy")
    def policy_link(self, run: TrainingRun) -> SafeString | str:
        return admin_link(getattr(run, "policy", None))

    @display(description="curves")
    def page(self, run: TrainingRun) -> SafeString:
        address = reverse("run", args=[run.pk])
        return format_html('<a class="ratchet-link" href="{}">Curves of run {}</a>', address, run.pk)


@admin.register(Snapshot)
class SnapshotAdmin(FactAdmin):
    list_display = ["shown_id", "agent", "kind", "rows", "feedback_count", "simulated", "path", "created"]
    list_filter = [ByAgent, "kind"]
    search_fields = ["path", "sha256"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    @display(description="snapshot", ordering="id")
    def shown_id(self, snapshot: Snapshot) -> str:
        return f"snapshot {snapshot.pk}"

    @display(description="rows")
    def rows(self, snapshot: Snapshot) -> str:
        return ", ".join(f"{count} {split}" for split, count in snapshot.counts.items())

    @display(description="simulated", ordering="simulated_share")
    def simulated(self, snapshot: Snapshot) -> str:
        return f"{100 * snapshot.simulated_share:.0f} %"


@admin.register(Evaluation)
class EvaluationAdmin(FactAdmin):
    list_display = ["shown_id", "agent", "subject", "split", "samples", "accuracy", "against", "created"]
    list_filter = [ByAgent, "split"]
    search_fields = ["checkpoint", "base_model", "against"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Evaluation]:
        return super().get_queryset(request).select_related("policy", "snapshot")

    @display(description="evaluation", ordering="id")
    def shown_id(self, evaluation: Evaluation) -> str:
        return f"evaluation {evaluation.pk}"

    @display(description="of")
    def subject(self, evaluation: Evaluation) -> SafeString | str:
        return admin_link(evaluation.policy) if evaluation.policy else evaluation.checkpoint

    @display(description="preference accuracy [95 %]")
    def accuracy(self, evaluation: Evaluation) -> str:
        return _percent(evaluation.figures, "preference_accuracy")


@admin.register(PolicyEvent)
class PolicyEventAdmin(FactAdmin):
    list_display = [
        "created",
        "policy_link",
        "kind",
        "from_stage",
        "to_stage",
        "actor",
        "forced",
        "reason",
    ]
    list_filter = [ByAgentOfPolicy, "kind", "forced"]
    search_fields = ["policy__name", "actor", "reason"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[PolicyEvent]:
        return super().get_queryset(request).select_related("policy")

    @display(description="policy")
    def policy_link(self, event: PolicyEvent) -> SafeString | str:
        return admin_link(event.policy)


@admin.register(Artifact)
class ArtifactAdmin(FactAdmin):
    list_display = ["path", "policy_link", "format", "quantization", "size", "sha256", "created"]
    list_filter = [ByAgentOfPolicy, "format"]
    search_fields = ["path", "sha256", "policy__name"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Artifact]:
        return super().get_queryset(request).select_related("policy")

    @display(description="policy")
    def policy_link(self, artifact: Artifact) -> SafeString | str:
        return admin_link(artifact.policy)

    @display(description="size", ordering="bytes")
    def size(self, artifact: Artifact) -> str:
        return f"{artifact.bytes / 1e6:,.1f} MB"


@admin.register(LearnerSettings)
class LearnerSettingsAdmin(ModelAdmin):
    """When an agent learns by itself: an operator may change it at any time."""

    list_display = ["agent", "enabled", "min_samples_to_retrain", "retrain_interval_hours", "method", "gate"]
    search_fields = ["agent"]


@admin.register(ServingSettings)
class ServingSettingsAdmin(ModelAdmin):
    """How an agent answers, and how much it tries out."""

    list_display = ["agent", "choose_temperature", "epsilon", "temperature", "max_tokens"]
    search_fields = ["agent"]


@admin.register(GateSettings)
class GateSettingsAdmin(ModelAdmin):
    """The bounds of an agent's gate."""

    list_display = ["agent", "min_evidence", "alpha", "margin", "max_slice_loss", "max_kl"]
    search_fields = ["agent"]


@admin.register(RewardRecord)
class RewardRecordAdmin(FactAdmin):
    """Every reward that was ever calculated."""

    list_display = ["decided", "agent", "raw", "immediate", "delayed", "strategic", "simulated", "created"]
    list_filter = [ByAgent, "simulated"]
    search_fields = ["=decision"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    @display(description="decision")
    def decided(self, record: RewardRecord) -> SafeString:
        address = reverse("decision", args=[record.decision])
        return format_html('<a class="ratchet-link" href="{}">{}</a>', address, str(record.decision)[:8])


@admin.register(RewardSettings)
class RewardSettingsAdmin(ModelAdmin):
    """How an agent's decisions are rewarded."""

    list_display = ["agent", "immediate_weight", "delayed_weight", "strategic_weight"]
    search_fields = ["agent"]


@admin.register(AgentDefinition)
class AgentDefinitionAdmin(ModelAdmin):
    """Agents that need no code."""

    list_display = ["slug", "title", "description"]
    search_fields = ["slug", "title"]


@admin.register(LabelRun)
class LabelRunAdmin(FactAdmin):
    """Label models, and how well calibrated they are."""

    list_display = ["named", "agent", "ratings", "suggested", "brier", "calibration", "created"]
    list_filter = [ByAgent]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    @display(description="label model", ordering="id")
    def named(self, run: LabelRun) -> str:
        return str(run)

    @display(description="Brier score")
    def brier(self, run: LabelRun) -> str:
        return f"{run.figures.get('brier', float('nan')):.3f}"

    @display(description="calibration error")
    def calibration(self, run: LabelRun) -> str:
        return f"{run.figures.get('calibration_error', float('nan')):.3f}"
