"""Pages of rl: the start page with each agent's next step, the runs, and several runs side by side."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from backend.http import button, page, redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.selectors import SLUG_PATTERN
from rl.charts.lines import SLOTS, number_text
from rl.charts.run_figures import overfit_words, run_charts, runs_charts
from rl.datasets.rows import REASONS
from rl.gates.headlines import headline_of
from rl.gates.verdict import OPEN as NOT_COMPARED
from rl.jobs import lifecycle
from rl.jobs.estimates import order_automatic, order_place
from rl.jobs.lifecycle import run_log_tail
from rl.jobs.stages import stages_of
from rl.models import Policy, TrainingRun
from rl.models.runs import RunRefused, method_title
from rl.recipes import DATASET_CONFIG
from rl.registry.checklist import policy_verdict
from rl.reward_models.service import ranking_text, reward_model_of
from rl.selectors import STOPPED_STATUSES, AgentCard, agent_cards, run_get, run_series, runs_newest

DONE, NOW, OPEN, FAULT = "done", "now", "open", "fault"
"""Drawn states of a station: passed, being worked at or the next to reach, not reached, stopped there."""


@dataclass(frozen=True)
class Stations:
    """The state of each station of the loop."""

    decisions: str
    ratings: str
    training: str
    evaluation: str
    answers: str


@dataclass(frozen=True)
class LoopStep:
    """Next step of an agent: `kind` is what the page offers for it, `words` why."""

    kind: str
    """record, rate, train, watch, look, judge or promote"""
    words: str
    policy: str = ""
    """The policy to judge or promote."""
    may_train: bool = False
    """True if there is enough to train on and nothing is being trained."""


def stations_of(card: AgentCard) -> Stations:
    """Stations of the loop: those reached, and the next to reach as NOW. A policy from elsewhere needs no ratings and
    no training to be evaluated."""
    champion = card.policy is not None and card.policy.stage == Policy.Stage.CHAMPION
    reached = {
        "decisions": card.counts.decisions > 0,
        "ratings": _is_rated(card),
        "training": _is_trained(card),
        "evaluation": card.headline is not None,
        "answers": champion or card.incumbent is not None,
    }
    needless = ("ratings", "training") if card.newest is not None else ()
    first = next((name for name, done in reached.items() if not done and name not in needless), None)
    states = {name: DONE if done else NOW if name == first else OPEN for name, done in reached.items()}
    if card.works:
        states["training"] = NOW
    elif card.run is not None and card.run.status in STOPPED_STATUSES:
        states["training"] = FAULT
    return Stations(**states)


def _is_trained(card: AgentCard) -> bool:
    """True if its newest policy comes from a training here."""
    return card.newest is not None and card.newest.run_id is not None


def _is_rated(card: AgentCard) -> bool:
    """True if there is evidence enough for a first training, or some that a training took."""
    found = card.counts.evidence
    return found >= feedback_minimum() or (found > 0 and (_is_trained(card) or card.works))


class GuideStep(NamedTuple):
    """One step of the guided start."""

    key: str
    title: str
    state: str
    """DONE, NOW, OPEN or FAULT."""
    effect: str
    """Effect of the step."""
    takes: str
    """About how long it takes."""


GUIDE = (
    (
        "connect",
        "Connect your app",
        "Its answers are recorded as decisions; then you rate them.",
        "two minutes",
    ),
    ("rate", "Rate", "A first training needs {needed} ratings.", "5 seconds a rating"),
    ("train", "Train", "The new policy is then evaluated on held-out prompts.", "a few minutes"),
    ("compare", "Compare", "The gate says whether the new policy is shown to be better.", "a minute"),
    ("promote", "Promote", "From then on the champion answers for the agent.", "seconds"),
    ("ask", "Ask it", "Each answer is recorded as a decision and can be rated in turn.", "seconds"),
)
"""Steps of the guided start: key, title, what happens after it, about how long it takes."""

ENOUGH = "There is enough feedback for a first training."
"""Effect of rating where nothing more is needed."""


def guide_of(card: AgentCard | None) -> tuple[GuideStep, ...]:
    """The guided start as far as this agent has come (None: no agent yet); exactly one step is NOW or FAULT. Read off
    what is stored, so that who left goes on where they were. A step that was not needed, such as the training of a
    policy from elsewhere, stays OPEN before it."""
    steps_done = dict.fromkeys((step[0] for step in GUIDE), False)
    needless: list[str] = []
    fault = ""
    if card is not None:
        newest, run = card.newest, card.run
        champion = card.policy is not None and card.policy.stage == Policy.Stage.CHAMPION
        trained = newest is not None and not card.works
        is_evaluated = trained and newest is not None and headline_of(newest.metrics) is not None
        # between a champion and a newer candidate it is the candidate that is led on
        answers = champion and (newest == card.policy or newest is None or newest.stage in FINAL_STAGES)
        steps_done |= {
            "connect": card.counts.decisions > 0,
            "rate": newest is not None or card.works or card.counts.evidence >= feedback_minimum(),
            "train": trained,
            "compare": is_evaluated or (trained and answers),
            "promote": trained and answers,
        }
        if newest is None and run is not None and run.status in STOPPED_STATUSES:
            fault = "train"
        facts = {"rate": _is_rated(card), "train": _is_trained(card) and not card.works}
        needless = [key for key, is_true in facts.items() if steps_done[key] and not is_true]
    at = next(key for key, done in steps_done.items() if not done)
    return tuple(
        GuideStep(
            key,
            title,
            (FAULT if key == fault else NOW)
            if key == at
            else DONE
            if steps_done[key] and key not in needless
            else OPEN,
            ENOUGH if key == "rate" and steps_done["rate"] else after.format(needed=feedback_minimum()),
            takes,
        )
        for key, title, after, takes in GUIDE
    )


FINAL_STAGES = (Policy.Stage.REJECTED, Policy.Stage.RETIRED)
"""Stages of a policy that is led no further."""


def step_next(card: AgentCard) -> LoopStep:
    """The one thing that brings this agent on, and whether it can be trained besides."""
    enough = card.counts.evidence >= feedback_minimum() and not card.works
    return replace(_step(card), may_train=enough)


def _step(card: AgentCard) -> LoopStep:
    feedback, newest, run = card.counts.feedback, card.newest, card.run
    refused = newest and newest.stage in (Policy.Stage.CANDIDATE, Policy.Stage.REJECTED) and card.gate_refusal
    if newest and newest.stage == Policy.Stage.CANDIDATE and headline_of(newest.metrics) and not refused:
        meanwhile = f" Run {run.pk} trains the next one." if run and card.works else ""
        newer = card.newer
        if newer is not None and newer.state == NOT_COMPARED:
            return LoopStep(
                "judge", f"Evaluate {newest.name} against {newer.against}.{meanwhile}", newest.name
            )
        words = f"{newest.name} is evaluated; promote or reject it.{meanwhile}"
        return LoopStep("promote", words, newest.name)
    if card.works:
        waits = run is not None and run.status == TrainingRun.Status.QUEUED
        return LoopStep("watch", "Its training waits for a worker." if waits else "It is being trained.")
    if newest is None and not card.counts.decisions:
        return LoopStep("record", "No decisions are recorded yet.")
    if newest is None and card.counts.evidence < feedback_minimum():
        further = feedback_minimum() - card.counts.evidence
        return LoopStep("rate", f"{further} more {card.noun} are needed for a first training.")
    if run is not None and run.status in STOPPED_STATUSES:
        return LoopStep("look", f"The newest training was {run.status}; its page has the reason.")
    if newest is None and feedback < feedback_minimum():
        return LoopStep("train", _unrated_source(card))
    if newest is None:
        return LoopStep("train", "There are enough ratings for a first training.")
    if headline_of(newest.metrics) is None:
        return LoopStep("judge", f"{newest.name} was not evaluated on held-out prompts yet.", newest.name)
    before = f"{newest.name} did not pass the gate: {card.gate_refusal}. " if refused else ""
    if card.buffer >= card.retrain_threshold:
        return LoopStep("train", f"{before}{card.buffer:,} {card.noun} are new since the last training.")
    if not card.learns_by_itself:
        return LoopStep("rate", f"{before}Rate more, then train again: nothing starts by itself.")
    return LoopStep(
        "rate",
        f"{before}{card.retrain_threshold - card.buffer:,} more {card.noun} until the next training.",
    )


def _unrated_source(card: AgentCard) -> str:
    """Source of a first training where hardly anybody rates."""
    counts = card.counts
    if counts.demonstrations >= feedback_minimum():
        return f"{counts.demonstrations:,} demonstrations are recorded, enough for a first training."
    found = " and ".join(f"{count:,} {name}" for name, count in card.evidence)
    return f"{found} are recorded: calculate the rewards on the agent's page, then train."


def feedback_minimum() -> int:
    """Pieces of feedback below which no training is begun."""
    return int(DATASET_CONFIG["min_samples"])


NONE = "–"


@dataclass(frozen=True)
class RunDifference:
    """A row of the table: one value per run, in their order."""

    name: str
    values: list[str]


@dataclass(frozen=True)
class RunsDiff:
    """Settings that differ, outcomes, and how many facts of the recipes are the same."""

    settings: list[RunDifference]
    outcomes: list[RunDifference]
    identical: int


def runs_diff(runs: Sequence[TrainingRun], series: Sequence[Mapping[str, object]]) -> RunsDiff:
    """The diff of runs with their snapshots and policies, and their figures as `run_series` gives them."""
    facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for known in facts for name in known))
    rows = [RunDifference(name, [_text(known.get(name)) for known in facts]) for name in names]
    differ = [row for row in rows if len(set(row.values)) > 1]
    results = [_outcomes(run, figures) for run, figures in zip(runs, series, strict=True)]
    titles = list(dict.fromkeys(name for known in results for name in known))
    return RunsDiff(
        settings=differ,
        outcomes=[RunDifference(name, [known.get(name, NONE) for known in results]) for name in titles],
        identical=len(rows) - len(differ),
    )


def _facts(run: TrainingRun) -> dict[str, object]:
    snapshot = run.snapshot
    facts: dict[str, object] = {
        "agent": run.agent,
        "method": method_title(run.method),
        "base model": run.base_model,
        "preset": run.config,
    }
    if snapshot is not None:
        facts |= {"dataset": f"snapshot {snapshot.pk}, {snapshot.sha256[:12]}"}
        facts |= {f"rows, {split}": count for split, count in snapshot.counts.items()}
    facts |= {name: value for name, value in run.recipe.items() if name != "seed"}
    return facts | {
        "seed": run.seed,
        "device": run.hardware.get("device"),
        "code version": run.code_version,
        **{f"version of {name}": version for name, version in run.libraries.items()},
    }


def _outcomes(run: TrainingRun, series: Mapping[str, Any]) -> dict[str, str]:
    outcomes = {"status": str(run.status), "steps": f"{run.steps_done} of {run.steps_total}"}
    if run.seconds is not None:
        outcomes["seconds"] = f"{run.seconds:,.0f}"
    for name, title in (
        ("loss", "last training loss"),
        ("eval_loss", "last held-out loss"),
        ("rewards/accuracies", "last reward accuracy"),
        ("eval_rewards/accuracies", "last held-out reward accuracy"),
        ("reward", "last reward"),
        ("eval_reward", "last held-out reward"),
    ):
        if series.get(name):
            outcomes[title] = number_text(series[name][-1][1])
    policy = getattr(run, "policy", None)
    if policy is not None:
        outcomes["policy"] = f"{policy.name}, {policy.stage}"
        if (headline := headline_of(policy.metrics)) is not None:
            interval = f" [{headline.interval}]" if headline.interval else ""
            outcomes[f"judged: {headline.title.lower()}"] = f"{headline.text}{interval}"
    return outcomes


def _text(value: object) -> str:
    if value is None or value == "":
        return NONE
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list, bool)) else str(value)


RUNS_PER_PAGE = 25


@page(SCOPE_PERMISSIONS["rate"])
def home(request: HttpRequest) -> HttpResponse:
    """Home page: the state of every agent, and its next action."""
    cards = agent_cards()
    if not cards and request.user.has_perm(SCOPE_PERMISSIONS["operate"]):
        return redirect("start")
    shown = [{"card": card, "stations": stations_of(card), "next": step_next(card)} for card in cards]
    return render(request, "rl/home.html", {"shown": shown, "live": any(card.works for card in cards)})


@page("rl.view_trainingrun")
def runs(request: HttpRequest) -> HttpResponse:
    """Training runs, newest first; `?agent=`, `?status=`, `?method=` and `?page=`."""
    agent = request.GET.get("agent") or None
    if agent is not None and not re.fullmatch(SLUG_PATTERN, agent):
        raise Http404("no such agent")
    every = runs_newest(agent)
    wanted = {name: value for name in ("status", "method") if (value := request.GET.get(name))}
    if not all(re.fullmatch(SLUG_PATTERN, value) for value in wanted.values()):
        raise Http404("no such status or method")
    page = Paginator(every.filter(**wanted), RUNS_PER_PAGE).get_page(request.GET.get("page"))
    context = {
        "page": page,
        "rows": [(run, _outcome(run)) for run in page],
        "agent": agent,
        "wanted": wanted,
        "agents": TrainingRun.objects.order_by("agent").values_list("agent", flat=True).distinct(),
        "statuses": TrainingRun.Status.values,
        "methods": every.order_by("method").values_list("method", flat=True).distinct(),
        "most": SLOTS,
    }
    return render(request, "rl/runs.html", context)


def _outcome(run: TrainingRun) -> str:
    """Outcome of an ended run in a few words; empty if the status says enough."""
    if policy := getattr(run, "policy", None):
        found = headline_of(policy.metrics)
        return f"{found.title} {found.text}" if found else "not evaluated yet"
    judge = getattr(run, "reward_model", None)
    return ranking_text(judge.ranking) if judge else ""


@page("rl.view_trainingrun")
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


@page("rl.view_trainingrun")
def run(request: HttpRequest, pk: int) -> HttpResponse:
    """One run: its state, curves, recipe, and what was left out of its data."""
    run_row = run_get(pk)
    if run_row is None:
        raise Http404(f"no run {pk}")
    policy = getattr(run_row.kept_run, "policy", None)
    series = run_series(run_row)
    judge = getattr(run_row, "reward_model", None) or reward_model_of(run_row)
    may_change = request.user.has_perm("rl.change_trainingrun")
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
            "live": run_row.is_unfinished or run_row.kept_run.is_followed,
            "may_work": request.user.has_perm("rl.change_policy"),
            "working": run_row.kept_run.is_followed,
            "may_cancel": run_row.is_unfinished and may_change,
            "may_resume": may_change and run_row.is_resumable,
            "log": run_log_tail(run_row),
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
    return sorted(((name, REASONS.get(name, ""), count) for name, count in counted), key=lambda row: -row[2])


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


@button("rl.change_trainingrun")
def run_resume(request: HttpRequest, pk: int) -> HttpResponse:
    """Hand a failed or cancelled run to the workers again."""
    found = run_get(pk)
    if found is None:
        raise Http404(f"no run {pk}")
    try:
        lifecycle.run_resume(found)
    except RunRefused as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"Run {pk} waits for a worker.")
    return redirect("run", pk)
