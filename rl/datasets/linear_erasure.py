"""Erasure in linear policies and reward models: words of what is erased leave the file, which names each of its weights
in plain text.

A LoRA adapter holds no text; a linear model is a table whose columns are words and fields of the prompts it learnt
from. What stays is what the remaining rows of its dataset have too; the model is not trained again, and its other
weights stay as they were.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings

from feedback.erasure.marks import Marks
from rl.checksums import SUMS, file_sum, sums_write
from rl.linear.features import prompt_features
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, choices_of
from rl.models import Artifact, Policy, RewardModelVersion, Snapshot, TrainingRun
from rl.models.agent_definitions import agent_served
from rl.models.runs import run_folder
from rl.recipes.reward_model import LINEAR

logger = logging.getLogger("rl.datasets.erasure")

Rows = Sequence[Mapping[str, Any]]
Remainder = Callable[[LinearPolicy], LinearPolicy]
"""A model -> what may stay of it."""


def linear_models_erase(snapshot: Snapshot, rows: Rows, dry_run: bool) -> set[str]:
    """Leave in the linear policies and reward models trained on a snapshot what the rows that remain of it have too.

    Return the names of those that lose something. Their sums are registered anew, what their runs keep of them is
    written alike, and exported copies are removed: they are exported again.
    """
    return _runs_erase(
        TrainingRun.objects.filter(snapshot=snapshot), lambda model: _restrict(model, rows), dry_run
    )


def linear_models_redact(marks: Marks, dry_run: bool) -> set[str]:
    """Remove features and answers that quote what is erased from every linear model, whoever said the same.

    Return the names of those that lose something. What redacts text files afterwards finds nothing in them, so that
    their registered sums hold.
    """

    def is_free(text: str) -> bool:
        return bool(marks.redact_json(text) == text)

    named = Policy.objects.filter(kind=Policy.Kind.LINEAR).values("run")
    judges = RewardModelVersion.objects.filter(architecture=LINEAR).values("run")
    runs = TrainingRun.objects.filter(pk__in=named) | TrainingRun.objects.filter(pk__in=judges)
    return _runs_erase(runs, lambda model: model.keep(is_free), dry_run)


def _runs_erase(runs: Any, remainder: Remainder, dry_run: bool) -> set[str]:
    """Erase in all that some runs made and keep: registered models, their folders' copies, copies cut short."""
    home, names = settings.RATCHET_HOME, set()
    for run in runs.order_by("pk"):
        halves = home.glob(f"*/{run.agent}/.*.{run.pk}")  # below policies/ and reward_models/
        for folder in (run_folder(run), *halves):
            for file in sorted(folder.rglob(WEIGHTS)):
                _file_erase(file.parent, remainder, dry_run)
        for policy in Policy.objects.filter(kind=Policy.Kind.LINEAR, run=run):
            folder = home / policy.adapter_path
            if not _file_erase(folder, remainder, dry_run):
                continue
            names.add(policy.name)
            if dry_run:
                continue
            Policy.objects.filter(pk=policy.pk).update(adapter_sha256=file_sum(folder / WEIGHTS))
            for artifact in Artifact.objects.filter(policy=policy):
                (home / artifact.path).unlink(missing_ok=True)
                artifact.delete()
        for judge in RewardModelVersion.objects.filter(architecture=LINEAR, run=run):
            folder = home / judge.path
            if not _file_erase(folder, remainder, dry_run):
                continue
            names.add(judge.name)
            if not dry_run:
                RewardModelVersion.objects.filter(pk=judge.pk).update(sha256=file_sum(folder / WEIGHTS))
    return names


def _file_erase(folder: Path, remainder: Remainder, dry_run: bool) -> bool:
    """Leave in the model of a folder what may stay; True if it loses something."""
    try:
        model = LinearPolicy.load(folder)
    except LinearPolicyError as fault:
        logger.warning("%s is not searched for what is erased: %s", folder, fault)
        return False
    rest = remainder(model)
    if rest.words == model.words:
        return False
    if not dry_run:
        rest.save(folder)
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
