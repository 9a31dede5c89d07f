"""Logging: outages once per interval, and lines without secrets."""

from __future__ import annotations

import logging
import re
import threading
import time

from django.db import InterfaceError, OperationalError

INTERVAL_S = 60.0
"""Seconds between two lines about the same outage, per process."""


class OutageLog:
    """Logs one kind of outage at most once per INTERVAL_S; the next line counts the suppressed ones."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._lock = threading.Lock()
        self._last = float("-inf")
        self._untold = 0

    def report(self, message: str, error: BaseException | None = None, level: int = logging.WARNING) -> None:
        """Log an outage with its error on one line, without traceback."""
        with self._lock:
            now = time.monotonic()
            if now - self._last < INTERVAL_S:
                self._untold += 1
                return
            untold, self._untold, self._last = self._untold, 0, now
        more = f" ({untold} more times since the last line)" if untold else ""
        cause = f": {type(error).__name__}: {' '.join(str(error).split())}" if error is not None else ""
        self.logger.log(
            level, "%s%s%s; logged at most once in %g s while it lasts", message, cause, more, INTERVAL_S
        )

    def reset(self) -> None:
        """Log the next outage at once (for tests)."""
        self._last, self._untold = float("-inf"), 0


class OutagesOnOneLine(logging.Filter):
    """Logs an unreachable database once per INTERVAL_S, in place of a traceback each time."""

    def __init__(self) -> None:
        super().__init__()
        self.outage = OutageLog(logging.getLogger("backend.outages"))

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, OperationalError | InterfaceError):
            return True
        self.outage.report(record.getMessage(), error)
        return False


PLACEHOLDER = "[hidden]"

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # One-time links: Django logs the path of refused requests, and a refused link may still be valid.
    (re.compile(r"(/accounts/link/[^/\s\"']+/)[^/\s\"']+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(/feedback/)[^/\s\"'?]+"), rf"\1{PLACEHOLDER}"),
    # API keys keep their public prefix.
    (re.compile(r"(rk_[A-Za-z0-9_-]{8})[A-Za-z0-9_-]{32}"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(?i)(bearer\s+)(?!rk_)[^\s\"',]+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"((?:sessionid|csrftoken|csrfmiddlewaretoken)=)[^;&\s\"']+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(://[^:/@\s\"']*:)[^@/\s\"']+(?=@)"), rf"\1{PLACEHOLDER}"),
)


def secrets_hidden(text: str) -> str:
    """The text with `[hidden]` in place of tokens, keys, cookies and passwords."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class SecretsHidden(logging.Formatter):
    """Hides secrets in the whole line, including arguments and traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets_hidden(super().format(record))
