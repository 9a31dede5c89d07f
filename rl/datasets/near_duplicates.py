"""Near-identical prompts as the pages of policies and datasets show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from feedback.explorer.bulk_readers import prompts_named
from feedback.storage.sql import IDS
from rl.datasets.prompt_clusters import cluster_text, prompt_text
from rl.models import Evaluation

EXAMPLE_CHARS = 200
"""Characters shown of a prompt."""


@dataclass(frozen=True)
class NearIdenticalPrompts:
    """Report on the near-identical prompts that an evaluation found."""

    words: str
    largest: list[dict[str, Any]]
    """Of each of the largest clusters: how many prompts, on which sides, some of them."""


def prompt_words(agent: str, prompt_hashes: Sequence[str]) -> dict[str, str]:
    """The words of prompts of an agent's decisions, by hash; erased ones are missing."""
    found: dict[str, str] = {}
    for start in range(0, len(prompt_hashes), IDS):
        named = prompts_named(agent, prompt_hashes[start : start + IDS])
        found |= {name: prompt_text(messages) for name, messages in named.items()}
    return found


def near_identical_prompts(evaluation: Evaluation) -> NearIdenticalPrompts | None:
    """The report of an evaluation; None where no two prompts were near-identical, or none was looked for."""
    report = evaluation.figures.get("clusters") or {}
    words = cluster_text(report)
    if not words:
        return None
    names = [name for one in report["largest"] for name in one["examples"]]
    texts = prompt_words(evaluation.agent, names)
    largest = [
        {**one, "examples": [texts[name][:EXAMPLE_CHARS] for name in one["examples"] if name in texts]}
        for one in report["largest"]
    ]
    return NearIdenticalPrompts(words, largest)
