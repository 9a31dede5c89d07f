"""Pages of reward models: every agent's versions with their ranking, one of them with its history and moves."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from rl.gates.headlines import share_of
from rl.models import RewardModelVersion, TrainingRun
from rl.reward_models import service as reward_model_service
from rl.views.policies import MOVE, READ


def _row(version: RewardModelVersion) -> dict[str, Any]:
    return {
        "version": version,
        "share": share_of({"ranking": version.ranking}, "ranking"),
        "words": reward_model_service.ranking_text(version.ranking),
        "what": reward_model_service.WORDS.get(str(version.ranking.get("what")), "held-out ratings"),
        "better": reward_model_service.ranks_above_chance(version.ranking),
    }


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def reward_models(request: HttpRequest) -> HttpResponse:
    """Every reward model, newest first within its agent; `?agent=`."""
    rows = RewardModelVersion.objects.order_by("agent", "-pk")
    if agent_filter := request.GET.get("agent"):
        rows = rows.filter(agent=agent_filter)
    return render(
        request, "rl/reward_models.html", {"rows": [_row(row) for row in rows], "asked": agent_filter}
    )


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def reward_model(request: HttpRequest, name: str) -> HttpResponse:
    """One reward model: what it ranks right, its files, what learnt from it, history, and the moves."""
    found = get_object_or_404(RewardModelVersion.objects.select_related("run"), name=name)
    learners = TrainingRun.objects.filter(agent=found.agent, recipe__reward__icontains=f"model:{found.name}")
    return render(
        request,
        "rl/reward_model.html",
        {
            **_row(found),
            "difference": share_of(found.ranking, "difference"),
            "events": found.events.all()[:100],
            "learners": [run for run in learners.select_related("policy") if registry_named(run, found)],
            "moves": list(reward_model_service.MOVES[found.stage]) if request.user.has_perm(MOVE) else [],
        },
    )


def registry_named(run: TrainingRun, version: RewardModelVersion) -> bool:
    """True if a run's rewards name this very version, and not one whose name begins with its name."""
    return f"model:{version.name}" in [spec.strip() for spec in str(run.recipe["reward"]).split(",")]


@login_required
@permission_required(MOVE, raise_exception=True)
@require_POST
def reward_model_move(request: HttpRequest, name: str) -> HttpResponse:
    """Promote or retire; what the registry says is shown."""
    found = get_object_or_404(RewardModelVersion, name=name)
    try:
        moved = reward_model_service.reward_model_move(
            found,
            request.POST.get("move", ""),
            actor=request.user.get_username(),
            reason=request.POST.get("reason", "").strip(),
            force=request.POST.get("force") == "on",
        )
    except reward_model_service.RewardModelRefused as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"{moved.name} is {moved.stage} now.")
    return redirect("reward-model", name)
