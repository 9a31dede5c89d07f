"""Which training snapshots hold prompts that are to be forgotten, and what was trained on them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rl.datasets import DatasetRefused, snapshot_rows
from rl.models import Evaluation, LabelRun, Policy, RewardRecord, Snapshot, TrainingRun


def decisions_forget(decisions: Sequence[uuid.UUID]) -> None:
    """Remove what is kept of decisions that are forgotten: their rewards, whose parts may quote them."""
    gone = RewardRecord.objects.filter(decision__in=decisions)
    gone._raw_delete(gone.db)  # a chain of records points to itself


def snapshots_containing(
    prompts: Mapping[str, set[str]], since: datetime | None = None
) -> list[dict[str, Any]]:
    """Agent -> prompt hashes, to the snapshots that hold one of these prompts, newest first.

    since: of those made since then alone.

    Each: {snapshot, agent, path, rows, fault, runs, policies}; rows counts those of the prompts. A snapshot whose file
    is gone or was changed cannot be searched: rows is None and fault says why.
    """
    found: list[dict[str, Any]] = []
    snapshots = Snapshot.objects.filter(agent__in=list(prompts))
    if since is not None:
        snapshots = snapshots.filter(created_at__gte=since)
    for snapshot in snapshots.order_by("-pk"):
        wanted, fault, rows = prompts[snapshot.agent], "", 0
        try:
            rows = sum(row["prompt_hash"] in wanted for row in snapshot_rows(snapshot))
        except DatasetRefused as refusal:
            fault = str(refusal)
        if rows or fault:
            found.append(
                {
                    "snapshot": snapshot.pk,
                    "agent": snapshot.agent,
                    "path": snapshot.path,
                    "rows": None if fault else rows,
                    "fault": fault,
                    "runs": list(snapshot.runs.order_by("pk").values_list("pk", flat=True)),
                    "policies": list(
                        Policy.objects.filter(run__snapshot=snapshot)
                        .order_by("pk")
                        .values_list("name", flat=True)
                    ),
                }
            )
    return found


LEARNING = (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING, TrainingRun.Status.SUCCEEDED)


def trained_on(prompts: Mapping[str, set[str]], since: datetime) -> dict[str, list[Any]]:
    """What was trained since then on these prompts (agent -> prompt hashes).

    {runs: numbers of those that learn or learnt, policies: names, labels: label models learnt from these agents'
    ratings, snapshots: numbers, evaluations: numbers of those judged on it}. A snapshot whose file is gone or changed
    cannot be searched and counts as one that holds them.
    """
    snapshots = [found["snapshot"] for found in snapshots_containing(prompts, since)]
    runs = TrainingRun.objects.filter(snapshot__in=snapshots)
    learnt = runs.filter(status__in=LEARNING) | runs.filter(policy__isnull=False)
    labels = LabelRun.objects.filter(agent__in=list(prompts), created_at__gte=since).exclude(path="")
    judged = Evaluation.objects.filter(snapshot__in=snapshots)
    return {
        "runs": sorted(set(learnt.values_list("pk", flat=True))),
        "policies": sorted(Policy.objects.filter(run__snapshot__in=snapshots).values_list("name", flat=True)),
        "labels": [str(row) for row in labels.order_by("pk")],
        "snapshots": sorted(snapshots),
        "evaluations": sorted(judged.values_list("pk", flat=True)),
    }
