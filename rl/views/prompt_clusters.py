"""Near-identical prompts as the page of a policy shows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl.models import Evaluation
from rl.prompt_clusters import cluster_words


@dataclass(frozen=True)
class ClustersShown:
    """Report on the near-identical prompts that an evaluation found."""

    words: str
    largest: list[dict[str, Any]]
    """Of each of the largest clusters: how many prompts, on which sides, some of them."""


def clusters_shown(evaluation: Evaluation) -> ClustersShown | None:
    """The report of an evaluation; None where no two prompts were near-identical, or none was looked for."""
    report = evaluation.figures.get("clusters") or {}
    words = cluster_words(report)
    return ClustersShown(words, report["largest"]) if words else None
