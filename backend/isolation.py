"""Isolation of scheduled work: one agent's fault is logged, reported once, and does not stop other agents."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from django.conf import settings
from django.db import InterfaceError, OperationalError, connection

from backend.logs import OutageLog
from backend.notifications import notify

logger = logging.getLogger("backend.isolation")

REPEAT_AFTER_S = 24 * 3600.0
"""Seconds after which a lasting fault is reported again."""

_lasting: dict[Path, OutageLog] = {}
"""Fault file -> log of the lasting fault."""
_unsaved_faults: dict[Path, tuple[str, float]] = {}
"""Fault file -> (fault, Unix time of the report), if the file could not be written."""


class DatabaseAway(OperationalError):
    """The database connection is lost, which affects every agent."""


def agent_isolated(task: str, agent: str, work: Callable[[], list[str]]) -> list[str]:
    """Run one agent's part of a scheduled task; returns a line per action, or the line of its fault.

    A new or changed fault, and a lasting one once a day, is logged with its traceback and sent as the notice
    `clock_failed`; otherwise it is logged at most once a minute. Raises DatabaseAway if the connection is lost.
    """
    file = _fault_file(task, agent)
    try:
        work_lines = work()
    except Exception as error:
        if isinstance(error, OperationalError | InterfaceError) and _connection_lost():
            raise DatabaseAway(str(error)) from error
        text = f"{task} of {agent} failed: {type(error).__name__}: {error}"
        if _is_news(file, text):
            logger.exception("%s", text)
            notify("clock_failed", text, agent=agent, task=task, reason=str(error))
        else:
            _lasting.setdefault(file, OutageLog(logger)).report(text, level=logging.ERROR)
        return [text]
    _fault_over(file)
    return work_lines


def quiet() -> None:
    """Forget reported faults (for tests)."""
    _lasting.clear()
    _unsaved_faults.clear()


def _connection_lost() -> bool:
    """True if this thread's connection does not answer; closes it, so that the next use opens a new one."""
    if connection.connection is not None and connection.is_usable():
        return False
    if not connection.in_atomic_block:
        connection.close()
    return True


def _fault_file(task: str, agent: str) -> Path:
    """File with the last fault of a task, shared by schedulers in several processes."""
    folder: Path = settings.RATCHET_HOME / "cache" / "faults"
    return folder / f"{task} {agent}.txt".replace(" ", "_")


def _is_news(file: Path, text: str) -> bool:
    """True if no scheduler reported this fault lately; marks it as reported."""
    time_s = time.time()
    try:
        known = file.read_text("utf-8") == text and time_s - file.stat().st_mtime < REPEAT_AFTER_S
    except OSError:
        known = False
    before, at = _unsaved_faults.get(file, ("", 0.0))
    if known or (before == text and time_s - at < REPEAT_AFTER_S):
        return False
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    except OSError:
        _unsaved_faults[file] = (text, time_s)  # A full disk must not stop other agents.
    return True


def _fault_over(file: Path) -> None:
    _lasting.pop(file, None)
    _unsaved_faults.pop(file, None)
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return  # Read-only disk: the same fault is not reported again for a day.
