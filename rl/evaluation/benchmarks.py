"""Benchmarks of policies, run: tasks opened, policy and base asked, results stored. Torch is imported in functions
alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import transaction

from backend.installation import PROGRAM
from rl.gates.effects import effect_of
from rl.gates.evidence_kinds import TESTS
from rl.gates.report import Case
from rl.jobs.trainer import hardware_detect
from rl.models import BenchmarkResult, Policy, PolicyEvent
from rl.recipes.benchmark_tasks import BUNDLED, HUB, INSTALLED, TaskRefused, task_folder, task_names
from rl.registry import service as registry
from rl.registry.gate_evidence import benchmark_summary, gate_benchmarks, gate_bounds, no_benchmarks
from rl.registry.integrity import adapter_folder
from rl.registry.model_card import card_write

if TYPE_CHECKING:
    from rl.training.benchmark import TaskFigures


class BenchmarkRefused(ValueError):
    """A policy or an order that cannot be benchmarked; the message says why, and what to do."""


@dataclass(frozen=True)
class BenchmarkOrder:
    """Order of a benchmark: a policy, the tasks (bundled names, paths of folders, names the harness knows), and how."""

    policy: str
    tasks: tuple[str, ...]
    limit: int | None = None
    fewshot: int | None = None
    batch_size: int = 16
    chat_template: bool = True
    hub: bool = False
    quantization: str = "none"
    actor: str = "benchmark_model"


def benchmark_policy(
    order: BenchmarkOrder, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, object]:
    """Run every task for a policy and its base on the same items, and store the results.

    Raises BenchmarkRefused, TaskRefused, RegistryRefused and the training package's PolicyLoadError.
    """
    policy = registry.policy_get(order.policy)
    if words := no_benchmarks(policy):
        judge = f"; `{PROGRAM} evaluate_model --policy {policy.name}` judges it" if policy.has_files else ""
        raise BenchmarkRefused(f"{policy.name}: {words}{judge}")
    if not order.tasks:
        raise BenchmarkRefused(f"expected --tasks with at least one; there are {', '.join(task_names())}")
    for name, value in (("limit", order.limit), ("batch-size", order.batch_size)):
        if value is not None and value < 1:
            raise BenchmarkRefused(f"--{name} must be at least 1, found {value}")
    if order.fewshot is not None and order.fewshot < 0:
        raise BenchmarkRefused(f"--fewshot must not be negative, found {order.fewshot}")
    tasks = [task_folder(spec) or spec for spec in order.tasks]

    from rl.training.benchmark import HARNESS, benchmark
    from rl.training.policy import load_policy

    model = load_policy(
        policy.base_model,
        adapter_folder(policy),
        hardware=hardware_detect(),
        quantization=order.quantization,
        cache_dir=settings.RATCHET_HOME / "cache",
    )
    began = time.monotonic()
    figures = benchmark(
        model,
        tasks,
        limit=order.limit,
        fewshot=order.fewshot,
        batch_size=order.batch_size,
        chat_template=order.chat_template,
        hub=order.hub,
        code=settings.ENABLE_CODE_EXECUTION,
        progress=progress,
    )
    facts = {
        "harness": HARNESS,
        "chat_template": order.chat_template and bool(model.tokenizer.chat_template),
        "items_limit": order.limit,
        "base_model_hash": model.base_model_hash,
        "seconds": time.monotonic() - began,
    }
    results = _results_store(policy, figures, facts, actor=order.actor)
    return {
        "policy": policy.name,
        "agent": policy.agent,
        "base_model": policy.base_model,
        "quantization": model.quantization,
        "notes": model.notes,
        "benchmarks": [benchmark_summary(result) for result in results],
    }


def benchmarks_listed_run(
    policy: Policy, *, actor: str, progress: Callable[[int, int, str], None] | None = None
) -> list[str]:
    """Run the tasks that the agent's gate lists for a policy, those alone of which no result stands.

    A task folder is known by its name once it was run for any policy; nothing is fetched. Returns why tasks could not
    be run, in words: the gate then waits for them, and says which command runs them.
    """
    evidence = gate_benchmarks(policy, list(gate_bounds(policy.agent).benchmark_bounds))
    specs = [_spec_of(task) for task, found in evidence.get("benchmarks", {}).items() if found.fault]
    try:
        # in one go, because the model is loaded for each
        if specs:
            benchmark_policy(BenchmarkOrder(policy.name, tuple(specs), actor=actor), progress)
        return []
    except (BenchmarkRefused, TaskRefused) as refusal:
        if len(specs) == 1:
            return [str(refusal)]
    faults = []
    for spec in specs:
        try:
            benchmark_policy(BenchmarkOrder(policy.name, (spec,), actor=actor), progress)
        except (BenchmarkRefused, TaskRefused) as refusal:
            faults.append(str(refusal))
    return faults


def _spec_of(task: str) -> str:
    """Path or name by which the harness loads a task: the folder it was last run from, else its name."""
    newest = BenchmarkResult.objects.filter(task=task).order_by("-pk").first()
    return newest.source if newest is not None and newest.source not in (BUNDLED, INSTALLED, HUB) else task


@transaction.atomic
def _results_store(
    policy: Policy, figures: Sequence[TaskFigures], facts: Mapping[str, object], *, actor: str
) -> list[BenchmarkResult]:
    """Rows of the results, with the event, and the policy's card written anew."""
    results = [
        BenchmarkResult.objects.create(
            policy=policy,
            task=one.task,
            task_version=one.version,
            task_sha256=one.sha256,
            source=one.source,
            metric=one.metric,
            fewshot=one.fewshot,
            n=len(one.policy),
            figures=figures_paired(one.policy, one.base),
            items={"hash": list(one.items), "own": list(one.policy), "base": list(one.base)},
            **facts,
        )
        for one in figures
    ]
    PolicyEvent.objects.create(
        policy=policy,
        kind=PolicyEvent.Kind.BENCHMARKED,
        actor=actor,
        reason=", ".join(f"{one.task} {100 * one.figures['own']['value']:.1f} %" for one in results),
        verdicts={"benchmarks": [one.pk for one in results]},
    )
    card_write(policy)
    return results


def figures_paired(own: Sequence[float], base: Sequence[float]) -> dict[str, object]:
    """Means of both sides with their standard errors (of the mean over items), and the paired difference with its 95 %
    interval and two-sided p. Scores in [0, 1], item by item."""
    effect = effect_of(TESTS, [Case(one, other) for one, other in zip(own, base, strict=True)])
    assert effect is not None  # a task has items
    interval = effect.interval(0.95)
    return {
        "own": _mean(own),
        "base": _mean(base),
        "difference": {
            # a single item with a share has no spread to judge by: its interval is all there can be
            "value": interval.value,
            "low": max(interval.low, -1.0),
            "high": min(interval.high, 1.0),
            "p": min(1.0, 2 * min(effect.better(0.025), effect.worse(0.025))),
        },
    }


def _mean(scores: Sequence[float]) -> dict[str, float]:
    """Mean, and the standard error with n - 1 below the spread, as the harness gives it; 0 of a single item."""
    n = len(scores)
    mean = math.fsum(scores) / n
    spread = math.fsum((one - mean) ** 2 for one in scores) / (n - 1) if n > 1 else 0.0
    return {"value": mean, "stderr": math.sqrt(spread / n)}
