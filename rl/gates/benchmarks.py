"""The gate's rule about benchmarks: no task on which a policy lost more than its bound to its own base. Pure.

Asked only where an operator lists tasks in the Gate settings. The error that is bounded is the dangerous one: a policy
that lost the bound or more on a task gets through in at most `UNSEEN` of cases (one-sided interval of the paired
difference). A loss within the bound is the price of a purpose, and passes even where it is no chance.
"""

from __future__ import annotations

from typing import Any

from rl.gates.answers import UNSEEN
from rl.gates.effects import TableEffect, effect_of, points
from rl.gates.evidence_kinds import TESTS
from rl.gates.report import NOT_APPLICABLE, PASSED, REFUSED, Evidence, GateBounds, RuleResult


def rule_benchmarks(evidence: Evidence, bounds: GateBounds, to: str) -> RuleResult:
    """On every listed task a loss of its bound or more is ruled out, on the same items as its base.

    Refused for good where the whole interval lies below the bound; waits where the bound is not ruled out, and where a
    result is missing or of another state of the task, saying what to run.
    """
    if evidence.no_benchmarks:
        return RuleResult("benchmarks", NOT_APPLICABLE, evidence.no_benchmarks)
    figures: dict[str, Any] = {}
    absent: list[str] = []
    open_: list[str] = []
    lost: list[str] = []
    for task, bound in bounds.benchmark_bounds.items():
        found = evidence.benchmarks.get(task)
        effect = effect_of(TESTS, found.cases) if found is not None else None
        if found is None or found.fault or effect is None:
            absent.append(found.fault if found is not None else f"{task} was not run")
            continue
        interval = effect.interval(1 - 2 * UNSEEN)
        figures[task] = {
            **interval.as_dict(), "confidence": 1 - 2 * UNSEEN, "own": effect.sides[0], "base": effect.sides[1],
            "n": effect.n, "metric": found.metric, "bound": -bound,
            "test": "Newcombe" if isinstance(effect, TableEffect) else "Student",
        }  # fmt: skip
        words = f"{points(effect.value)} on {task} over {effect.n} items"
        if interval.high < -bound:
            lost.append(f"{words} (allowed loss: {100 * bound:g})")
        elif interval.low < -bound:
            open_.append(
                f"{words}: a loss of up to {-100 * interval.low:.1f} cannot be ruled out (allowed loss: "
                f"{100 * bound:g})"
            )
    if lost or open_ or absent:
        return RuleResult("benchmarks", REFUSED, "; ".join([*lost, *open_, *absent]), figures, waits=not lost)
    text = ", ".join(f"{points(one['value'])} on {task}" for task, one in figures.items())
    return RuleResult(
        "benchmarks",
        PASSED,
        f"no listed benchmark is worse than the base model's by more than allowed: {text}",
        figures,
    )
