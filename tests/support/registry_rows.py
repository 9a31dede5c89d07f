"""Rows of the registry as trainings leave them, without a training."""

from pathlib import Path
from typing import Any

from django.utils import timezone

from rl.checksums import file_sum
from rl.models import Policy, TrainingRun
from rl.registry import service as registry


def make_run(agent: str = "widgets", **facts: Any) -> TrainingRun:
    """A run that succeeded, unless the facts say otherwise."""
    known = {"method": "dpo", "status": "succeeded", "base_model": "bundled", "finished_at": timezone.now()}
    return TrainingRun.objects.create(agent=agent, **(known | facts))


def registered(run: TrainingRun, name: str, adapter: Path = Path("nowhere"), **facts: Any) -> Policy:
    weights = adapter / "adapter_model.safetensors"
    if adapter.is_dir() and not weights.exists():
        weights.write_bytes(b"weights")
    known = {
        "adapter_sha256": file_sum(weights) if weights.exists() else "a" * 64,
        "feedback_count": 1,
        "actor": "test",
    }
    return registry.policy_register(run, name=name, adapter=adapter, **(known | facts))


def policy_of(name: str, stage: str = Policy.Stage.CHALLENGER, agent: str = "filer", **facts: Any) -> Policy:
    """A policy's row alone: no run, no file."""
    files = {"adapter_path": "policies/x", "adapter_sha256": "0" * 64, "feedback_count": 1}
    base = {"base_model": "bundled", "base_model_hash": "0"}
    return Policy.objects.create(name=name, agent=agent, stage=stage, **(base | files | facts))


def make_policy(agent: str = "widgets", **metrics: Any) -> Policy:
    """The next candidate of an agent, with the figures of its evaluation."""
    name = registry.policy_name_next(agent, 9)
    policy = registered(make_run(agent), name, registry.home_path("a"), feedback_count=9)
    Policy.objects.filter(pk=policy.pk).update(metrics=metrics)
    policy.refresh_from_db()
    return policy
