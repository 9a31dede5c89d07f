"""Diff of training runs: where their recipes, data and machines differ, and what came out of each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl.charts.lines import number_text
from rl.gates.headlines import headline_of
from rl.models import TrainingRun

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


def runs_diff(runs: Sequence[TrainingRun], series: Sequence[Mapping[str, Any]]) -> RunsDiff:
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


def _facts(run: TrainingRun) -> dict[str, Any]:
    snapshot = run.snapshot
    facts: dict[str, Any] = {
        "agent": run.agent,
        "method": run.method,
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


def _text(value: Any) -> str:
    if value is None or value == "":
        return NONE
    return json.dumps(value, sort_keys=True) if isinstance(value, (dict, list, bool)) else str(value)
