"""The admin of policies: the registry an operator lives on, with evaluations, files and history."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from backend.facts_admin import FactAdmin, admin_link
from rl.admin.filters import ByAgent, ByAgentOfPolicy
from rl.gates.headlines import headline, headline_of
from rl.models import (
    Artifact,
    BenchmarkResult,
    Evaluation,
    JudgingRound,
    Policy,
    PolicyEvent,
)
from rl.registry.checklist import promotion_of
from rl.registry.integrity import verify
from rl.selectors import policy_overview


def _headline_text(metrics: dict[str, Any]) -> str:
    """The figure that leads, with its interval and what it is of."""
    found = headline_of(metrics)
    if found is None:
        return "–"
    return f"{found.text}{f' [{found.interval}]' if found.interval else ''} {found.title.lower()}"


STAGE_COLOURS = {
    "candidate": "info",
    "challenger": "primary",
    "champion": "success",
    "retired": "default",
    "rejected": "danger",
}


@admin.register(Policy)
class PolicyAdmin(FactAdmin):
    """Stage, lineage, figures, files and history of a policy; the moves go through rl.registry.service."""

    actions = ["verify_files"]
    list_display = [
        "named",
        "agent",
        "kind",
        "staged",
        "accuracy",
        "gain",
        "learnt_from",
        "parent_link",
        "created",
    ]
    list_filter = [ByAgent, "stage", "kind"]
    search_fields = ["name", "base_model", "adapter_sha256"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]
    fieldsets = [
        (
            "Files",
            {
                "fields": [
                    "kind",
                    "base_model",
                    "base_model_hash",
                    "adapter_path",
                    "adapter_sha256",
                    "created_at",
                ]
            },
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

    @display(description="judged [95 %]")
    def accuracy(self, policy: Policy) -> str:
        return _headline_text(policy.metrics)

    @display(description="gain")
    def gain(self, policy: Policy) -> str:
        found = headline_of(policy.metrics)
        if found is None or not found.gain:
            return "–"
        return f"{found.gain} [{found.gain_interval}] over {policy.metrics.get('against', '?')}"

    @display(description="parent", ordering="parent__name")
    def parent_link(self, policy: Policy) -> SafeString | str:
        return admin_link(policy.parent)

    def has_move_permission(self, request: HttpRequest) -> bool:
        """Permission check that Django calls for the actions of the list."""
        return self.may_move(request)

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
                "promotion": promotion_of(policy, may_move=self.may_move(request)),
                "back": request.path,
            }
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description="Compare files with their recorded SHA-256", permissions=["move"])
    def verify_files(self, request: HttpRequest, policies: QuerySet[Policy]) -> None:
        """Say which files of the chosen policies are damaged or missing."""
        report = verify(policies)
        for found in report["findings"]:
            messages.error(
                request, f"{found['what']}: {found['path']} is {found['state']}; {found['remedy']}"
            )
        if not report["findings"]:
            messages.success(request, f"{report['checked']} files are as they were written.")


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

    @display(description="judged [95 %]")
    def accuracy(self, evaluation: Evaluation) -> str:
        leading = headline(evaluation.figures)
        return _headline_text({"headline": leading} if leading else evaluation.figures)


@admin.register(JudgingRound)
class JudgingRoundAdmin(FactAdmin):
    """Rounds and their results. Pairs and judgements are not shown: whoever judges must stay blind."""

    list_display = ["page", "agent", "policy", "opponent_name", "status", "verdict", "created"]
    list_filter = [ByAgent, "status", "verdict"]
    search_fields = ["policy__name", "opponent__name", "created_by", "reason"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[JudgingRound]:
        return super().get_queryset(request).select_related("policy", "opponent")

    @display(description="round", ordering="id")
    def page(self, judging: JudgingRound) -> str:
        return f"judging round {judging.pk}"


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
    list_display = ["path", "policy_link", "format", "quantization", "size", "short_sha256", "created"]
    list_filter = [ByAgentOfPolicy, "format"]
    search_fields = ["path", "sha256", "policy__name"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Artifact]:
        return super().get_queryset(request).select_related("policy")

    @display(description="policy")
    def policy_link(self, artifact: Artifact) -> SafeString | str:
        return admin_link(artifact.policy)

    @display(description="SHA-256", ordering="sha256")
    def short_sha256(self, artifact: Artifact) -> str:
        return f"{artifact.sha256[:12]}…"

    @display(description="size", ordering="bytes")
    def size(self, artifact: Artifact) -> str:
        return f"{artifact.bytes / 1e6:,.1f} MB"


@admin.register(BenchmarkResult)
class BenchmarkResultAdmin(FactAdmin):
    list_display = ["task", "policy_link", "score", "base_score", "n", "metric", "harness", "created"]
    list_filter = [ByAgentOfPolicy, "task"]
    search_fields = ["task", "policy__name"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[BenchmarkResult]:
        return super().get_queryset(request).select_related("policy").defer("items")

    @display(description="policy")
    def policy_link(self, result: BenchmarkResult) -> SafeString | str:
        return admin_link(result.policy)

    @display(description="policy's score ± standard error")
    def score(self, result: BenchmarkResult) -> str:
        return _score_text(result.figures["own"])

    @display(description="base's")
    def base_score(self, result: BenchmarkResult) -> str:
        return _score_text(result.figures["base"])


def _score_text(side: dict[str, float]) -> str:
    return f"{100 * side['value']:.1f} % ± {100 * side['stderr']:.1f}"
