"""Erasure beyond feedback: rows of snapshots, quotes in evaluations and runs; and what was trained on them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import transaction

from feedback.erasure.marks import Marks
from feedback.erasure.places import columns_erase
from rl.checksums import SUMS, file_sum, sums_write
from rl.datasets import DatasetRefused, snapshot_rows
from rl.datasets.snapshots import file_store, rows_write, temporary_file
from rl.linear.features import prompt_features
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, choices_of
from rl.models import (
    Artifact,
    Evaluation,
    GoldenCase,
    JudgedPair,
    LabelRun,
    Policy,
    RewardModelVersion,
    RewardRecord,
    Snapshot,
    TrainingRun,
)
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


def decisions_forget(decisions: Sequence[uuid.UUID]) -> None:
    """Remove what is kept of decisions that are forgotten: their rewards, whose parts may quote them, and the pairs of
    judging rounds on their prompts."""
    gone = RewardRecord.objects.filter(decision__in=decisions)
    gone._raw_delete(gone.db)  # a chain of records points to itself
    JudgedPair.objects.filter(decision__in=decisions).delete()


def snapshots_containing(
    prompts: Mapping[str, set[str]], since: datetime | None = None
) -> list[dict[str, Any]]:
    """Agent -> prompt hashes, to the snapshots that hold one of these prompts, newest first.

    since: of those made since then alone.

    Each: {snapshot, agent, path, rows, fault, runs, policies}; rows counts those of the prompts. A snapshot whose file
    is gone or was changed cannot be searched: rows is None and fault says why.
    """
    summaries: list[dict[str, Any]] = []
    snapshots = Snapshot.objects.filter(agent__in=list(prompts))
    if since is not None:
        snapshots = snapshots.filter(created_at__gte=since)
    for snapshot in snapshots.order_by("-pk"):
        wanted, fault, rows = prompts[snapshot.agent], "", 0
        try:
            rows = sum(row["prompt_hash"] in wanted for row in snapshot_rows(snapshot))
        except DatasetRefused as refusal:
            fault = str(refusal)
        if rows or fault:
            summaries.append(
                {
                    "snapshot": snapshot.pk,
                    "agent": snapshot.agent,
                    "path": snapshot.path,
                    "rows": None if fault else rows,
                    "fault": fault,
                    "runs": list(snapshot.runs.order_by("pk").values_list("pk", flat=True)),
                    "policies": list(
                        Policy.objects.filter(run__snapshot=snapshot)
                        .order_by("pk")
                        .values_list("name", flat=True)
                    ),
                }
            )
    return summaries


COLUMNS: dict[str, tuple[str, ...]] = {
    "rl.Evaluation": ("figures", "evidence"),
    "rl.Policy": ("metrics",),
    "rl.PolicyEvent": ("reason", "verdicts"),
    "rl.TrainingRun": ("reason", "result"),
    "rl.RunMetric": ("values",),
    "rl.LabelRun": ("figures", "left_out"),
    "rl.RewardModelVersion": ("ranking",),
    "rl.RewardModelEvent": ("reason", "figures"),
    "rl.ExperimentEvent": ("reason", "figures"),
    "rl.JudgingRound": ("reason",),
    "rl.JudgedPair": ("answer", "other_answer"),
    "rl.Snapshot": ("query", "left_out"),
    "rl.GoldenCase": ("messages", "state", "accepted", "forbidden"),
}
"""Model -> columns that may quote a decision: reports and answers of evaluations, samples, reports."""


def copies_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """FEEDBACK_ERASURE: rows of snapshots, and what evaluations, runs, policies and golden cases quote.

    A golden case whose words are erased is switched off: it asks for nothing any more. Caches of tokens go where a
    snapshot held such rows; they are made again.
    """
    counts: dict[str, int] = {}
    quoted = [case for case in GoldenCase.objects.all() if _contains_quote(marks, case)]
    if not dry_run:
        GoldenCase.objects.filter(pk__in=[case.pk for case in quoted]).update(active=False)
    counts |= columns_erase(marks, dry_run, COLUMNS)
    rows, models, files = _snapshots_erase(marks, dry_run)
    models |= linear_models_redact(marks, dry_run)
    counts |= {"rows of snapshots": rows, "linear models": len(models), "snapshot files of no run": files}
    folder = settings.RATCHET_HOME / "cache"
    # an answer of a hosted model may repeat a prompt that no snapshot holds
    for cache in sorted(folder.glob("hosted-answers.sqlite3*")) if not dry_run else ():
        cache.unlink(missing_ok=True)
    if rows:
        caches = sorted(folder.glob("*.sqlite3*"))
        counts["caches of tokens"] = len(caches)
        for cache in caches if not dry_run else ():
            cache.unlink(missing_ok=True)
    return counts


def _contains_quote(marks: Marks, case: GoldenCase) -> bool:
    words = [case.messages, case.state, case.accepted, case.forbidden]
    return bool(marks.redact_json(words) != words)


def _snapshots_erase(marks: Marks, dry_run: bool) -> tuple[int, set[str], int]:
    """Rows left out of snapshots that are written anew without them, linear policies and reward models that lose words
    of these rows, and files no snapshot names that are removed."""
    count = 0
    models: set[str] = set()
    named = set(Snapshot.objects.values_list("path", flat=True))
    for snapshot in Snapshot.objects.filter(agent__in=list(marks.prompts)).order_by("pk"):
        gone, changed = _snapshot_erase(snapshot, marks, dry_run)
        count, models = count + gone, models | changed
    named |= set(Snapshot.objects.values_list("path", flat=True))
    home = settings.RATCHET_HOME
    orphans = [
        path
        for path in sorted((home / "snapshots").rglob("*.jsonl"))
        if str(path.relative_to(home)) not in named
        and marks.redacted_bytes(data := path.read_bytes()) != data
    ]
    for path in orphans if not dry_run else ():
        path.unlink(missing_ok=True)
    return count, models, len(orphans)


def _snapshot_erase(snapshot: Snapshot, marks: Marks, dry_run: bool) -> tuple[int, set[str]]:
    """Write a snapshot's file anew without the rows of what is erased; how many these are, and the linear models
    trained on it that lose their words.

    Its row then names the new file and its hash; `query.erased` says how many rows are gone and what the hash was.
    """
    prompts = marks.prompts.get(snapshot.agent, frozenset())
    try:
        every = list(snapshot_rows(snapshot))
    except DatasetRefused:
        return 0, set()  # gone or changed: listed by `snapshots_containing`, and nothing is known of its rows
    rows = [row for row in every if not _is_of_unit(row, prompts, marks)]
    erased_count = len(every) - len(rows)
    models = linear_models_erase(snapshot, rows, dry_run) if erased_count else set()
    if not erased_count or dry_run:
        return erased_count, models
    old_path: Path = settings.RATCHET_HOME / snapshot.path
    with temporary_file(old_path.parent) as file:
        sha256 = rows_write(file, rows)
        path = file_store(file, sha256)
    erased = snapshot.query.get("erased") or {"rows": 0, "sha256_before": snapshot.sha256}
    snapshot.query = snapshot.query | {"erased": erased | {"rows": erased["rows"] + erased_count}}
    snapshot.counts = {split: sum(row["split"] == split for row in rows) for split in snapshot.counts}
    snapshot.path, snapshot.sha256 = str(path.relative_to(settings.RATCHET_HOME)), sha256
    snapshot.save(update_fields=["query", "counts", "path", "sha256"])
    others = Snapshot.objects.filter(path=str(old_path.relative_to(settings.RATCHET_HOME)))
    if old_path != path and not others.exists():
        # until the new name is in the database for certain, the old one must lead somewhere
        transaction.on_commit(lambda: old_path.unlink(missing_ok=True))
    return erased_count, models


def _is_of_unit(row: Mapping[str, Any], prompts: Set[str], marks: Marks) -> bool:
    """True if a row is of the unit: its prompt is no other decision's, or one of its responses was the
    unit's."""
    if row["prompt_hash"] not in prompts:
        return False
    if row["prompt_hash"] in marks.own_prompts:
        return True
    sides = [row.get(name) for name in ("chosen", "rejected", "completion")]
    texts = [*sides, *row.get("completions", ()), *row.get("preferred", ()), *row.get("dispreferred", ())]
    return any(text in marks.responses if isinstance(text, str) else False for text in texts) or (
        marks.redact_json(dict(row)) != row
    )


