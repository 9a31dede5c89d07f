"""Erasure in linear policies: words of what is erased leave the file, which names each of its weights in plain text.

A LoRA adapter holds no text; a linear policy is a table whose columns are words and fields of the prompts it learnt
from. What stays is what the remaining rows of its dataset have too; the policy is not trained again, and its other
weights stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings

from rl.checksums import file_sum, sums_write
from rl.linear.features import prompt_features
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, choices_of
from rl.models import Artifact, Policy, Snapshot
from rl.models.agent_definitions import agent_served

logger = logging.getLogger("rl.datasets.erasure")


def linear_policies_erase(snapshot: Snapshot, rows: Sequence[Mapping[str, Any]], dry_run: bool) -> int:
    """Leave in the linear policies trained on a snapshot what the rows that remain of it have too; how many policies
    lose something. Their sums are registered anew, and exported copies are removed: they are exported again."""
    count = 0
    for row in Policy.objects.filter(kind=Policy.Kind.LINEAR, run__snapshot=snapshot).order_by("pk"):
        folder = settings.RATCHET_HOME / row.adapter_path
        try:
            policy = LinearPolicy.load(folder)
        except LinearPolicyError as fault:
            logger.warning("%s is not searched for what is erased: %s", row.name, fault)
            continue
        remainder = _restrict(policy, rows)
        if (remainder.columns, remainder.rows, remainder.answers) == (
            policy.columns,
            policy.rows,
            policy.answers,
        ):
            continue
        count += 1
        if dry_run:
            continue
        remainder.save(folder)
        sums_write(folder, [WEIGHTS])
        Policy.objects.filter(pk=row.pk).update(adapter_sha256=file_sum(folder / WEIGHTS))
        for artifact in Artifact.objects.filter(policy=row):
            (settings.RATCHET_HOME / artifact.path).unlink(missing_ok=True)
            artifact.delete()
    return count


def _restrict(policy: LinearPolicy, rows: Sequence[Mapping[str, Any]]) -> LinearPolicy:
    """The policy with the prompt features, answer features and answers of these rows alone."""
    try:
        choices = choices_of(rows, agent_served(policy.agent)).rows if rows else []
    except LinearRefused:
        choices = []
    columns = {name for row in rows for name in prompt_features(row["prompt"], policy.families)}
    answers = {
        text for choice in choices for text in (choice.answer, choice.rejected, *choice.options) if text
    }
    return policy.restrict(columns, answers)
