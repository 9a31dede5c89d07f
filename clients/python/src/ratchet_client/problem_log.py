"""Log of standing problems: a recording client must not raise into the app, and must not flood its log either."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("ratchet_client")


class ProblemLog:
    """Logs each kind of problem the first time it happens; the ones after it at debug level, until it is over."""

    def __init__(self) -> None:
        self._standing: set[str] = set()
        self._lock = threading.Lock()

    def report(
        self, kind: str, message: str, error: BaseException | None = None, level: int = logging.ERROR
    ) -> None:
        """Log `message`, with the traceback of `error`, at debug level where this kind of problem is known."""
        with self._lock:
            known = kind in self._standing
            self._standing.add(kind)
        text = f"{message} (said once; more of this kind are logged at debug level)"
        logger.log(logging.DEBUG if known else level, text, exc_info=error)

    def resolve(self, kind: str, message: str) -> None:
        """Log that a problem has passed, if it stood; the next one of its kind is loud again."""
        with self._lock:
            if kind not in self._standing:
                return
            self._standing.discard(kind)
        logger.info(message)

    def after_fork(self) -> None:
        """Replace the lock: a thread that does not exist in this process may hold it."""
        self._lock = threading.Lock()
