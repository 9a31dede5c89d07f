"""Delete an agent, and its page: rows in one transaction, its files in an order that survives a kill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

from django.apps import apps
from django.conf import settings
from django.contrib import messages
from django.db import transaction
from django.db.models import CharField, ForeignKey, Model
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone

from feedback.accounts.roles import page_for
from feedback.cache import forget_all
from feedback.erasure.withdrawals import trained_text
from feedback.models import ImportBatch
from feedback.storage.sql import rows_delete

MAIN_ROWS = ("decisions", "ratings", "comparisons", "policies", "training runs")
"""Rows whose counts stand first on the page that deletes an agent."""


def agent_path(model: type[Model], seen: frozenset[type[Model]] = frozenset()) -> str:
    """Lookup from a model to its agent's slug, such as `agent` or `decision__agent`; "" without an agent."""
    for column in model._meta.concrete_fields:
        if column.name == "agent" and isinstance(column, CharField):
            return "agent"
    for column in model._meta.concrete_fields:
        other = column.related_model
        if not isinstance(column, ForeignKey) or column.null or not isinstance(other, type) or other in seen:
            continue
        if path := agent_path(other, seen | {model}):
            return f"{column.name}__{path}"
    return ""


def agent_models() -> dict[type[Model], str]:
    """Model with rows of an agent -> lookup to the slug; rows found through other tables come first."""
    found = {
        model: path
        for model in apps.get_models()
        if model is not ImportBatch and (path := agent_path(model)) != ""
    }
    return dict(sorted(found.items(), key=lambda item: (-item[1].count("__"), item[0].__name__)))


def rows_of(agent: str) -> Iterator[tuple[type[Model], Any]]:
    """(model, the agent's rows in it)."""
    for model, path in agent_models().items():
        yield model, model._default_manager.order_by().filter(**{path: agent})


def rows_counted(agent: str) -> dict[str, int]:
    """Table -> number of the agent's rows, without zeros."""
    counts = {str(model._meta.verbose_name_plural): rows.count() for model, rows in rows_of(agent)}
    return {name: count for name, count in sorted(counts.items()) if count}


def is_known(agent: str) -> bool:
    return any(rows.exists() for _, rows in rows_of(agent))


def rows_pointing_in(agent: str) -> list[str]:
    """Rows of other agents that refer to this agent's rows, in words."""
    models = agent_models()
    found = []
    for model, path in models.items():
        for column in model._meta.concrete_fields:
            if not isinstance(column, ForeignKey) or column.related_model not in models:
                continue
            theirs = models[column.related_model]
            rows = model._default_manager.order_by().filter(**{f"{column.name}__{theirs}": agent})
            if (count := rows.exclude(**{path: agent}).count()) > 0:
                found.append(f"{count} {model._meta.verbose_name_plural} of other agents ({column.name})")
    return found


class AgentRefused(ValueError):
    """The agent cannot be deleted now."""

    code = "conflict"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {}


class AgentNotRecorded(AgentRefused):
    """Nothing is recorded of the agent."""

    code = "not_found"


class AgentKeeper(Protocol):
    """Interface of the module FEEDBACK_AGENT_KEEPER, which owns an agent's files and further rows."""

    def refusal(self, agent: str) -> str:
        """Why the agent cannot be deleted now; "" if it can."""

    def artifacts_trained(self, agent: str) -> Mapping[str, list[object]]:
        """Artefacts trained for the agent: runs, policies."""

    def definition_rows(self, agent: str) -> int:
        """Rows that define the agent and have no column `agent`."""

    def files(self, agent: str) -> list[str]:
        """Files and folders of the agent, relative to RATCHET_HOME."""

    def delete(self, agent: str) -> None:
        """Remove the definition. Called in the transaction."""

    def files_note(self, agent: str, paths: Sequence[str]) -> None:
        """Record the files to remove, so that a second attempt finds them."""

    def files_remove(self, agent: str) -> int:
        """Remove the recorded files that no row names; returns how many."""


