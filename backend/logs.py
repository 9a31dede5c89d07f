"""Outages in the log: said when they begin and once per interval, with how often they were met since."""

from __future__ import annotations

import logging
import re
import threading
import time

INTERVAL_S = 60.0
"""Between two lines about the same outage, per process: a busy server meets it a thousand times a second."""


class OutageLog:
    """Logs one kind of outage at most once per INTERVAL_S; what is left out is counted in the next line."""

    def __init__(self, logger: logging.Logger) -> None:
        self.logger = logger
        self._lock = threading.Lock()
        self._last = float("-inf")
        self._untold = 0

    def report(self, message: str, error: BaseException | None = None, level: int = logging.WARNING) -> None:
        """One more request met the outage. The line ends with the error in one line, without its traceback."""
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
        """Say the next one at once: between tests."""
        self._last, self._untold = float("-inf"), 0


class ProblemLog:
    """Logs each kind of problem the first time it happens; the ones after it at debug level, until it is over."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._standing: set[str] = set()
        self._lock = threading.Lock()

    def report(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Log `message` as an error, with the traceback of `error`; at debug level where this kind stands already."""
        with self._lock:
            known = kind in self._standing
            self._standing.add(kind)
        text = f"{message} (said once; more of this kind are logged at debug level)"
        self._logger.log(logging.DEBUG if known else logging.ERROR, text, exc_info=error)

    def resolve(self, kind: str, message: str) -> None:
        """Log that a problem has passed, if it stood; the next one of its kind is loud again."""
        with self._lock:
            if kind not in self._standing:
                return
            self._standing.discard(kind)
        self._logger.info(message)

    def after_fork(self) -> None:
        """Replace the lock: a thread that does not exist in this process may hold it."""
        self._lock = threading.Lock()


PLACEHOLDER = "[hidden]"

_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    # a one-time link: Django logs the address of what it refuses, and a refused link may still be good
    (re.compile(r"(/accounts/link/[^/\s\"']+/)[^/\s\"']+"), rf"\1{PLACEHOLDER}"),
    # an API key keeps its public beginning, by which it is found in the list of keys
    (re.compile(r"(rk_[A-Za-z0-9_-]{8})[A-Za-z0-9_-]{32}"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(?i)(bearer\s+)(?!rk_)[^\s\"',]+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"((?:sessionid|csrftoken|csrfmiddlewaretoken)=)[^;&\s\"']+"), rf"\1{PLACEHOLDER}"),
    (re.compile(r"(://[^:/@\s\"']*:)[^@/\s\"']+(?=@)"), rf"\1{PLACEHOLDER}"),
)


def secrets_hidden(text: str) -> str:
    """A text with `[hidden]` where a secret stood."""
    for pattern, instead in _SECRETS:
        text = pattern.sub(instead, text)
    return text


class SecretsHidden(logging.Formatter):
    """A formatter that hides secrets in the whole line, its arguments and traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return secrets_hidden(super().format(record))
