"""Erasure in training artefacts (snapshots, evaluations, runs, linear models), and what was trained on prompts."""

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
from feedback.erasure.service import columns_erase
from rl import artifacts
from rl.checksums import SUMS, file_sum, sums_write
from rl.datasets import DatasetRefused, snapshot_rows
from rl.datasets.feedback_types import Row
from rl.datasets.snapshots import file_store, rows_write, temporary_file
from rl.linear.features import prompt_features
from rl.linear.model import WEIGHTS, LinearPolicy, LinearPolicyError
from rl.linear.rows import LinearRefused, choices_of
from rl.models import (
    Artifact,
    Evaluation,
    GoldenCase,
    JudgedPair,
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

Remainder = Callable[[LinearPolicy], LinearPolicy]
"""Model -> the part of it that stays."""


def linear_models_erase(snapshot: Snapshot, rows: Sequence[Row], dry_run: bool) -> set[str]:
    """Restrict linear models trained on a snapshot to the features of its remaining rows; returns changed names.

    A linear model names its weights by words of prompts. It is not retrained; the other weights stay. Checksums and
    copies in run folders are updated; exported files are deleted.
    """
    return _runs_erase(
        TrainingRun.objects.filter(snapshot=snapshot), lambda model: _restrict(model, rows), dry_run
    )


def linear_models_redact(marks: Marks, dry_run: bool) -> set[str]:
    """Remove features and answers that quote erased text from every linear model; returns changed names.

    Call it before text files are redacted, which would change the files without updating their checksums.
    """

    def is_free(text: str) -> bool:
        return bool(marks.redact_json(text) == text)

    named = Policy.objects.filter(kind=Policy.Kind.LINEAR).values("run")
    judges = RewardModelVersion.objects.filter(architecture=LINEAR).values("run")
    runs = TrainingRun.objects.filter(pk__in=named) | TrainingRun.objects.filter(pk__in=judges)
    return _runs_erase(runs, lambda model: model.keep(is_free), dry_run)


def _runs_erase(runs: Any, remainder: Remainder, dry_run: bool) -> set[str]:
    """Erase in the registered models of some runs, their copies in run folders, and partly written copies."""
    home, names = settings.RATCHET_HOME, set()
    for run in runs.order_by("pk"):
        halves = home.glob(f"*/{run.agent}/.*.{run.pk}")  # Below policies/ and reward_models/.
        for folder in (run_folder(run), *halves):
            for file in sorted(folder.rglob(WEIGHTS)):
                _file_erase(file.parent, remainder, dry_run)
        for policy in Policy.objects.filter(kind=Policy.Kind.LINEAR, run=run):
            folder = home / policy.adapter_path
            artifacts.fetch(folder)
            if not _file_erase(folder, remainder, dry_run):
                continue
            names.add(policy.name)
            if dry_run:
                continue
            Policy.objects.filter(pk=policy.pk).update(adapter_sha256=file_sum(folder / WEIGHTS))
            artifacts.put(folder)
            for artifact in Artifact.objects.filter(policy=policy):
                artifacts.forget(artifact.path)
                (home / artifact.path).unlink(missing_ok=True)
                artifact.delete()
        for judge in RewardModelVersion.objects.filter(architecture=LINEAR, run=run):
            folder = home / judge.path
            artifacts.fetch(folder)
            if not _file_erase(folder, remainder, dry_run):
                continue
            names.add(judge.name)
            if not dry_run:
                RewardModelVersion.objects.filter(pk=judge.pk).update(sha256=file_sum(folder / WEIGHTS))
                artifacts.put(folder)
    return names


def _file_erase(folder: Path, remainder: Remainder, dry_run: bool) -> bool:
    """Reduce the model in a folder; True if it loses features."""
    try:
        model = LinearPolicy.load(folder)
    except LinearPolicyError as fault:
        logger.warning("%s cannot be read, so erased text in it was not searched: %s", folder, fault)
        return False
    rest = remainder(model)
    if rest.words == model.words:
        return False
    if not dry_run:
        rest.save(folder)
        if (folder / SUMS).is_file():
            sums_write(folder, [WEIGHTS])
    return True


def _restrict(policy: LinearPolicy, rows: Sequence[Row]) -> LinearPolicy:
    """The model with only the features and answers of these rows."""
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
    """FEEDBACK_FORGET: delete the rewards of erased decisions and the judged pairs on them."""
    gone = RewardRecord.objects.filter(decision__in=decisions)
    gone._raw_delete(gone.db)  # In SQL, because records point to their predecessors.
    JudgedPair.objects.filter(decision__in=decisions).delete()


def snapshots_containing(
    prompts: Mapping[str, set[str]], since: datetime | None = None
) -> list[dict[str, Any]]:
    """Snapshots made since then that hold one of these prompts ({agent: prompt hashes}), newest first.

    Each is {snapshot, agent, path, rows, fault, runs, policies}. If its file is gone or changed, rows is None and fault
    says why.
    """
    summaries: list[dict[str, object]] = []
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
    "rl.RewardModelVersion": ("ranking",),
    "rl.ExperimentEvent": ("reason", "figures"),
    "rl.JudgingRound": ("reason",),
    "rl.JudgedPair": ("answer", "other_answer"),
    "rl.Snapshot": ("query", "left_out"),
    "rl.GoldenCase": ("messages", "state", "accepted", "forbidden"),
}
"""Model -> columns that may quote a decision."""


