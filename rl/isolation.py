"""Isolation of scheduled work: one agent's fault is logged, told once, and never reaches another agent."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from django.conf import settings

from rl.notices import notify

logger = logging.getLogger("rl.isolation")

TOLD_AGAIN_AFTER_S = 24 * 3600.0
"""Seconds after which the same fault, where it lasts, is worth another notice."""


def agent_isolated(task: str, agent: str, work: Callable[[], list[str]]) -> list[str]:
    """Do one agent's share of a scheduled task. Returns what was done, a line each; of a fault, the line that names it.

    Any exception ends this agent's share alone: it is logged with its traceback, and sent as the notice `clock_failed`
    when it is new, when it is another one than last time, and once a day while it lasts.
    """
    try:
        done = work()
    except Exception as error:
        text = f"{task} of {agent} failed: {type(error).__name__}: {error}"
        logger.exception("%s", text)
        if _is_news(_fault_file(task, agent), text):
            notify("clock_failed", text, agent=agent, task=task, reason=str(error))
        return [text]
    _fault_file(task, agent).unlink(missing_ok=True)
    return done


def _fault_file(task: str, agent: str) -> Path:
    """The last fault of a task, so that clocks in several processes tell it once."""
    folder: Path = settings.RATCHET_HOME / "cache" / "faults"
    return folder / f"{task} {agent}.txt".replace(" ", "_")


def _is_news(file: Path, text: str) -> bool:
    try:
        known = file.read_text("utf-8") == text and time.time() - file.stat().st_mtime < TOLD_AGAIN_AFTER_S
    except FileNotFoundError:
        known = False
    if not known:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    return not known
