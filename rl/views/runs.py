"""Pages of rl: the start page, the runs, and several runs side by side."""

from __future__ import annotations

import re

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from backend.http import button, page, redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.selectors import SLUG_PATTERN
from rl.charts.lines import SLOTS
from rl.charts.run_figures import overfit_words, run_charts, runs_charts
from rl.datasets.evidence import REASONS as EVIDENCE_REASONS
from rl.datasets.examples import EXAMPLE_REASONS
from rl.datasets.pairs import REASONS as PAIR_REASONS
from rl.gates.headlines import headline_of
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic, order_place
from rl.jobs.lifecycle import run_log_tail
from rl.jobs.run_diff import runs_diff
from rl.jobs.stages import stages_of
from rl.models import TrainingRun
from rl.models.runs import RunRefused
from rl.registry.checklist import policy_verdict
from rl.reward_models.service import ranking_text, reward_model_of
from rl.selectors import agent_cards, run_eta_s, run_get, run_series, runs_newest
from rl.views.next_step import stations_of, step_next

RUNS_PER_PAGE = 30


@page(SCOPE_PERMISSIONS["rate"])
def home(request: HttpRequest) -> HttpResponse:
    """Home page: the state of every agent, and its next action."""
    cards = agent_cards()
    if not cards and request.user.has_perm(SCOPE_PERMISSIONS["operate"]):
        return redirect("start")
    shown = [{"card": card, "stations": stations_of(card), "next": step_next(card)} for card in cards]
    return render(request, "rl/home.html", {"shown": shown, "live": any(card.works for card in cards)})


@page(SCOPE_PERMISSIONS["rate"])
def runs(request: HttpRequest) -> HttpResponse:
    """Training runs, newest first; `?agent=` and `?page=`."""
    agent = request.GET.get("agent") or None
    if agent is not None and not re.fullmatch(SLUG_PATTERN, agent):
        raise Http404("no such agent")
    page = Paginator(runs_newest(agent), RUNS_PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "rl/runs.html", {"page": page, "agent": agent, "most": SLOTS})


@page(SCOPE_PERMISSIONS["rate"])
def runs_compared(request: HttpRequest) -> HttpResponse:
    """Two to SLOTS runs on the same charts, with a table of what differs: `?run=3&run=5`."""
    run_names = list(dict.fromkeys(request.GET.getlist("run")))
    if not 2 <= len(run_names) <= SLOTS:
        messages.error(request, f"Choose 2 to {SLOTS} runs to compare; found {len(run_names)}.")
        return redirect("runs")
    found = [run_get(int(pk)) if re.fullmatch(r"[0-9]{1,18}", pk) else None for pk in run_names]
    rows = [row for row in found if row is not None]
    if len(rows) < len(run_names):
        raise Http404(f"expected run to be numbers of runs; found {', '.join(run_names)}")
    series = [run_series(row) for row in rows]
    agents = {row.agent for row in rows}
    context = {
        "runs": rows,
        "numbers": [row.pk for row in rows],
        "agent": agents.pop() if len(agents) == 1 else "",
        "charts": runs_charts([(f"run {row.pk}", one) for row, one in zip(rows, series, strict=True)]),
        "diff": runs_diff(rows, series),
    }
    return render(request, "rl/runs_compared.html", context)


@button("rl.change_trainingrun")
def run_new(request: HttpRequest) -> HttpResponse:
    """Have an agent trained on what was rated, by the method its feedback asks for, and the policy judged; the workers
    take it up. A person promotes it."""
    agent = request.POST.get("agent", "")
    if not re.fullmatch(SLUG_PATTERN, agent):
        raise Http404("no such agent")
    try:
        order = order_automatic(agent, request.POST.get("method", "auto"), actor=request.user.get_username())
        placed = order_place(order, judge=True)
    except ValueError as refusal:
        messages.error(request, str(refusal))
        return redirect_back(request, "home")
    messages.success(request, f"Run {placed.pk} waits for a worker.")
    return redirect_back(request, "run", placed.pk)


@page(SCOPE_PERMISSIONS["rate"])
def run(request: HttpRequest, pk: int) -> HttpResponse:
    """One run: its state, curves, recipe, and what was left out of its data."""
    run_row = run_get(pk)
    if run_row is None:
        raise Http404(f"no run {pk}")
    policy = getattr(run_row.kept_run, "policy", None)
    series = run_series(run_row)
    judge = getattr(run_row, "reward_model", None) or reward_model_of(run_row)
    return render(
        request,
        "rl/run.html",
        {
            "run": run_row,
            "charts": run_charts(series),
            "overfit": overfit_words(series),
            "policy": policy,
            "headline": headline_of(policy.metrics) if policy else None,
            "verdict": policy_verdict(policy) if policy and request.user.has_perm("rl.view_policy") else None,
            "stages": stages_of(run_row),
            "judge": judge,
            "judge_words": ranking_text(judge.ranking) if judge else "",
            "epochs": [str(folder) for folder in lifecycle.run_epochs(run_row)],
            "left_out": _omissions(run_row),
            "recipe": sorted((name, value) for name, value in run_row.recipe.items() if name != "seed"),
            "eta": run_eta_s(run_row),
            "live": run_row.is_unfinished or run_row.kept_run.is_followed,
            "may_cancel": run_row.is_unfinished and request.user.has_perm("rl.change_trainingrun"),
            "log": run_log_tail(run_row) if request.user.has_perm("rl.view_trainingrun") else "",
            "libraries": sorted(run_row.libraries.items()),
            "hardware": sorted(
                (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value)
                for name, value in run_row.hardware.items()
                if not isinstance(value, dict) and value not in ([], None, "")
            ),
            "reasons": sorted((run_row.hardware.get("reasons") or {}).items()),
        },
    )


def _omissions(found: TrainingRun) -> list[tuple[str, str, int]]:
    """Reason, in words, and how many: the most first."""
    counted = (found.snapshot.left_out if found.snapshot else {}).items()
    words = EVIDENCE_REASONS | EXAMPLE_REASONS | PAIR_REASONS
    return sorted(((name, words.get(name, ""), count) for name, count in counted), key=lambda row: -row[2])


@button("rl.change_trainingrun")
def run_cancel(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop a run, in the name of who pressed it."""
    found = run_get(pk)
    if found is None:
        raise Http404(f"no run {pk}")
    try:
        cancelled = lifecycle.run_cancel(found, actor=request.user.get_username())
    except RunRefused as refusal:
        messages.error(request, str(refusal))
    else:
        over = cancelled.status == TrainingRun.Status.CANCELLED
        messages.success(
            request, f"Run {pk} is cancelled." if over else f"Run {pk} stops after its present step."
        )
    return redirect("run", pk)
