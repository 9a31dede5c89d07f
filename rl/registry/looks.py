"""Looks at an agent's holdout: how many figures of it were shown by which somebody may have picked a policy."""

from __future__ import annotations

import datetime
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from django.db.models import Q

from rl.checksums import file_sum
from rl.models import Evaluation, Policy, PolicyEvent, PromptSplit

PROMPTS_AT_ONCE = 900
"""Hashes in one query."""


def attempt_of(evaluation: Evaluation) -> int:
    """The number of an evaluation among the looks at its agent's holdout, from 1, as the gate pays for them.

    Every evaluation on the holdout shows figures by which somebody may pick a policy, so every one counts, compared or
    not and whatever it was compared with, gated or not, since the rival took its place; those compared with the rival
    always do. One on a file counts where the file holds prompts of the holdout. The same policy on the same prompts,
    judged in the same way, is one look; on a part of them (`--max-samples`), by other rewards, or with other weights in
    the same folder it is another. Looks at the rival itself pick no other.

    The classifier shown beside a policy may be trained and put up itself: from the first evaluation of a linear policy
    on, each classifier that was shown counts as a look too.
    """
    looks = Evaluation.objects.filter(
        Q(split="holdout") | Q(figures__holdout_prompts__gt=0), agent=evaluation.agent, pk__lte=evaluation.pk
    )
    if (began := _champion_since(evaluation.agent, evaluation.against)) is not None:
        looks = looks.filter(Q(against=evaluation.against) | Q(created_at__gte=began))
    looks = looks.exclude(policy__isnull=False, policy__name=evaluation.against)
    subjects: set[str] = set()
    classifiers: set[str] = set()
    paid = 0
    for *subject, base_model, classifier in looks.order_by("pk").values_list(
        "policy_id", "checkpoint", "snapshot_id", "samples", "figures__order",
        "base_model", "figures__baseline__trained_on",
    ):  # fmt: skip
        subjects.add(json.dumps(subject, sort_keys=True))
        if classifier is not None:
            classifiers.add(json.dumps(classifier, sort_keys=True))
        if not base_model:  # a linear policy has none
            paid = len(classifiers)
    return max(len(subjects) + paid, 1)


def order_facts(options: Mapping[str, Any], weights: Path | None, test_data: Path | None) -> dict[str, Any]:
    """Facts that tell one evaluation of a policy from another, beside the policy and the prompts; part of its figures.

    options: as they were asked; those that are not set are left out. weights: the file of a checkpoint that is no
    registered policy, whose folder may hold others tomorrow.
    """
    facts = {name: value for name, value in options.items() if value}
    if weights is not None:
        facts["weights"] = file_sum(weights)
    if test_data is not None:
        facts["test_data"] = file_sum(test_data)
    return facts


def holdout_prompts(agent: str, hashes: Collection[str]) -> int:
    """Number of these prompts that stand in the agent's holdout: a file that holds them shows its figures."""
    names = sorted(set(hashes))
    return sum(
        PromptSplit.objects.filter(
            agent=agent, split=PromptSplit.Split.HOLDOUT, prompt_hash__in=names[at : at + PROMPTS_AT_ONCE]
        ).count()
        for at in range(0, len(names), PROMPTS_AT_ONCE)
    )


def _champion_since(agent: str, name: str) -> datetime.datetime | None:
    """The moment from which a policy was the one to beat; None for the base model and for one that never was."""
    moves = PolicyEvent.objects.filter(policy__agent=agent, policy__name=name, to_stage=Policy.Stage.CHAMPION)
    return moves.order_by("-pk").values_list("created_at", flat=True).first()
