"""Outages in the log: said when they begin and once per interval, with how often they were met since."""

from __future__ import annotations

import logging
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
