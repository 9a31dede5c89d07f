"""Pages of experiments: all of them, one with its results, and the forms that make, start, ramp and stop them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_http_methods

from backend.http import button, page
from rl.evaluation.judging import PROMPTS
from rl.experiments.results import Results, results_cached
from rl.experiments.schedule import ramp_next, winner_promote
from rl.experiments.summary import VERDICTS, effect_text, summarize
from rl.experiments.traffic import (
    ExperimentRefused,
    experiment_draft,
    experiment_ramp,
    experiment_start,
    experiment_stop,
    experiments_with_arms,
    out_of_service,
    policies_eligible,
    ramps_remaining,
)
from rl.models import Experiment, JudgingRound
from rl.recipes.experiment_metrics import METRICS
from rl.registry import service as registry
from rl.serving.shadow import challenger_of, shadow_figures
from rl.statistics.assignment import RAMP

PER_PAGE = 30
READ, CHANGE = "rl.view_experiment", "rl.change_experiment"


def _experiment_or_404(**by: object) -> Experiment:
    experiment = experiments_with_arms().filter(**by).first()
    if experiment is None:
        raise Http404("no such experiment")
    return experiment


@page(READ)
def experiments(request: HttpRequest) -> HttpResponse:
    """Experiments, newest first, those that run with their verdict; `?agent=` and `?page=`."""
    return _list(request)


def _list(request: HttpRequest, *, making: bool = False) -> HttpResponse:
    """The list, with the form of a new one above it; making: the form is unfolded, with what was typed."""
    rows = experiments_with_arms()
    if agent := request.GET.get("agent"):
        rows = rows.filter(agent=agent)
    page = Paginator(rows.order_by("-pk"), PER_PAGE).get_page(request.GET.get("page"))
    listed = [(row, *_verdict(row)) for row in page.object_list]
    return render(
        request,
        "rl/experiments.html",
        {
            "page": page,
            "listed": listed,
            "agent": agent,
            "policies": policies_eligible().values("name", "stage"),
            "metrics": METRICS.values(),
            "ramps": RAMP,
            "may_change": request.user.has_perm(CHANGE),
            "making": making or not listed,
            "given": request.POST,
        },
    )


def _verdict(experiment: Experiment) -> tuple[str, str]:
    if experiment.status == Experiment.Status.DRAFT or experiment.shadow:
        return "", ""
    verdict = results_cached(experiment).verdict
    return verdict, VERDICTS[verdict]


@page(READ)
def experiment(request: HttpRequest, pk: int) -> HttpResponse:
    """One experiment: who answers whom, what it came to, what can be done, its history."""
    experiment_row = _experiment_or_404(pk=pk)
    try:
        results = results_cached(experiment_row)
    except ExperimentRefused as refusal:  # a draft made in the admin, without its arms
        return render(
            request, "rl/experiment.html", {"experiment": experiment_row, "incomplete": str(refusal)}
        )
    may = request.user.has_perm(CHANGE)
    shadow = _shadow(experiment_row) if experiment_row.shadow else {}
    return render(
        request,
        "rl/experiment.html",
        {
            "experiment": experiment_row,
            "summary": summarize(results),
            "events": list(experiment_row.events.all()[:100]),
            "ramps": ramps_remaining(experiment_row) if may else [],
            "may_start": may and experiment_row.status == Experiment.Status.DRAFT,
            "may_stop": may and experiment_row.status != Experiment.Status.STOPPED,
            "winners": [one.name for one in results.winners]
            if may and experiment_row.status == Experiment.Status.RUNNING
            else [],
            "idle": out_of_service(experiment_row),
            **_ramp_shown(results),
            **shadow,
        },
    )


def _ramp_shown(results: Results) -> dict[str, object]:
    experiment = results.experiment
    to = ramp_next(experiment) if experiment.auto_ramp else None
    loss = None if to is None else results.loss_excluded(to)
    return {"ramp_to": to, "ramp_loss": None if loss is None else effect_text(-loss, results.rule.metric)}


def _shadow(experiment: Experiment) -> dict[str, object]:
    policy = challenger_of(experiment)
    rounds = JudgingRound.objects.filter(
        policy=policy, created_at__gte=experiment.started_at or timezone.now()
    )
    return {
        "shadow": shadow_figures(experiment),
        "shadow_policy": policy.name,
        "rounds": rounds.order_by("pk"),
        "judged_prompts": PROMPTS,
    }


@login_required
@permission_required(CHANGE, raise_exception=True)
@require_http_methods(["GET", "HEAD", "POST"])
def experiment_new(request: HttpRequest) -> HttpResponse:
    """The form of a new experiment, and a draft out of its fields."""
    if request.method != "POST":
        return _list(request, making=True)
    form = request.POST
    settings: dict[str, Any] = {"ramp": _parse_int(form.get("ramp", "")), "metric": form.get("metric", "")}
    if outcome := form.get("outcome", "").strip():
        settings["metric"] = f"outcome:{outcome}"
    if form.get("shadow", "").strip():
        settings["shadow"] = _parse_int(form["shadow"]) or 101  # a fault is told as such
    for name in ("goal", "allocation", "on_win", "group", "hypothesis", "shadow_budget_usd", "not_inferior"):
        if value := form.get(name, "").strip():
            settings[name] = value
    if form.get("auto_ramp"):
        settings["auto_ramp"] = True
    try:
        draft = experiment_draft(
            form.get("name", "").strip(),
            [form.get("challenger", "")],
            control=form.get("control", ""),
            actor=request.user.get_username(),
            **settings,
        )
    except ExperimentRefused as refusal:
        messages.error(request, str(refusal))
        return _list(request, making=True)
    return redirect("experiment", draft.pk)


@button(CHANGE)
def experiment_change(request: HttpRequest, pk: int) -> HttpResponse:
    """Start, ramp, stop, or promote an arm; what the service says is shown."""
    experiment_row = _experiment_or_404(pk=pk)
    actor, reason = request.user.get_username(), request.POST.get("reason", "").strip()
    action = request.POST.get("action", "")
    try:
        if action == "start":
            experiment_start(experiment_row, actor=actor)
            message = f"{experiment_row.name} runs now."
        elif action == "ramp":
            ramped = experiment_ramp(experiment_row, _parse_int(request.POST.get("ramp", "")), actor=actor)
            message = f"{experiment_row.name} takes {ramped.ramp} % of the units now."
        elif action == "stop":
            experiment_stop(experiment_row, actor=actor, reason=reason)
            message = f"{experiment_row.name} is stopped: everybody gets the champion."
        elif action == "promote":
            policy = winner_promote(experiment_row, request.POST.get("arm", ""), actor=actor, reason=reason)
            message = f"{policy.name} is champion now; {experiment_row.name} is over."
        else:
            raise ExperimentRefused(f"expected start, ramp, stop or promote, found {action[:40]!r}")
    except (ExperimentRefused, registry.RegistryRefused) as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, message)
    return redirect("experiment", pk)


def _parse_int(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
