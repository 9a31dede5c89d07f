"""Pages of the registry: policies and reward models, with their figures and moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.contrib import messages
from django.http import FileResponse, Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, render

from backend.http import button, page, redirect_back
from feedback.accounts.roles import page_for
from feedback.selectors import feedback_counts_cached
from rl import artifacts
from rl.charts.intervals import Forest, ForestLine, forest_of, report_lines
from rl.datasets.prompt_clusters import near_identical_prompts
from rl.export.service import ExportOrderRefused, export_forms, opponents, policy_job_place
from rl.gates.headlines import headline_of, share_of
from rl.gates.report import GateReport
from rl.models import (
    Artifact,
    BenchmarkResult,
    Evaluation,
    Policy,
    PolicyEvent,
    TrainingRun,
)
from rl.models.runs import RunRefused
from rl.registry import service as registry
from rl.registry.checklist import policy_verdict, promotion_of
from rl.registry.comparisons import (
    LOSS,
    TIE,
    WIN,
    answers_compared,
    counts_of,
    evaluation_newest_paired,
    policy_diff,
)
from rl.registry.gate_evidence import (
    benchmark_command,
    benchmark_stale,
    benchmarks_newest,
    gate_bounds,
    no_benchmarks,
)
from rl.registry.incumbents import incumbent_sync, incumbents_sync
from rl.registry.judging import round_standing, rounds_of
from rl.registry.service import home_path
from rl.selectors import (
    policy_ancestors,
    policy_charts,
    policy_compared_first,
    policy_lineage,
    policy_overview,
    policy_relatives,
)
from rl.serving.engines import adapters_here


@dataclass(frozen=True)
class Download:
    artifact: Artifact
    is_file: bool
    """False for a folder, or if the file is gone."""
    lines: tuple[str, ...] = ()
    """Commands for the folder that the file was saved to."""


def artifact_file(artifact: Artifact) -> Path | None:
    """The exported file, fetched if another server made it; None if it is a folder or gone. Raises StoreFailed."""
    path = home_path(artifact.path)
    if not path.exists():
        artifacts.fetch(artifact.path)
    return path if path.is_file() else None


def downloads_of(exported: Iterable[Artifact]) -> list[Download]:
    return [Download(one, _is_file(one), load_lines(one)) for one in exported]


def _is_file(artifact: Artifact) -> bool:
    path = home_path(artifact.path)
    elsewhere = artifacts.store() is not None and artifacts.stored(artifact.path).filter(path=artifact.path)
    return path.is_file() or bool(elsewhere and not path.exists())


def load_lines(artifact: Artifact) -> tuple[str, ...]:
    """Commands for llama.cpp and Ollama; empty for files of other programs."""
    file, name = Path(artifact.path).name, artifact.policy.name
    if not file.endswith(".gguf"):
        return ()
    if artifact.format == "gguf-lora":
        return (f"llama-server -m BASE.gguf --lora {file}",)
    return (
        f"llama-server -m {file}",
        f"echo 'FROM ./{file}' > Modelfile && ollama create {name} -f Modelfile",
    )


NEWEST = 50
"""Versions of an agent that are listed."""

READ = "rl.view_policy"
MOVE = "rl.change_policy"


@page(READ)
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
            "rows": shown,
            "charts": policy_charts(found[::-1]),
            "lineage": policy_lineage(agent, found[::-1]),
            "names": [policy.name for policy in found],
            "beside": policy_compared_first(found),
            "champion": next((one.name for one in found if one.stage == Policy.Stage.CHAMPION), ""),
            **{f"has_{name}": any(row[name] for row in shown) for name in ("liked", "reward")},
        }
        for agent, found in by_agent.items()
        for shown in [[_row(policy) for policy in found[:NEWEST]]]
    ]
    return render(request, "rl/policies.html", {"agents": agent_rows, "asked": agent_filter})


def _row(policy: Policy) -> dict[str, object]:
    return {
        "policy": policy,
        "liked": share_of(policy.metrics, "liked"),
        "headline": headline_of(policy.metrics),
        "against": policy.metrics.get("against"),
        "reward": share_of(policy.metrics, "average_reward"),
    }


@page(READ)
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
    report = GateReport.read(gate_event.verdicts) if gate_event else None
    may = request.user.has_perm(MOVE)
    siblings = Policy.objects.filter(agent=policy_row.agent).exclude(pk=policy_row.pk).order_by("-pk")
    return render(
        request,
        "rl/policy.html",
        {
            "policy": policy_row,
            "overview": overview,
            "downloads": downloads_of(overview.artifacts),
            "engines": adapters_here().filter(policy=policy_row.name),
            "benchmarks": policy_benchmarks(policy_row),
            "off_policy": off_policy_summary(overview.evaluations),
            "clusters": next(filter(None, map(near_identical_prompts, overview.evaluations)), None),
            "judged": gate_event,
            "report_lines": report_lines(report.verdicts) if report else [],
            "ancestors": policy_ancestors(policy_row),
            "lineage": policy_lineage(policy_row.agent, policy_relatives(policy_row)),
            "others": list(siblings.values_list("name", flat=True)[:NEWEST]),
            "promotion": promotion_of(policy_row, may_move=may),
            "may_work": may and policy_row.run is not None,
            "working": policy_row.run is not None and policy_row.run.is_followed,
            "exporting": policy_row.run is not None
            and policy_row.run.follow_up == TrainingRun.FollowUp.EXPORT,
            "judging_rounds": [(one, round_standing(one)) for one in rounds_of(policy_row)[:5]],
            "may_judge": may and policy_row.kind != Policy.Kind.RECORDED,
            "verdict": policy_verdict(policy_row),
            "opponents": opponents(policy_row) if may else [],
            "export_forms": export_forms(policy_row) if may else {},
        },
    )


@page_for("operate")
def policy_file(request: HttpRequest, name: str, pk: int) -> HttpResponseBase:
    """An exported file of a policy, as a download."""
    path = artifact_file(get_object_or_404(Artifact, policy__name=name, pk=pk))
    if path is None:
        raise Http404("the exported file is a folder, or is gone")
    return FileResponse(path.open("rb"), as_attachment=True, filename=path.name)


@button(MOVE)
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


def _moved(
    request: HttpRequest,
    found: Policy,
    move: Callable[..., Policy],
    refused: type[Exception],
) -> None:
    """Move a version up or down by `move`, and show what that says."""
    try:
        moved = move(
            found,
            request.POST.get("move", ""),
            actor=request.user.get_username(),
            reason=request.POST.get("reason", "").strip(),
            force=request.POST.get("force") == "on",
        )
    except refused as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"{moved.name} is {moved.stage} now.")


@button(MOVE)
def policy_move(request: HttpRequest, name: str) -> HttpResponse:
    """Promote, reject, retire or roll back; what the registry says is shown."""
    found = get_object_or_404(Policy, name=name)
    incumbent_sync(found.agent)
    _moved(request, found, registry.policy_move, registry.RegistryRefused)
    return redirect_back(request, "policy", name)


@page(READ)
def policies_compared(request: HttpRequest) -> HttpResponse:
    """Two versions side by side: `?left=` and `?right=`."""
    names = [request.GET.get(side, "") for side in ("left", "right")]
    rows = {row.name: row for row in Policy.objects.filter(name__in=names)}
    if set(names) - set(rows):
        raise Http404("expected left and right to be names of policies")
    left, right = (rows[name] for name in names)
    diff = policy_diff(left, right)
    known = [(name, pair) for name, pair in diff["figures"].items() if name != "stage" and any(pair)]
    sections = [
        ("Figures", known, "Neither was evaluated."),
        ("Data", list(diff["data"].items()), "They learnt from the same data."),
        ("Recipe", list(diff["recipe"].items()), "They were trained by the same recipe."),
    ]
    gone = PolicyEvent.objects.filter(policy__in=[left, right], kind=PolicyEvent.Kind.PRUNED)
    trained = [row for row in (right, left) if row.run_id]
    evaluated = next((row for row in trained if not row.metrics), trained[0] if trained else None)
    context = {
        "left": left,
        "right": right,
        "diff": diff,
        "sections": sections,
        "evaluated": evaluated,
        "opponent": left if evaluated == right else right,
        "gone": sorted(set(gone.values_list("policy__name", flat=True))),
    }
    return render(request, "rl/policies_compared.html", context)


# --- Figures of a policy's page --------------------------------------------------------------------------------


@dataclass(frozen=True)
class PolicyBenchmarks:
    """Results drawn on one scale, what is out of date, and the command that runs what the gate lists or another."""

    forest: Forest | None
    stale: tuple[str, ...]
    harness: str
    command: str
    absent: tuple[str, ...]
    """Tasks that the agent's gate lists and that were not run."""
    inapplicable: str = ""