@dataclass
class AgentDeleted:
    """What a deletion removed, or with dry_run would remove."""

    agent: str
    dry_run: bool
    forced: bool = False
    rows: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    trained: dict[str, list[object]] = field(default_factory=dict)
    """Artefacts trained for the agent (runs, policies); all are deleted."""


def agent_delete(agent: str, *, actor: str, dry_run: bool = False, force: bool = False) -> AgentDeleted:
    """Delete an agent with everything recorded, set and trained for it, including files.

    After a kill, the same call finishes the deletion. Raises AgentNotRecorded, or AgentRefused while a run is queued or
    running, if other agents depend on it, or if it has trained policies and `force` is False.
    """
    keeper = _keeper()
    if not _has_rows(agent, keeper):
        if keeper is not None and not dry_run and keeper.files_remove(agent):
            return AgentDeleted(agent, dry_run)  # An earlier call was killed after deleting the rows.
        raise AgentNotRecorded(_unknown(agent))
    report = AgentDeleted(agent, dry_run, force, rows_counted(agent))
    if keeper is not None:
        report.files = keeper.files(agent)
        report.trained = {kind: rows for kind, rows in keeper.artifacts_trained(agent).items() if rows}
        if not dry_run and (refusal := keeper.refusal(agent)):
            raise AgentRefused(refusal)
    if dry_run:
        return report
    if report.trained and not force:
        raise AgentRefused(
            f"agent {agent}: {trained_text(report.trained, 'for it')}. Delete it and all of these with --force"
        )
    if pointing := rows_pointing_in(agent):
        raise AgentRefused(
            f"agent {agent}: {'; '.join(pointing)} refer to what would be deleted; delete these first"
        )
    if keeper is not None:
        keeper.files_note(agent, report.files)
    with transaction.atomic():
        _rows_remove(agent, actor)
        if keeper is not None:
            keeper.delete(agent)
    forget_all()
    if keeper is not None:
        keeper.files_remove(agent)
    return report


def _rows_remove(agent: str, actor: str) -> None:
    for _, rows in rows_of(agent):
        rows_delete(rows)
    gone = {"agent_deleted": agent}
    ImportBatch.objects.filter(agent=agent, undone_at=None).update(
        undone_at=timezone.now(), undone_by=actor[:200], undone=gone, refused=[], attached=[]
    )


def _has_rows(agent: str, keeper: AgentKeeper | None) -> bool:
    return is_known(agent) or (keeper is not None and keeper.definition_rows(agent) > 0)


def _unknown(agent: str) -> str:
    return f"there is no agent {agent!r}; spell it as on the start page"


def _keeper() -> AgentKeeper | None:
    path = settings.FEEDBACK_AGENT_KEEPER
    return cast(AgentKeeper, import_module(path)) if path else None


# --- Page to delete an agent ---


@page_for("operate", "GET", "HEAD", "POST")
def agent_change(request: HttpRequest, slug: str) -> HttpResponse:
    """GET lists what an agent has. POST `name=`, the slug typed, deletes it."""
    fault, status = "", 200
    if request.method == "POST":
        try:
            if request.POST.get("name", "").strip() == slug:
                force = request.POST.get("force") == "on"
                agent_delete(slug, actor=request.user.get_username(), force=force)
                messages.success(request, f"{slug} was deleted.")
                return redirect("home")
            fault, status = f"Expected the agent's name, {slug}, to confirm the deletion.", 400
        except AgentNotRecorded as refusal:
            raise Http404(str(refusal)) from refusal
        except AgentRefused as refusal:
            fault, status = str(refusal), 409
    try:
        found = agent_delete(slug, actor="", dry_run=True)
    except AgentNotRecorded as refusal:
        raise Http404(str(refusal)) from refusal
    context = {
        "slug": slug,
        "fault": fault,
        "rows": list(found.rows.items()),
        "main": [(name, count) for name in MAIN_ROWS if (count := found.rows.get(name))],
        "files": found.files,
        "trained": trained_text(found.trained, "for it") if found.trained else "",
    }
    return render(request, "feedback/agent_change.html", context, status=status)
