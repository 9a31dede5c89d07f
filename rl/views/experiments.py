"""Pages of experiments: all of them, one with its results, and the forms that make, start, ramp and stop them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from backend.http import button, page
from rl.experiments.results import experiment_verdict, results_cached
from rl.experiments.schedule import winner_promote
from rl.experiments.summary import VERDICTS, summarize
from rl.experiments.traffic import (
    ANSWERING,
    ExperimentRefused,
    arms_of,
    experiment_draft,
    experiment_ramp,
    experiment_start,
    experiment_stop,
    experiments_with_arms,
    out_of_service,
    policies_eligible,
    ramps_remaining,
)
from rl.models import Experiment
from rl.recipes.experiment_metrics import METRICS
from rl.registry import service as registry
from rl.statistics.assignment import RAMP

PER_PAGE = 30
READ, CHANGE = "rl.view_experiment", "rl.change_experiment"


def _experiment_or_404(**by: Any) -> Experiment:
    experiment = experiments_with_arms().filter(**by).first()
    if experiment is None:
        raise Http404("no such experiment")
    return experiment


@page(READ)
def experiments(request: HttpRequest) -> HttpResponse:
    """Experiments, newest first, those that run with their verdict; `?agent=` and `?page=`."""
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
        },
    )


def _verdict(experiment: Experiment) -> tuple[str, str]:
    if experiment.status == Experiment.Status.DRAFT:
        return "", ""
    verdict = experiment_verdict(results_cached(experiment))
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
        },
    )


@button(CHANGE)
def experiment_new(request: HttpRequest) -> HttpResponse:
    """A draft out of the form's fields."""
    form = request.POST
    settings: dict[str, Any] = {"ramp": _parse_int(form.get("ramp", "")), "metric": form.get("metric", "")}
    if outcome := form.get("outcome", "").strip():
        settings["metric"] = f"outcome:{outcome}"
    for name in ("goal", "allocation", "on_win", "group", "hypothesis"):
        if value := form.get(name, "").strip():
            settings[name] = value
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
        return redirect("experiments")
    for arm in arms_of(draft):
        if arm.policy is not None and not arm.is_control and arm.policy.stage not in ANSWERING:
            messages.error(
                request,
                f"{arm.policy.name} is {arm.policy.stage}: promote it to challenger before you start.",
            )
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