def copies_erase(marks: Marks, dry_run: bool) -> dict[str, int]:
    """FEEDBACK_ERASURE: erase snapshot rows and quotes in evaluations, runs, policies and golden cases.

    Deactivates golden cases that lose text. Deletes token caches if a snapshot lost rows; they are rebuilt.
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
    # A hosted model's answer may repeat a prompt that no snapshot holds.
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
    """(rows removed from snapshots, linear models that lost features, deleted files that no snapshot names)."""
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
    """Rewrite a snapshot without erased rows; returns (rows removed, linear models that lost features).

    The Snapshot row gets the new path and hash; `query.erased` records the number of rows and the former hash.
    """
    prompts = marks.prompts.get(snapshot.agent, frozenset())
    try:
        every = list(snapshot_rows(snapshot))
    except DatasetRefused:
        return 0, set()  # Gone or changed; `snapshots_containing` lists it.
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
        # Until the commit, the database still names the old file.
        artifacts.forget(old_path)
        transaction.on_commit(lambda: old_path.unlink(missing_ok=True))
    return erased_count, models


def _is_of_unit(row: Row, prompts: Set[str], marks: Marks) -> bool:
    """True if no other decision has the row's prompt, or if one of its responses belongs to the unit."""
    if row["prompt_hash"] not in prompts:
        return False
    if row["prompt_hash"] in marks.own_prompts:
        return True
    sides = [row.get(name) for name in ("chosen", "rejected", "completion")]
    texts = [*sides, *row.get("preferred", ()), *row.get("dispreferred", ())]
    return any(text in marks.responses if isinstance(text, str) else False for text in texts) or (
        marks.redact_json(dict(row)) != row
    )


LEARNING = (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING, TrainingRun.Status.SUCCEEDED)


def trained_on(prompts: Mapping[str, set[str]], since: datetime) -> dict[str, list[Any]]:
    """FEEDBACK_TRAINED_ON: artefacts trained since then on these prompts ({agent: prompt hashes}).

    Returns runs, snapshots and evaluations (numbers), and policies (names). A snapshot whose file is gone
    or changed counts as holding the prompts.
    """
    snapshots = [found["snapshot"] for found in snapshots_containing(prompts, since)]
    runs = TrainingRun.objects.filter(snapshot__in=snapshots)
    learnt = runs.filter(status__in=LEARNING) | runs.filter(policy__isnull=False)
    evaluations = Evaluation.objects.filter(snapshot__in=snapshots)
    return {
        "runs": sorted(set(learnt.values_list("pk", flat=True))),
        "policies": sorted(Policy.objects.filter(run__snapshot__in=snapshots).values_list("name", flat=True)),
        "snapshots": sorted(snapshots),
        "evaluations": sorted(evaluations.values_list("pk", flat=True)),
    }