def policy_benchmarks(policy: Policy) -> PolicyBenchmarks:
    """The newest result of each task."""
    if words := no_benchmarks(policy):
        return PolicyBenchmarks(None, (), "", "", (), words)
    results = benchmarks_newest(policy)
    listed = gate_bounds(policy.agent).benchmark_bounds
    absent = tuple(task for task in listed if task not in {one.task for one in results})
    return PolicyBenchmarks(
        forest=forest_of(
            "Difference from the base in points",
            [_benchmark_line(one) for one in results],
            lambda v: f"{100 * v:+.3g}" if v else "0",
            zero=True,
        ),
        stale=tuple(stale for one in results if (stale := benchmark_stale(one))),
        harness=results[0].harness if results else "",
        command=benchmark_command(policy, ",".join(absent or listed or ("ratchet_format",))),
        absent=absent,
    )


def _benchmark_line(result: BenchmarkResult) -> ForestLine:
    own, base, difference = (result.figures[part] for part in ("own", "base", "difference"))
    words = (
        f"{result.metric} {100 * own['value']:.1f} % ± {100 * own['stderr']:.1f}, base {100 * base['value']:.1f} % ± "
        f"{100 * base['stderr']:.1f}, {result.n:,} items: {100 * difference['value']:+.1f} points "
        f"[{100 * difference['low']:+.1f} to {100 * difference['high']:+.1f}]"
    )
    return ForestLine(result.task, words, difference["value"], difference["low"], difference["high"])


