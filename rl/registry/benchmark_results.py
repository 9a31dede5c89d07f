"""Benchmark results of policies, read: the newest of each task, as pages, cards and REST show them and a gate asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from backend.installation import PROGRAM
from rl.gates.report import BenchmarkCases, Case
from rl.models import BenchmarkResult, Policy
from rl.recipes.benchmark_tasks import BUNDLED, HUB, INSTALLED, TaskRefused, task_folder

NO_MODEL = {
    Policy.Kind.LINEAR: "a linear policy has no language model, so benchmarks of language models do not apply to it",
    Policy.Kind.HOSTED: "benchmarks need log-probabilities of a base model, which a hosted model does not give",
    Policy.Kind.RECORDED: "it is known by its recorded answers alone, so that it cannot be asked",
}


def no_benchmarks(policy: Policy) -> str:
    """Reason that benchmarks do not apply to a policy; empty where they do."""
    return NO_MODEL.get(Policy.Kind(policy.kind), "")


def benchmarks_newest(policy: Policy, tasks: Sequence[str] | None = None) -> list[BenchmarkResult]:
    """The newest result of each task (of these tasks), in the order of their names; their items are left out unless
    tasks are named."""
    rows = policy.benchmarks.order_by("-pk")
    rows = rows.defer("items") if tasks is None else rows.filter(task__in=tasks)
    newest: dict[str, BenchmarkResult] = {}
    for row in rows:
        newest.setdefault(row.task, row)
    return [newest[task] for task in sorted(newest)]


def benchmark_stale(result: BenchmarkResult) -> str:
    """Reason that a result is of another state of its task than the files have now; empty where it is not. A task of
    the hub is known by its version alone, which the result has."""
    if result.source == HUB:
        return ""
    try:
        task = task_folder(result.task if result.source in (BUNDLED, INSTALLED) else result.source)
    except TaskRefused as refusal:
        return str(refusal)
    if task is None:
        return f"{result.task} is no longer part of this version or of an installed package"
    if task.sha256 != result.task_sha256:
        return f"the task {result.task} has changed since it was run ({result.created_at:%Y-%m-%d %H:%M} UTC)"
    return ""


def benchmark_command(policy: Policy, task: str, source: str = BUNDLED) -> str:
    """The command that runs a task for a policy."""
    spec = task if source in (BUNDLED, INSTALLED, HUB) else source
    hub = " --hub" if source == HUB else ""
    return f"{PROGRAM} benchmark_model --policy {policy.name} --tasks {spec}{hub}"


def gate_benchmarks(policy: Policy, tasks: Sequence[str]) -> dict[str, Any]:
    """Fields of `rl.gates.report.Evidence` on benchmarks: the cases of each listed task, or why they do not count."""
    if words := no_benchmarks(policy):
        return {"no_benchmarks": words}
    newest = {row.task: row for row in benchmarks_newest(policy, tasks)}
    cases: dict[str, BenchmarkCases] = {}
    for task in tasks:
        row = newest.get(task)
        if row is None:
            fault = f"{task} was not run: run `{benchmark_command(policy, task)}`"
            cases[task] = BenchmarkCases(fault=fault)
        elif stale := benchmark_stale(row):
            fault = f"{stale}: run `{benchmark_command(policy, task, row.source)}`"
            cases[task] = BenchmarkCases(fault=fault)
        else:
            pairs = zip(row.items["own"], row.items["base"], strict=True)
            cases[task] = BenchmarkCases(row.metric, [Case(own, base) for own, base in pairs])
    return {"benchmarks": cases}


def benchmark_summary(result: BenchmarkResult) -> dict[str, Any]:
    """A result as REST, `--json` and cards say it, without its items."""
    return {
        "task": result.task,
        "version": result.task_version,
        "sha256": result.task_sha256,
        "source": result.source if result.source in (BUNDLED, INSTALLED, HUB) else "folder",
        "harness": result.harness,
        "metric": result.metric,
        "fewshot": result.fewshot,
        "chat_template": result.chat_template,
        "limit": result.items_limit,
        "n": result.n,
        **result.figures,
        "stale": benchmark_stale(result),
        "seconds": round(result.seconds, 1),
        "created_at": result.created_at.isoformat(),
    }


def benchmark_text(result: BenchmarkResult) -> str:
    """A result in one sentence."""
    own, base, difference = (result.figures[part] for part in ("own", "base", "difference"))
    return (
        f"{result.task} ({result.metric}): {100 * own['value']:.1f} % ± {100 * own['stderr']:.1f}, base "
        f"{100 * base['value']:.1f} % ± {100 * base['stderr']:.1f}; {100 * difference['value']:+.1f} points "
        f"[{100 * difference['low']:+.1f}, {100 * difference['high']:+.1f}] on the same {result.n} items"
    )
