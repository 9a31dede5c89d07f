"""The simple classifier beside every judged policy: a linear policy of the very rows that policy was trained on."""

from __future__ import annotations

import logging
from typing import Any

from rl.agents.base import Agent
from rl.datasets import DatasetRefused, prepare_training_dataset, snapshot_rows
from rl.jobs.linear import fitted_by
from rl.jobs.method_selection import method_chosen
from rl.linear.model import LinearPolicy
from rl.linear.rows import LinearRefused
from rl.models import Policy, Snapshot
from rl.recipes import LinearRecipe

logger = logging.getLogger("rl.linear")

ROWS_MOST = 5_000
"""Training rows that a baseline learns from, the first of the snapshot: fitting must not take longer than
evaluating."""


def baseline_of(policy: Policy | None, agent: Agent) -> tuple[LinearPolicy | None, dict[str, Any]]:
    """The classifier and what its figures say beside themselves; a refusal says why there is none, and both are empty
    for agents whose answers are wordings, and for a folder whose training rows nobody knows.

    Of a run on prompts alone (PPO, GRPO) it learns from the feedback there is now, the training side of it.
    """
    snapshot = policy.run.snapshot if policy is not None and policy.run is not None else None
    if snapshot is None:
        return None, {}
    try:
        rows, whence = _rows(snapshot)
        found = fitted_by(LinearRecipe(), rows, agent)
    except (LinearRefused, DatasetRefused) as refusal:
        logger.info("no baseline for %s: %s", policy, refusal)
        return None, {"refused": str(refusal)} if agent.discrete else {}
    return found.policy, {
        "name": "linear classifier",
        "trained_on": {"rows": len(rows), "of": whence, "feedback": found.policy.facts["feedback"]},
        "seconds": round(found.seconds, 3),
    }


def _rows(snapshot: Snapshot) -> tuple[list[dict[str, Any]], str]:
    if snapshot.kind != Snapshot.Kind.PROMPTS:
        return list(snapshot_rows(snapshot, "train"))[:ROWS_MOST], f"snapshot {snapshot.pk}"
    chosen = method_chosen(snapshot.agent, "linear")
    prepared = prepare_training_dataset(snapshot.agent, kind=chosen.knobs["feedback"], dry_run=True)
    return list(prepared.rows("train"))[:ROWS_MOST], "the feedback there is now"
