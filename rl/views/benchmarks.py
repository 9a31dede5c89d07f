"""The benchmark results of a policy as its page shows them: the difference from the base, task by task."""

from __future__ import annotations

from dataclasses import dataclass

from rl.charts.forest import Forest, ForestLine, forest_of
from rl.models import BenchmarkResult, Policy
from rl.registry.gate_evidence import (
    benchmark_command,
    benchmark_stale,
    benchmarks_newest,
    gate_bounds,
    no_benchmarks,
)


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
            "Difference from the base in points", [_line(one) for one in results],
            lambda v: f"{100 * v:+.3g}" if v else "0", zero=True,
        ),
        stale=tuple(stale for one in results if (stale := benchmark_stale(one))),
        harness=results[0].harness if results else "",
        command=benchmark_command(policy, ",".join(absent or listed or ("ratchet_format",))),
        absent=absent,
    )  # fmt: skip


def _line(result: BenchmarkResult) -> ForestLine:
    own, base, difference = (result.figures[part] for part in ("own", "base", "difference"))
    words = (
        f"{result.metric} {100 * own['value']:.1f} % ± {100 * own['stderr']:.1f}, base {100 * base['value']:.1f} % ± "
        f"{100 * base['stderr']:.1f}, {result.n:,} items: {100 * difference['value']:+.1f} points "
        f"[{100 * difference['low']:+.1f} to {100 * difference['high']:+.1f}]"
    )
    return ForestLine(result.task, words, difference["value"], difference["low"], difference["high"])
