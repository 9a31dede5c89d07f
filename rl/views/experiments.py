"""Pages of experiments: all of them, one with its results, and the forms that make, start, ramp and stop them."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.db.models import Prefetch
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from rl.experiments.results import experiment_verdict, results_cached, results_of
from rl.experiments.schedule import arm_promote
from rl.experiments.summary import VERDICTS, summarize
from rl.experiments.traffic import (
    ANSWERING,
    ArmOrder,
    ExperimentRefused,
    experiment_create,
    experiment_ramp,
    experiment_start,
    experiment_stop,
    out_of_service,
    ramps_remaining,
)
from rl.models import Arm, Experiment, Policy
from rl.recipes.experiment_metrics import METRICS
from rl.registry import service as registry
from rl.statistics.assignment import BASE, RAMP

PER_PAGE = 30
READ, CHANGE = "rl.view_experiment", "rl.change_experiment"


def _experiment_or_404(**by: Any) -> Experiment:
    arms = Prefetch("arms", Arm.objects.select_related("policy"))
    experiment: Experiment | None = Experiment.objects.filter(**by).prefetch_related(arms).first()
    if experiment is None:
        raise Http404("no such experiment")
    return experiment


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def experiments(request: HttpRequest) -> HttpResponse:
    """Experiments, newest first, those that run with their verdict; `?agent=` and `?page=`."""
    rows = Experiment.objects.prefetch_related(Prefetch("arms", Arm.objects.select_related("policy")))
    if agent := request.GET.get("agent"):
        rows = rows.filter(agent=agent)
    page = Paginator(rows.order_by("-pk"), PER_PAGE).get_page(request.GET.get("page"))
    listed = [(row, *_verdict(row)) for row in page.object_list]
    policies = list(
        Policy.objects.exclude(stage=Policy.Stage.REJECTED).order_by("agent", "-pk").values("name", "stage")
    )
    return render(
        request,
        "rl/experiments.html",
        {
            "page": page,
            "listed": listed,
            "agent": agent,
            "policies": policies,
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


@login_required
@permission_required(READ, raise_exception=True)
@require_safe
def experiment(request: HttpRequest, pk: int) -> HttpResponse:
    """One experiment: who answers whom, what it came to, what can be done, its history."""
    found = _experiment_or_404(pk=pk)
    try:
        results = results_cached(found)
    except ExperimentRefused as refusal:  # a draft made in the admin, without its arms
        return render(request, "rl/experiment.html", {"experiment": found, "incomplete": str(refusal)})
    may = request.user.has_perm(CHANGE)
    return render(
        request,
        "rl/experiment.html",
        {
            "experiment": found,
            "summary": summarize(results),
            "events": list(found.events.all()[:100]),
            "ramps": ramps_remaining(found) if may else [],
            "may_start": may and found.status == Experiment.Status.DRAFT,
            "may_stop": may and found.status != Experiment.Status.STOPPED,
            "winners": [
                one.name
                for one in results.challengers
                if one.verdict == "better" and one.arm.policy is not None
            ]
            if may and found.status == Experiment.Status.RUNNING
            else [],
            "idle": out_of_service(found),
        },
    )


@login_required
@permission_required(CHANGE, raise_exception=True)
@require_POST
def experiment_new(request: HttpRequest) -> HttpResponse:
    """A draft out of the form's fields."""
    sent = request.POST
    challenger, control = sent.get("challenger", ""), sent.get("control", "")
    policy = Policy.objects.filter(name=challenger).first()
    settings: dict[str, Any] = {"ramp": _parse_int(sent.get("ramp", "")), "metric": sent.get("metric", "")}
    if outcome := sent.get("outcome", "").strip():
        settings["metric"] = f"outcome:{outcome}"
    for name in ("goal", "allocation", "on_win", "group", "hypothesis"):
        if value := sent.get(name, "").strip():
            settings[name] = value
    try:
        if policy is None:
            raise ExperimentRefused("expected a policy to try")
        if not control:
            champion = registry.champion_of(policy.agent)
            control = champion.name if champion else BASE
        made = experiment_create(
            policy.agent,
            sent.get("name", "").strip(),
            [ArmOrder(control, "control"), ArmOrder(challenger, "challenger")],
            actor=request.user.get_username(),
            **settings,
        )
    except ExperimentRefused as refusal:
        messages.error(request, str(refusal))
        return redirect("experiments")
    if policy.stage not in ANSWERING:
        messages.error(
            request, f"{policy.name} is {policy.stage}: promote it to challenger before you start."
        )
    return redirect("experiment", made.pk)


@login_required
@permission_required(CHANGE, raise_exception=True)
@require_POST
def experiment_change(request: HttpRequest, pk: int) -> HttpResponse:
    """Start, ramp, stop, or promote an arm; what the service says is shown."""
    found = _experiment_or_404(pk=pk)
    actor, reason = request.user.get_username(), request.POST.get("reason", "").strip()
    action = request.POST.get("action", "")
    try:
        if action == "start":
            experiment_start(found, actor=actor)
            said = f"{found.name} runs now."
        elif action == "ramp":
            ramped = experiment_ramp(found, _parse_int(request.POST.get("ramp", "")), actor=actor)
            said = f"{found.name} takes {ramped.ramp} % of the units now."
        elif action == "stop":
            experiment_stop(found, actor=actor, reason=reason)
            said = f"{found.name} is stopped: everybody gets the champion."
        elif action == "promote":
            said = _promote(found, request.POST.get("arm", ""), actor, reason)
        else:
            raise ExperimentRefused(f"expected start, ramp, stop or promote, found {action[:40]!r}")
    except (ExperimentRefused, registry.RegistryRefused) as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, said)
    return redirect("experiment", pk)


def _promote(found: Experiment, name: str, actor: str, reason: str) -> str:
    results = results_of(found)  # not what was believed a moment ago
    winner = next((one for one in results.challengers if one.name == name), None)
    if winner is None:
        raise ExperimentRefused(f"expected one of {', '.join(one.name for one in results.challengers)}")
    policy = arm_promote(found, winner, results, actor=actor, reason=reason)
    return f"{policy.name} is champion now; {found.name} is over."


def _parse_int(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
