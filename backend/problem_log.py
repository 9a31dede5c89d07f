"""Log of standing problems: each kind is logged loudly once, and quietly until it has passed."""

from __future__ import annotations

import logging
import threading


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
