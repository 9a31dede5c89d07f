"""Runs and policies that were trained on prompts, from the function named by FEEDBACK_TRAINED_ON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from django.conf import settings
from django.utils.module_loading import import_string

TrainedFinder = Callable[[Mapping[str, set[str]], datetime], dict[str, list[Any]]]
"""(agent -> prompt hashes, since) -> what was trained on them since then (`rl.datasets.erasure.trained_on`)."""


def prompts_trained_on(prompts: Mapping[str, set[str]], since: datetime) -> dict[str, list[Any]]:
    """Artefacts trained since then on these prompts (agent -> hashes), by FEEDBACK_TRAINED_ON; kinds with
    nothing are left out."""
    if not settings.FEEDBACK_TRAINED_ON:
        return {}
    find: TrainedFinder = import_string(settings.FEEDBACK_TRAINED_ON)
    return {kind: rows for kind, rows in find(prompts, since).items() if rows}


def trained_text(found: Mapping[str, list[Any]]) -> str:
    """Artefacts trained on something, in words."""
    named = {
        "runs": [f"run {run}" for run in found.get("runs", ())],
        "policies": [f"policy {name}" for name in found.get("policies", ())],
        "labels": [f"label model {name}" for name in found.get("labels", ())],
    }
    words = [word for kind in named.values() for word in kind]
    shown = ", ".join(words[:8]) + (f" and {len(words) - 8} more" if len(words) > 8 else "")
    return (
        f"{shown} {'was' if len(words) == 1 else 'were'} trained on it"
        if words
        else "nothing was trained on it"
    )
