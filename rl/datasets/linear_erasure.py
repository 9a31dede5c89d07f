"""Erasure in linear policies and reward models: words of what is erased leave the file, which names each of its weights
in plain text.

A LoRA adapter holds no text; a linear model is a table whose columns are words and fields of the prompts it learnt
from. What stays is what the remaining rows of its dataset have too; the model is not trained again, and its other
weights stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from rl.checksums import SUMS, file_sum, sums_write
from rl.linear.features import prompt_features
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, choices_of
from rl.models import Artifact, Policy, RewardModelVersion, Snapshot
from rl.models.agent_definitions import agent_served
from rl.models.runs import run_folder
from rl.recipes.reward_model import LINEAR

logger = logging.getLogger("rl.datasets.erasure")

Rows = Sequence[Mapping[str, Any]]


def linear_models_erase(snapshot: Snapshot, rows: Rows, dry_run: bool) -> int:
    """Leave in the linear policies and reward models trained on a snapshot what the rows that remain of it have too.

    Return how many of them lose something. Their sums are registered anew, what their runs keep of them is written
    alike, and exported copies are removed: they are exported again.
    """
    count = 0
    for run in snapshot.runs.order_by("pk"):
        for copy in sorted(run_folder(run).glob(f"*/{WEIGHTS}")):
            _file_erase(copy.parent, rows, dry_run)
    for policy in Policy.objects.filter(kind=Policy.Kind.LINEAR, run__snapshot=snapshot).order_by("pk"):
        folder = settings.RATCHET_HOME / policy.adapter_path
        if not _file_erase(folder, rows, dry_run):
            continue
        count += 1
        if dry_run:
            continue
        Policy.objects.filter(pk=policy.pk).update(adapter_sha256=file_sum(folder / WEIGHTS))
        for artifact in Artifact.objects.filter(policy=policy):
            (settings.RATCHET_HOME / artifact.path).unlink(missing_ok=True)
            artifact.delete()
    judges = RewardModelVersion.objects.filter(architecture=LINEAR, run__snapshot=snapshot)
    for judge in judges.order_by("pk"):
        folder = settings.RATCHET_HOME / judge.path
        if not _file_erase(folder, rows, dry_run):
            continue
        count += 1
        if not dry_run:
            RewardModelVersion.objects.filter(pk=judge.pk).update(sha256=file_sum(folder / WEIGHTS))
    return count


def _file_erase(folder: Path, rows: Rows, dry_run: bool) -> bool:
    """Leave in the model of a folder what these rows have; True if it loses something."""
    try:
        model = LinearPolicy.load(folder)
    except LinearPolicyError as fault:
        logger.warning("%s is not searched for what is erased: %s", folder, fault)
        return False
    remainder = _restrict(model, rows)
    if (remainder.columns, remainder.rows, remainder.answers) == (model.columns, model.rows, model.answers):
        return False
    if not dry_run:
        remainder.save(folder)
        if (folder / SUMS).is_file():
            sums_write(folder, [WEIGHTS])
    return True


def _restrict(policy: LinearPolicy, rows: Rows) -> LinearPolicy:
    """The model with the prompt features, answer features and answers of these rows alone."""
    try:
        choices = choices_of(rows, agent_served(policy.agent)).rows if rows else []
    except LinearRefused:
        choices = []
    columns = {name for row in rows for name in prompt_features(row["prompt"], policy.families)}
    answers = {
        text for choice in choices for text in (choice.answer, choice.rejected, *choice.options) if text
    }
    return policy.restrict(columns, answers)
