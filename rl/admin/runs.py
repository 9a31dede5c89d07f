"""The admin of training: runs with their metrics, snapshots, label models and rewards, all read only."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from backend.facts_admin import FactAdmin, FactInline, admin_link
from rl.admin.filters import ByAgent
from rl.datasets.prompt_clusters import near_identical_prompts
from rl.models import (
    LabelRun,
    RewardModelEvent,
    RewardModelVersion,
    RewardRecord,
    RunMetric,
    Snapshot,
    TrainingRun,
)
from rl.reward_models.service import ranking_text

STATUS_COLOURS = {
    "queued": "info",
    "running": "primary",
    "succeeded": "success",
    "failed": "danger",
    "refused": "warning",
    "cancelled": "warning",
}


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
    readonly_fields = ["near_identical", "created_at"]

    @display(description="near-identical prompts")
    def near_identical(self, snapshot: Snapshot) -> SafeString | str:
        """Near-identical prompts found by the newest evaluation, with the largest clusters."""
        for evaluation in snapshot.evaluations.order_by("-pk")[:1]:
            if (found := near_identical_prompts(evaluation)) is not None:
                rows = [
                    (one["prompts"], ", ".join(one["sides"]), " · ".join(one["examples"]))
                    for one in found.largest
                ]
                return format_html(
                    "{}.<ul>{}</ul>",
                    found.words,
                    format_html_join("", "<li><strong>{} prompts</strong> in {}: {}</li>", rows),
                )
            return "none"
        return "no policy was judged on it"

    @display(description="snapshot", ordering="id")
    def shown_id(self, snapshot: Snapshot) -> str:
        return f"snapshot {snapshot.pk}"

    @display(description="rows")
    def rows(self, snapshot: Snapshot) -> str:
        return ", ".join(f"{count} {split}" for split, count in snapshot.counts.items())

    @display(description="simulated", ordering="simulated_share")
    def simulated(self, snapshot: Snapshot) -> str:
        return f"{100 * snapshot.simulated_share:.0f} %"


HORIZONS = ("raw_text", "immediate_text", "delayed_text", "strategic_text")


def _reward_text(value: float | None) -> str:
    """A reward in [-2, 2] as its list shows it."""
    return "–" if value is None else f"{value:+.2f}"


@admin.register(RewardRecord)
class RewardRecordAdmin(FactAdmin):
    """Every reward that was ever calculated."""

    list_display = ["created", "decided", "agent", *HORIZONS, "simulated"]
    list_filter = [ByAgent, "simulated"]
    search_fields = ["=decision"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]

    @display(description="raw", ordering="raw")
    def raw_text(self, record: RewardRecord) -> str:
        return _reward_text(record.raw)

    @display(description="immediate", ordering="immediate")
    def immediate_text(self, record: RewardRecord) -> str:
        return _reward_text(record.immediate)

    @display(description="delayed", ordering="delayed")
    def delayed_text(self, record: RewardRecord) -> str:
        return _reward_text(record.delayed)

    @display(description="strategic", ordering="strategic")
    def strategic_text(self, record: RewardRecord) -> str:
        return _reward_text(record.strategic)

    @display(description="decision")
    def decided(self, record: RewardRecord) -> SafeString:
        address = reverse("decision", args=[record.decision])
        return format_html('<a class="ratchet-link" href="{}">{}</a>', address, str(record.decision)[:8])


class RewardModelEventInline(FactInline):
    model = RewardModelEvent
    fields = ["created_at", "kind", "actor", "reason", "forced"]
    readonly_fields = fields
    per_page = 25


@admin.register(RewardModelVersion)
class RewardModelVersionAdmin(FactAdmin):
    """Reward models, what they rank right of the holdout, and their history."""

    list_display = ["name", "agent", "stage", "ranks", "objective", "feedback_count", "created"]
    list_filter = [ByAgent, "stage", "objective"]
    search_fields = ["name", "sha256"]
    ordering = ["-id"]
    readonly_fields = ["created_at"]
    inlines = [RewardModelEventInline]

    @display(description="held-out feedback")
    def ranks(self, version: RewardModelVersion) -> str:
        return ranking_text(version.ranking)


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
