"""Isolation of scheduled work: one agent's fault is logged, told once, and never reaches another agent."""

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
"""Seconds after which the same fault, where it lasts, is worth another notice."""

_lasting: dict[Path, OutageLog] = {}
"""Fault file -> what says now and then that its fault lasts; of faults that this process met."""
_unsaved_faults: dict[Path, tuple[str, float]] = {}
"""Fault file -> the fault and when it was told (Unix time), where the disk took no note of it."""


class DatabaseAway(OperationalError):
    """The connection to the database is lost: the fault of no agent, and none can be served until it is back."""


def agent_isolated(task: str, agent: str, work: Callable[[], list[str]]) -> list[str]:
    """Do one agent's share of a scheduled task. Returns what was done, a line each; of a fault, the line that names it.

    Any exception ends this agent's share alone. When it is new, when it is another one than last time, and once a day
    while it lasts it is logged with its traceback and sent as the notice `clock_failed`; else it is a line per minute.
    Raises DatabaseAway where the connection is lost.
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
    """Take every fault for news: between tests."""
    _lasting.clear()
    _unsaved_faults.clear()


def _connection_lost() -> bool:
    """True where this thread's connection answers nothing; it is closed then, so that the next use opens one."""
    if connection.connection is not None and connection.is_usable():
        return False
    if not connection.in_atomic_block:
        connection.close()
    return True


def _fault_file(task: str, agent: str) -> Path:
    """The last fault of a task, so that clocks in several processes tell it once."""
    folder: Path = settings.RATCHET_HOME / "cache" / "faults"
    return folder / f"{task} {agent}.txt".replace(" ", "_")


def _is_news(file: Path, text: str) -> bool:
    """True of a fault that was not told lately, by this clock or another; it is noted as told."""
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
        _unsaved_faults[file] = (text, time_s)  # a full disk must not end the shares of the others
    return True


def _fault_over(file: Path) -> None:
    _lasting.pop(file, None)
    _unsaved_faults.pop(file, None)
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return  # on a read-only disk: the same fault again is no news for a day
