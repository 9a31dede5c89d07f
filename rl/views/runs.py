"""Pages of rl: the start page and the runs."""

from __future__ import annotations

import re

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from backend.redirects import redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.selectors import SLUG_PATTERN
from rl.charts.curves import curve_of
from rl.datasets.evidence import REASONS as EVIDENCE_REASONS
from rl.datasets.examples import EXAMPLE_REASONS
from rl.datasets.pairs import REASONS as PAIR_REASONS
from rl.gates.figures import headline_of
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic, order_place
from rl.jobs.lifecycle import run_log_tail
from rl.jobs.stages import stages_of
from rl.models import TrainingRun
from rl.reward_models.service import ranking_text
from rl.reward_models.specs import reward_model_of
from rl.selectors import agent_cards, run_eta_s, run_get, run_series, runs_newest
from rl.views.next_step import stations_of, step_next

RUNS_PER_PAGE = 30

CURVES = (
    ("loss", "Loss", False, "should fall, then level off"),
    ("rewards/accuracies", "Reward accuracy", True, "share of pairs whose chosen answer it prefers"),
    ("rewards/margins", "Reward margin", False, "how far apart chosen and rejected are; should grow"),
    ("reward", "Reward", False, "what its own answers earn; should grow"),
    ("eval_reward", "Held-out reward", False, "the same on prompts it does not learn from"),
    (
        "kl",
        "KL to the reference",
        False,
        "how far its answers moved from the base model's, or the policy's it starts from, in nats; never below 0",
    ),
    (
        "log_ratio",
        "Log-ratio to the base model",
        False,
        "how much likelier than the base it finds what it learns from, nats per token; below 0: less likely",
    ),
    ("entropy", "Entropy", False, "how undecided it is, in nats per token; near 0 it repeats itself"),
    ("clip_fraction", "Clip fraction", True, "share of updates held back"),
    (
        "explained_variance",
        "Explained variance",
        False,
        "how well the value head foresees rewards; 1 is best",
    ),
    ("learning_rate", "Learning rate", False, "size of a step: up, then down to 0"),
    ("tokens_per_second", "Tokens per second", False, "speed of training"),
)
"""Figure as logged, its title, whether it is a share, and how it is read."""


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_safe
def home(request: HttpRequest) -> HttpResponse:
    """Home page: the state of every agent, and its next action."""
    cards = agent_cards()
    if not cards and request.user.has_perm(SCOPE_PERMISSIONS["operate"]):
        return redirect("start")
    shown = [{"card": card, "stations": stations_of(card), "next": step_next(card)} for card in cards]
    return render(request, "rl/home.html", {"shown": shown, "live": any(card.works for card in cards)})


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_safe
def runs(request: HttpRequest) -> HttpResponse:
    """Training runs, newest first; `?agent=` and `?page=`."""
    agent = request.GET.get("agent") or None
    if agent is not None and not re.fullmatch(SLUG_PATTERN, agent):
        raise Http404("no such agent")
    page = Paginator(runs_newest(agent), RUNS_PER_PAGE).get_page(request.GET.get("page"))
    return render(request, "rl/runs.html", {"page": page, "agent": agent})


@login_required
@permission_required("rl.change_trainingrun", raise_exception=True)
@require_POST
def run_new(request: HttpRequest) -> HttpResponse:
    """Have an agent trained on what was rated, by the method its feedback asks for, and the policy judged; the workers
    take it up. A person promotes it."""
    agent = request.POST.get("agent", "")
    if not re.fullmatch(SLUG_PATTERN, agent):
        raise Http404("no such agent")
    try:
        placed = order_place(order_automatic(agent, actor=request.user.get_username()), judge=True)
    except ValueError as refusal:
        messages.error(request, str(refusal))
        return redirect_back(request, "home")
    messages.success(request, f"Run {placed.pk} waits for a worker.")
    return redirect_back(request, "run", placed.pk)


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_safe
def run(request: HttpRequest, pk: int) -> HttpResponse:
    """One run: its state, curves, recipe, and what was left out of its data."""
    found = run_get(pk)
    if found is None:
        raise Http404(f"no run {pk}")
    series = run_series(found)
    curves = [
        (curve, hint)
        for name, title, share, hint in CURVES
        if (curve := curve_of(title, series.get(name, []), share=share)) is not None
    ]
    policy = getattr(found, "policy", None)
    judge = getattr(found, "reward_model", None) or reward_model_of(found)
    return render(
        request,
        "rl/run.html",
        {
            "run": found,
            "curves": curves,
            "policy": policy,
            "headline": headline_of(policy.metrics) if policy else None,
            "stages": stages_of(found),
            "judge": judge,
            "judge_words": ranking_text(judge.ranking) if judge else "",
            "epochs": [str(folder) for folder in lifecycle.run_epochs(found)],
            "left_out": _left_out(found),
            "recipe": sorted((name, value) for name, value in found.recipe.items() if name != "seed"),
            "eta": run_eta_s(found),
            "live": found.status in (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING)
            or found.is_followed,
            "may_cancel": found.status in (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING)
            and request.user.has_perm("rl.change_trainingrun"),
            "log": run_log_tail(found) if request.user.has_perm("rl.view_trainingrun") else "",
            "libraries": sorted(found.libraries.items()),
            "hardware": sorted(
                (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list) else value)
                for name, value in found.hardware.items()
                if not isinstance(value, dict) and value not in ([], None, "")
            ),
            "reasons": sorted((found.hardware.get("reasons") or {}).items()),
        },
    )


def _left_out(found: TrainingRun) -> list[tuple[str, str, int]]:
    """Reason, in words, and how many: the most first."""
    counted = (found.snapshot.left_out if found.snapshot else {}).items()
    words = EVIDENCE_REASONS | EXAMPLE_REASONS | PAIR_REASONS
    return sorted(((name, words.get(name, ""), count) for name, count in counted), key=lambda row: -row[2])


@login_required
@permission_required("rl.change_trainingrun", raise_exception=True)
@require_POST
def run_cancel(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop a run, in the name of who pressed it."""
    found = run_get(pk)
    if found is None:
        raise Http404(f"no run {pk}")
    try:
        cancelled = lifecycle.run_cancel(found, actor=request.user.get_username())
    except lifecycle.RunRefused as refusal:
        messages.error(request, str(refusal))
    else:
        over = cancelled.status == TrainingRun.Status.CANCELLED
        messages.success(
            request, f"Run {pk} is cancelled." if over else f"Run {pk} stops after its present step."
        )
    return redirect("run", pk)
