"""Log of lasting problems. A recording client must not raise into the app or flood its log."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("ratchet_client")


class ProblemLog:
    """Logs a kind of problem once, and its repetitions at debug level, until the problem is resolved."""

    def __init__(self, logger: logging.Logger = logger) -> None:
        self._logger = logger
        self._standing: set[str] = set()
        self._lock = threading.Lock()

    def report(
        self, kind: str, message: str, error: BaseException | None = None, level: int = logging.ERROR
    ) -> None:
        """Log `message` with the traceback of `error`; at debug level if this kind is already reported."""
        with self._lock:
            known = kind in self._standing
            self._standing.add(kind)
        text = f"{message} (said once; more of this kind are logged at debug level)"
        self._logger.log(logging.DEBUG if known else level, text, exc_info=error)

    def resolve(self, kind: str, message: str) -> None:
        """Log that a reported problem is over. The next one of its kind is logged at its full level again."""
        with self._lock:
            if kind not in self._standing:
                return
            self._standing.discard(kind)
        self._logger.info(message)

    def after_fork(self) -> None:
        """Replace the lock: a thread that does not exist in this process may hold it."""
        self._lock = threading.Lock()
