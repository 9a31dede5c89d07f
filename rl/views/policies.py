"""Pages of the registry: versions of every agent, one policy with its gate report, two side by side, the moves."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_POST, require_safe

from backend.http import redirect_back
from feedback.selectors import feedback_counts_cached
from rl.charts.gate_reports import report_lines
from rl.datasets.prompt_clusters import near_identical_prompts
from rl.export.service import ExportOrderRefused, export_forms, opponents, policy_job_place
from rl.gates.headlines import headline_of, share_of
from rl.models import Policy, PolicyEvent
from rl.models.runs import RunRefused
from rl.registry import service as registry
from rl.registry.checklist import policy_verdict, promotion_of
from rl.registry.comparisons import policy_diff
from rl.registry.incumbents import incumbent_sync, incumbents_sync
from rl.registry.judging import round_standing, rounds_of
from rl.selectors import (
    policy_ancestors,
    policy_charts,
    policy_compared_first,
    policy_lineage,
    policy_overview,
    policy_relatives,
)
from rl.views.benchmarks import policy_benchmarks
from rl.views.off_policy import off_policy_summary

NEWEST = 50
"""Versions of an agent that are listed."""

READ = "rl.view_policy"
MOVE = "rl.change_policy"


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def policies(request: HttpRequest) -> HttpResponse:
    """Every agent's versions, newest first, with reward and accuracy over them; `?agent=`."""
    incumbents_sync(feedback_counts_cached())
    by_agent: dict[str, list[Policy]] = {}
    rows = Policy.objects.select_related("parent", "run").order_by("agent", "-pk")
    if agent_filter := request.GET.get("agent"):
        rows = rows.filter(agent=agent_filter)
    for policy in rows:
        by_agent.setdefault(policy.agent, []).append(policy)
    agent_rows = [
        {
            "agent": agent,
            "rows": [_row(policy) for policy in found[:NEWEST]],
            "charts": policy_charts(found[::-1]),
            "lineage": policy_lineage(agent, found[::-1]),
            "names": [policy.name for policy in found],
            "beside": policy_compared_first(found),
        }
        for agent, found in by_agent.items()
    ]  # fmt: skip
    return render(request, "rl/policies.html", {"agents": agent_rows, "asked": agent_filter})


def _row(policy: Policy) -> dict[str, Any]:
    return {
        "policy": policy,
        "liked": share_of(policy.metrics, "liked"),
        "headline": headline_of(policy.metrics),
        "against": policy.metrics.get("against"),
        "reward": share_of(policy.metrics, "average_reward"),
    }


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def policy(request: HttpRequest, name: str) -> HttpResponse:
    """One policy: figures, lineage, the gate's report, files, history, and the moves for who may make them."""
    incumbents_sync(feedback_counts_cached())
    policy_row = get_object_or_404(Policy.objects.select_related("parent", "run"), name=name)
    overview = policy_overview(policy_row)
    gate_event = (
        policy_row.events.filter(kind__in=[PolicyEvent.Kind.GATED, PolicyEvent.Kind.PROMOTED])
        .exclude(verdicts={})
        .first()
    )
    may = request.user.has_perm(MOVE)
    siblings = Policy.objects.filter(agent=policy_row.agent).exclude(pk=policy_row.pk).order_by("-pk")
    return render(
        request,
        "rl/policy.html",
        {
            "policy": policy_row,
            "overview": overview,
            "benchmarks": policy_benchmarks(policy_row),
            "off_policy": off_policy_summary(overview.evaluations),
            "clusters": next(filter(None, map(near_identical_prompts, overview.evaluations)), None),
            "judged": gate_event,
            "report_lines": report_lines(gate_event.verdicts.get("verdicts", [])) if gate_event else [],
            "ancestors": policy_ancestors(policy_row),
            "lineage": policy_lineage(policy_row.agent, policy_relatives(policy_row)),
            "others": list(siblings.values_list("name", flat=True)[:NEWEST]),
            "promotion": promotion_of(policy_row, may_move=may),
            "may_work": may and policy_row.run is not None,
            "working": policy_row.run is not None and policy_row.run.is_followed,
            "judging_rounds": [(one, round_standing(one)) for one in rounds_of(policy_row)[:5]],
            "may_judge": may and policy_row.kind != Policy.Kind.RECORDED,
            "verdict": policy_verdict(policy_row),
            "opponents": opponents(policy_row) if may else [],
            "export_forms": export_forms(policy_row) if may else {},
        },
    )


@login_required
@permission_required(MOVE, raise_exception=True)
@require_POST
def policy_follow_up(request: HttpRequest, name: str) -> HttpResponse:
    """Have a policy judged or exported by the workers: `job=judge`, or `job=export` with `as=gguf:q8_0`."""
    found = get_object_or_404(Policy.objects.select_related("run"), name=name)
    try:
        policy_job_place(
            found,
            request.POST.get("job", ""),
            export_as=request.POST.get("as", ""),
            compare=request.POST.get("compare", ""),
        )
    except (RunRefused, ExportOrderRefused) as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"The workers {request.POST['job']} {found.name}.")
    return redirect_back(request, "policy", name)


@login_required
@permission_required(MOVE, raise_exception=True)
@require_POST
def policy_move(request: HttpRequest, name: str) -> HttpResponse:
    """Promote, reject, retire or roll back; what the registry says is shown."""
    found = get_object_or_404(Policy, name=name)
    incumbent_sync(found.agent)
    try:
        moved = registry.policy_move(
            found,
            request.POST.get("move", ""),
            actor=request.user.get_username(),
            reason=request.POST.get("reason", "").strip(),
            force=request.POST.get("force") == "on",
        )
    except registry.RegistryRefused as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"{moved.name} is {moved.stage} now.")
    return redirect_back(request, "policy", name)


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def policies_compared(request: HttpRequest) -> HttpResponse:
    """Two versions side by side: `?left=` and `?right=`."""
    names = [request.GET.get(side, "") for side in ("left", "right")]
    rows = {row.name: row for row in Policy.objects.filter(name__in=names)}
    if set(names) - set(rows):
        raise Http404("expected left and right to be names of policies")
    left, right = (rows[name] for name in names)
    diff = policy_diff(left, right)
    sections = [
        ("Figures", list(diff["figures"].items()), "Neither was judged."),
        ("Data", list(diff["data"].items()), "They learnt from the same data."),
        ("Recipe", list(diff["recipe"].items()), "They were trained by the same recipe."),
    ]
    gone = PolicyEvent.objects.filter(policy__in=[left, right], kind=PolicyEvent.Kind.PRUNED)
    context = {
        "left": left,
        "right": right,
        "diff": diff,
        "sections": sections,
        "unjudged": next((row.name for row in (left, right) if not row.metrics), left.name),
        "gone": sorted(set(gone.values_list("policy__name", flat=True))),
    }
    return render(request, "rl/policies_compared.html", context)
