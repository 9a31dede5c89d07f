"""Files of agents and policies: deleting an agent, and which policies' files are kept."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import transaction
from django.db.models import CharField, Model

from rl import artifacts
from rl.gates.headlines import headline_of
from rl.models import AgentDefinition, Artifact, Experiment, Policy, PolicyEvent, StoredFile, TrainingRun
from rl.models.fine_tuning import tuned_models
from rl.models.learning import learner_settings
from rl.registry import service as registry

FOLDERS = ("policies", "snapshots")
"""Folders of RATCHET_HOME with a folder per agent."""

DATA_FOLDERS = (*FOLDERS, "runs", "exports")
"""Folders of RATCHET_HOME from which files may be removed."""

PATHS = ("path", "adapter_path", "output", "checkpoint", "base_model")
"""Columns with a path, relative to RATCHET_HOME where inside it."""

UNDER_WAY = (TrainingRun.Status.QUEUED, TrainingRun.Status.RUNNING)


def refusal(agent: str) -> str:
    """Why an agent cannot be deleted now; empty if it can."""
    run = TrainingRun.objects.filter(agent=agent, status__in=UNDER_WAY).order_by("pk").first()
    if run is not None:
        return f"run {run.pk} of {agent} is {run.status}: cancel it or wait until it ends"
    running = Experiment.objects.filter(agent=agent, status=Experiment.Status.RUNNING).first()
    return f"experiment {running.name} of {agent} is running: stop it first" if running else ""


def artifacts_trained(agent: str) -> dict[str, list[object]]:
    """Successful runs and policies of an agent."""
    runs = TrainingRun.objects.filter(agent=agent, status=TrainingRun.Status.SUCCEEDED)
    trained = Policy.objects.filter(agent=agent, kind__in=(Policy.Kind.ADAPTER, Policy.Kind.LINEAR))
    return {
        "runs": list(runs.order_by("pk").values_list("pk", flat=True)),
        "policies": list(trained.order_by("pk").values_list("name", flat=True)),
    }


def definition_rows(agent: str) -> int:
    return AgentDefinition.objects.filter(slug=agent).count()


# --- Deleting -----------------------------------------------------------------------------------------------


def files(agent: str) -> list[str]:
    """Existing files and folders of an agent, relative to RATCHET_HOME."""
    found = {f"{folder}/{agent}" for folder in FOLDERS}
    found |= {f"runs/{pk}" for pk in TrainingRun.objects.filter(agent=agent).values_list("pk", flat=True)}
    found |= set(Artifact.objects.filter(policy__agent=agent).values_list("path", flat=True))
    for model, column in _path_columns():
        if column in ("path", "adapter_path", "output") and model not in (Artifact, StoredFile):
            rows: Any = model._default_manager.filter(agent=agent).exclude(**{column: ""})
            found |= set(rows.values_list(column, flat=True))
    inside = sorted(str(path) for text in found if (path := _owned_path(text)) is not None)
    # a folder means all files in it
    return [
        path for path in inside if not any(path.startswith(f"{other}/") for other in inside if other != path)
    ]


def delete(agent: str) -> None:
    AgentDefinition.objects.filter(slug=agent).delete()


def files_note(agent: str, paths: Sequence[str]) -> None:
    """Writes down the files of an agent that is about to be deleted, to resume after a crash."""
    note = _note(agent)
    note.parent.mkdir(parents=True, exist_ok=True)
    half = note.with_name(f".{note.name}.half")
    half.write_text(json.dumps(list(paths)), "utf-8")
    half.replace(note)


def files_remove(agent: str) -> int:
    """Removes the noted files of a deleted agent, except those a row refers to. Returns how many."""
    note, count = _note(agent), 0
    if not note.exists():
        return 0
    named = set(_referenced_paths())
    for text in json.loads(note.read_text("utf-8")):
        path = _owned_path(text)
        if path is None or any(str(path) == name or name.startswith(f"{path}/") for name in named):
            continue
        whole = _home() / path
        artifacts.forget(path)
        count += sum(1 for _ in _files(whole)) if whole.is_dir() else 1
        shutil.rmtree(whole) if whole.is_dir() else whole.unlink()
        _remove_empty(whole.parent)
    note.unlink()
    return count


# --- Paths --------------------------------------------------------------------------------------------------


def _home() -> Path:
    home: Path = settings.RATCHET_HOME
    return home


def _note(agent: str) -> Path:
    return _home() / "cache" / "agents-deleted" / f"{agent}.json"


def _owned_path(text: str) -> Path | None:
    """A stored path relative to RATCHET_HOME, if it exists inside one of DATA_FOLDERS."""
    path = (_home() / text).resolve()
    home = _home().resolve()
    if not path.exists() or not path.is_relative_to(home):
        return None
    inner = path.relative_to(home)
    return inner if len(inner.parts) > 1 and inner.parts[0] in DATA_FOLDERS else None


def _referenced_paths() -> Iterator[str]:
    """Every path in RATCHET_HOME that a row refers to, and the folders of existing runs."""
    for model, column in _path_columns():
        if model is StoredFile:
            continue
        rows: Any = model._default_manager.order_by().exclude(**{column: ""})
        for text in rows.values_list(column, flat=True).distinct():
            if (path := _owned_path(text)) is not None:
                yield str(path)
    for pk in TrainingRun.objects.values_list("pk", flat=True):
        yield f"runs/{pk}"


def _path_columns() -> list[tuple[type[Model], str]]:
    return [
        (model, field.name)
        for model in apps.get_app_config("rl").get_models()
        for field in model._meta.concrete_fields
        if field.name in PATHS and isinstance(field, CharField)
    ]


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []


def _remove_empty(folder: Path) -> None:
    """Removes a folder and its subfolders as far as they are empty; never one of RATCHET_HOME's own."""
    if not folder.is_dir() or folder.parent in (_home(), _home().parent):
        return
    for inner in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        if not any(inner.iterdir()):
            inner.rmdir()
    if not any(folder.iterdir()):
        folder.rmdir()


# --- Retention of policies' files ---


logger = logging.getLogger("rl.registry.files")

Stage, Status = Policy.Stage, TrainingRun.Status


def policies_retained(agent: str) -> dict[int, str]:
    """Policy id -> why its files are kept: in service, started from, previous champion, newest, best."""
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
    tuned = tuned_models()
    for policy in policies:
        if policy.name in tuned and policy.stage != Stage.REJECTED:
            reasons[policy.pk] = "it answers as a fine-tuned model"
        if policy.name in begun:
            reasons[policy.pk] = "a run starts from it"
        if policy.stage in (Stage.CHAMPION, Stage.CHALLENGER):
            reasons[policy.pk] = f"it is {policy.stage}"
    return reasons


def policies_prune(agent: str, *, actor: str) -> list[Policy]:
    """Deletes the files of policies that are not retained; rows, figures and history stay. Returns those pruned.

    Touches only folders inside RATCHET_HOME/policies and RATCHET_HOME/exports.
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
    """Deletes a file or folder below the data folder, here and in the store. Returns the bytes freed here, 0 if it is
    elsewhere or gone."""
    path = path.resolve()
    inside = any(path.is_relative_to(settings.RATCHET_HOME / room) for room in ("policies", "exports"))
    if inside:
        artifacts.forget(path)
    if not inside or not path.exists():
        return 0
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    freed = sum(file.stat().st_size for file in files)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    return freed
