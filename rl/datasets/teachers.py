"""The policy whose unrated answers can teach another (`--method distil`), and how much of the traffic they cover."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from feedback.selectors import decisions_of, unjudged_counts
from rl.datasets.prompt_clusters import ClusteredPrompt, clusters_of
from rl.models import Policy
from rl.statistics.assignment import BASE

NEWEST = 2_000
"""Newest decisions that stand for the traffic."""


@dataclass(frozen=True)
class TeacherLog:
    """A policy's unrated answers; `policy` is the name in its decisions, which may be empty."""

    policy: str
    answers: int

    @property
    def title(self) -> str:
        return self.policy or "your app's model"


def teacher_log(agent: str) -> TeacherLog | None:
    """The policy with the most unrated answers; None without one. Policies trained here and the base teach nothing."""
    trained = Policy.objects.filter(agent=agent, kind__in=(Policy.Kind.ADAPTER, Policy.Kind.LINEAR))
    own = {BASE, *trained.values_list("name", flat=True)}
    for name, count in unjudged_counts(agent).items():
        if name not in own:
            return TeacherLog(name, count)
    return None


def newest_prompts(agent: str) -> list[str]:
    """Prompts of the newest decisions, each once."""
    rows = decisions_of(agent).order_by("-created_at", "-id").values_list("prompt_hash", flat=True)
    return list(dict.fromkeys(rows[:NEWEST]))


def coverage(
    prompts: dict[str, ClusteredPrompt], log: Collection[str], traffic: Collection[str]
) -> float | None:
    """Share of the traffic's clusters of near-identical prompts with a prompt in the log; None without traffic."""
    clusters = clusters_of(prompts)
    covered = {clusters.get(name) or name for name in log}
    wanted = {clusters.get(name) or name for name in traffic}
    return len(wanted & covered) / len(wanted) if wanted else None