LEARNING = (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING, TrainingRun.Status.SUCCEEDED)


def trained_on(prompts: Mapping[str, set[str]], since: datetime) -> dict[str, list[Any]]:
    """Artefacts trained since then on these prompts (agent -> prompt hashes).

    {runs: numbers of those that learn or learnt, policies: names, labels: label models learnt from these agents'
    ratings, snapshots: numbers, evaluations: numbers of those judged on it}. A snapshot whose file is gone or changed
    cannot be searched and counts as one that holds them.
    """
    snapshots = [found["snapshot"] for found in snapshots_containing(prompts, since)]
    runs = TrainingRun.objects.filter(snapshot__in=snapshots)
    learnt = runs.filter(status__in=LEARNING) | runs.filter(policy__isnull=False)
    labels = LabelRun.objects.filter(agent__in=list(prompts), created_at__gte=since).exclude(path="")
    evaluations = Evaluation.objects.filter(snapshot__in=snapshots)
    return {
        "runs": sorted(set(learnt.values_list("pk", flat=True))),
        "policies": sorted(Policy.objects.filter(run__snapshot__in=snapshots).values_list("name", flat=True)),
        "labels": [str(row) for row in labels.order_by("pk")],
        "snapshots": sorted(snapshots),
        "evaluations": sorted(evaluations.values_list("pk", flat=True)),
    }
