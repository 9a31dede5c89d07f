"""Which training snapshots hold prompts that are to be forgotten, and what was trained on them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rl.datasets import DatasetRefused, snapshot_rows
from rl.models import Policy, RewardRecord, Snapshot


def decisions_forget(decisions: Sequence[uuid.UUID]) -> None:
    """Remove what is kept of decisions that are forgotten: their rewards, whose parts may quote them."""
    gone = RewardRecord.objects.filter(decision__in=decisions)
    gone._raw_delete(gone.db)  # a chain of records points to itself


def snapshots_containing(prompts: Mapping[str, set[str]]) -> list[dict[str, Any]]:
    """Agent -> prompt hashes, to the snapshots that hold one of these prompts, newest first.

    Each: {snapshot, agent, path, rows, fault, runs, policies}; rows counts those of the prompts. A snapshot whose file
    is gone or was changed cannot be searched: rows is None and fault says why.
    """
    found: list[dict[str, Any]] = []
    for snapshot in Snapshot.objects.filter(agent__in=list(prompts)).order_by("-pk"):
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