METHODS = {
    "doubly_robust": "doubly robust",
    "snips": "self-normalised",
    "ips": "inverse propensity",
    "clipped_ips": "clipped",
}
"""Estimator -> what the page calls it; the first is the one that the gate asks."""


@dataclass(frozen=True)
class OffPolicySummary:
    """Either why nothing can be said, or the estimates, drawn, with what they rest on."""

    refusal: str = ""
    forest: Forest | None = None
    decisions: int = 0
    mean_reward: str = ""
    ess: str = ""
    max_weight: str = ""
    difference: str = ""
    against: str = ""
    warnings: tuple[str, ...] = ()


def off_policy_summary(evaluations: Iterable[Evaluation]) -> OffPolicySummary | None:
    """Of the newest evaluation that asked the log; None where none did."""
    for evaluation in evaluations:
        found = evaluation.figures.get("off_policy")
        if isinstance(found, dict) and evaluation.split != "file":  # a file is not asked what the log says
            return _summary(found, evaluation.against)
    return None


def _summary(found: dict[str, Any], against: str) -> OffPolicySummary:
    if "refused" in found:
        return OffPolicySummary(refusal=str(found["refused"]))
    lines = [_estimate_line(title, found[name]) for name, title in METHODS.items() if name in found]
    if other := found.get("against"):
        lines.append(_estimate_line(against or "the other", other["doubly_robust"], "level"))
    overlap, difference = found["overlap"], found.get("difference")
    return OffPolicySummary(
        forest=forest_of("Estimated reward", lines, lambda v: f"{v:.4g}", zero=False, share=True),
        decisions=int(found["decisions"]),
        mean_reward=f"{found['logged']:.3f}",
        ess=f"{overlap['ess']:,.0f}",
        max_weight=f"{overlap['max_weight']:.3g}",
        difference=f"{difference['value']:+.3f} [{difference['low']:+.3f} to {difference['high']:+.3f}]"
        if difference
        else "",
        against=against,
        warnings=tuple(overlap["warnings"]),
    )


def _estimate_line(label: str, figure: dict[str, float], state: str = "") -> ForestLine:
    words = f"{figure['value']:.3f} [{figure['low']:.3f} to {figure['high']:.3f}]"
    return ForestLine(label, words, figure["value"], figure["low"], figure["high"], state)


OUTCOME_TITLES = ((WIN, "Wins"), (LOSS, "Losses"), (TIE, "Ties"))


@page(READ)
def policy_answers(request: HttpRequest, name: str) -> HttpResponse:
    """One prompt with both answers: `?show=win`, `loss` or `tie`, `?at=` its number among them."""
    policy = get_object_or_404(Policy, name=name)
    evaluation = evaluation_newest_paired(policy)
    every = answers_compared(evaluation) if evaluation else []
    counts, show = counts_of(every), request.GET.get("show", "")
    if show and show not in counts:
        raise Http404("expected show=win, loss or tie")
    matches = [one for one in every if show in ("", one.outcome)]
    number_text = request.GET.get("at", "1")
    number = min(
        max(
            int(number_text)
            if number_text.isascii() and number_text.isdigit() and len(number_text) < 9
            else 1,
            1,
        ),
        len(matches),
    )
    context = {
        "policy": policy,
        "evaluation": evaluation,
        "against": evaluation.against if evaluation else "",
        "one": matches[number - 1] if matches else None,
        "at": number,
        "among": len(matches),
        "all": len(every),
        "show": show,
        "kinds": [(key, title, counts[key]) for key, title in OUTCOME_TITLES],
        "before": number - 1 if number > 1 else None,
        "after": number + 1 if number < len(matches) else None,
        "rival": policy_verdict(policy).against,
        "may_work": policy.run is not None and request.user.has_perm("rl.change_policy"),
        "working": policy.run is not None and policy.run.is_followed,
    }
    return render(request, "rl/policy_answers.html", context)
