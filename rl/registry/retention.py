"""Retention of policies' files: the champion, those that may be needed again, the newest and the best."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from django.conf import settings
from django.db import transaction

from rl.gates.headlines import headline_of
from rl.models import Policy, PolicyEvent, TrainingRun
from rl.models.learner_config import learner_settings
from rl.registry import service as registry

logger = logging.getLogger("rl.registry.retention")

Stage, Status = Policy.Stage, TrainingRun.Status


def policies_retained(agent: str) -> dict[int, str]:
    """Policy id -> why its files stay: in service, begun from, the one a rollback would need, the newest, the best."""
    wanted = learner_settings(agent)
    policies = [policy for policy in Policy.objects.filter(agent=agent).order_by("-pk") if policy.has_files]
    reasons: dict[int, str] = {}
    for policy in policies[: wanted.keep_newest]:
        reasons[policy.pk] = "one of the newest"

    def accuracy(policy: Policy) -> float:
        found = headline_of(policy.metrics)
        return found.figure.value if found is not None and found.share else -1.0

    for policy in sorted(policies, key=lambda p: (-accuracy(p), -p.pk))[: wanted.keep_best]:
        reasons[policy.pk] = "one of the best"
    replaced = (
        PolicyEvent.objects.filter(policy__agent=agent, from_stage=Stage.CHAMPION, to_stage=Stage.RETIRED)
        .order_by("-pk")
        .first()
    )
    if replaced is not None:
        reasons[replaced.policy_id] = "the champion before"
    at_work = TrainingRun.objects.filter(agent=agent, status__in=(Status.QUEUED, Status.RUNNING))
    begun = {recipe.get("start_from") for recipe in at_work.values_list("recipe", flat=True)}
    for policy in policies:
        if policy.name in begun:
            reasons[policy.pk] = "a run starts from it"
        if policy.stage in (Stage.CHAMPION, Stage.CHALLENGER):
            reasons[policy.pk] = f"it is {policy.stage}"
    return reasons


def policies_prune(agent: str, *, actor: str) -> list[Policy]:
    """Delete the files of the policies that are not kept; their rows, figures and history stay. Returns those pruned.

    Only folders inside RATCHET_HOME/policies and RATCHET_HOME/exports are touched.
    """
    retained = policies_retained(agent)
    pruned_policies = []
    for policy in Policy.objects.filter(agent=agent).exclude(pk__in=retained):
        if not policy.has_files or policy.events.filter(kind=PolicyEvent.Kind.PRUNED).exists():
            continue
        paths = [registry.home_path(policy.adapter_path)]
        paths += [registry.home_path(artifact.path) for artifact in policy.artifacts.all()]
        freed = sum(_remove(path) for path in paths)
        with transaction.atomic():
            PolicyEvent.objects.create(
                policy=policy,
                kind=PolicyEvent.Kind.PRUNED,
                actor=actor,
                reason="not in use, and neither among the newest nor the best",
                verdicts={"bytes": freed},
            )
        logger.info("%s: files removed, %.1f MB", policy.name, freed / 1e6)
        pruned_policies.append(policy)
    return pruned_policies


def _remove(path: Path) -> int:
    """Delete a file or folder below the data folder; returns the bytes freed, 0 where it is elsewhere or gone."""
    path = path.resolve()
    inside = any(path.is_relative_to(settings.RATCHET_HOME / room) for room in ("policies", "exports"))
    if not inside or not path.exists():
        return 0
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    freed = sum(file.stat().st_size for file in files)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return freed
