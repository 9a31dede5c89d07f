"""An agent renamed or deleted: its rows in one transaction, its files in an order that can be repeated after a kill."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any, Protocol, cast

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from feedback.agents.rows import is_known, rows_counted, rows_of, rows_pointing_in
from feedback.cache import forget_all
from feedback.erasure.artifacts import trained_text
from feedback.models import SLUG_PATTERN, ImportBatch
from feedback.storage.agent_names import name_free, names_move


class AgentRefused(ValueError):
    """An agent that cannot be renamed or deleted as asked; the message says why and what to do."""

    code = "conflict"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.fields: dict[str, str] = {}


class AgentNotRecorded(AgentRefused):
    """Nothing is recorded of the agent."""

    code = "not_found"


class AgentKeeper(Protocol):
    """Interface of the module FEEDBACK_AGENT_KEEPER names: what keeps rows or files of agents beside these tables."""

    def refusal(self, agent: str, new: str | None) -> str:
        """Reason why the agent cannot be renamed to `new`, or be deleted (None) now; "" where it can."""

    def artifacts_trained(self, agent: str) -> Mapping[str, list[Any]]:
        """Artefacts trained for the agent: {runs, policies, labels}."""

    def definition_rows(self, agent: str) -> int:
        """Rows that define the agent and name it otherwise than as `agent`."""

    def files(self, agent: str) -> list[str]:
        """Files and folders of the agent, relative to RATCHET_HOME."""

    def files_link(self, agent: str, new: str) -> None:
        """Link the agent's files under the new name, too; called before the rows are renamed."""

    def rename(self, agent: str, new: str) -> None:
        """Rename the paths in rows, and the definition; called in the transaction."""

    def files_unlink(self, agent: str, new: str) -> int:
        """Remove the files' old names. After the rows were renamed; returns how many there were."""

    def delete(self, agent: str) -> None:
        """Remove the definition. In the transaction."""

    def files_note(self, agent: str, paths: Sequence[str]) -> None:
        """Record which files are about to lose their rows, so that a second attempt finds them."""

    def files_remove(self, agent: str) -> int:
        """Remove the noted files that no row names; returns how many there were."""


@dataclass
class AgentRenamed:
    """Report of a renaming: what it moved, or with dry_run would move."""

    agent: str
    new: str
    dry_run: bool
    rows: dict[str, int] = field(default_factory=dict)
    """Table -> rows."""
    files: list[str] = field(default_factory=list)
    """Folders with the agent's files, relative to RATCHET_HOME."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class AgentDeleted:
    """Report of a deletion: what it removed, or with dry_run would remove."""

    agent: str
    dry_run: bool
    forced: bool = False
    rows: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    trained: dict[str, list[Any]] = field(default_factory=dict)
    """Artefacts trained for the agent: {runs, policies, labels}; all of them go with the agent."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def agent_rename(agent: str, new: str, *, dry_run: bool = False) -> AgentRenamed:
    """Rename an agent: its decisions, settings, runs, policies and files. Policies keep their names, and prompts their
    sides of the split.

    After a kill at any moment the same call finishes it. Raises AgentNotRecorded; AgentRefused where the new name is
    taken or no slug, and while a run of the agent is queued or running.
    """
    if not re.fullmatch(SLUG_PATTERN, new):
        raise AgentRefused(
            f"expected a slug such as support-bot (1 to 64 lower-case letters, digits, - and _), found {new!r:.80}"
        )
    if new == agent:
        raise AgentRefused(f"the agent is called {agent!r} already")
    keeper = _keeper()
    if not _has_rows(agent, keeper):
        if keeper is not None and not dry_run and _has_rows(new, keeper) and keeper.files_unlink(agent, new):
            return AgentRenamed(
                agent, new, dry_run
            )  # the rows were renamed before; the files' old names are gone now
        raise AgentNotRecorded(_unknown(agent))
    if _has_rows(new, keeper):
        raise AgentRefused(f"there is an agent {new!r} already; agents cannot be merged")
    if keeper is not None and (refusal := keeper.refusal(agent, new)):
        raise AgentRefused(refusal)
    report = AgentRenamed(agent, new, dry_run, rows_counted(agent), keeper.files(agent) if keeper else [])
    if dry_run:
        return report
    if keeper is not None:
        keeper.files_link(agent, new)
    with transaction.atomic():
        for model, rows in list(rows_of(agent)):
            if any(column.name == "agent" for column in model._meta.concrete_fields):
                rows.update(agent=new)
        ImportBatch.objects.filter(agent=agent).update(agent=new)
        names_move(agent, new)
        if keeper is not None:
            keeper.rename(agent, new)
            if refusal := keeper.refusal(new, new):
                raise AgentRefused(refusal)  # a run was queued meanwhile
    forget_all()
    if keeper is not None:
        keeper.files_unlink(agent, new)
    return report


def agent_delete(agent: str, *, actor: str, dry_run: bool = False, force: bool = False) -> AgentDeleted:
    """Remove everything that is recorded, set and trained of an agent, its files too.

    After a kill at any moment the same call finishes it. Raises AgentNotRecorded; AgentRefused while a run of the agent
    is queued or running, where other agents rest on it, and where it has trained policies and `force` is not given.
    """
    keeper = _keeper()
    if not _has_rows(agent, keeper):
        if keeper is not None and not dry_run and keeper.files_remove(agent):
            return AgentDeleted(agent, dry_run)  # the rows went before; the files are gone now
        raise AgentNotRecorded(_unknown(agent))
    report = AgentDeleted(agent, dry_run, force, rows_counted(agent))
    if keeper is not None:
        report.files = keeper.files(agent)
        report.trained = {kind: rows for kind, rows in keeper.artifacts_trained(agent).items() if rows}
        if not dry_run and (refusal := keeper.refusal(agent, None)):
            raise AgentRefused(refusal)
    if dry_run:
        return report
    if report.trained and not force:
        raise AgentRefused(
            f"agent {agent}: {trained_text(report.trained).replace(' on it', ' for it')}. Delete it with all of that "
            "with --force"
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
    """Straight in SQL: the models protect rows that others point to, and foreign keys are checked at the end of the
    transaction, when all of them are gone."""
    for _, rows in rows_of(agent):
        rows._raw_delete(rows.db)
    gone = {"agent_deleted": agent}
    ImportBatch.objects.filter(agent=agent, undone_at=None).update(
        undone_at=timezone.now(), undone_by=actor[:200], undone=gone, refused=[], attached=[]
    )
    name_free(agent)


def _has_rows(agent: str, keeper: AgentKeeper | None) -> bool:
    return is_known(agent) or (keeper is not None and keeper.definition_rows(agent) > 0)


def _unknown(agent: str) -> str:
    return f"there is no agent {agent!r}; give its name exactly as on the start page"


def _keeper() -> AgentKeeper | None:
    path = settings.FEEDBACK_AGENT_KEEPER
    return cast(AgentKeeper, import_module(path)) if path else None
