"""Rate of counted work and the time left."""

from __future__ import annotations

import time
from dataclasses import dataclass

SHOWN_AFTER_S = 3.0
"""Seconds before the rate is shown, because the first steps are slower."""


@dataclass
class Pace:
    """Measures from the first report; restarts when the count falls or the total changes."""

    total: int = 0
    done: int = 0
    first: int = 0
    start_s: float = 0.0

    def words(self, done: int, total: int) -> str:
        """Such as `1.2 s each, 4 min left`; empty before there is a rate and at the end."""
        now = time.monotonic()
        if total != self.total or done < self.done:
            self.total, self.first, self.start_s = total, done, now
        self.done = done
        elapsed, count = now - self.start_s, done - self.first
        if count < 1 or elapsed < SHOWN_AFTER_S or done >= total:
            return ""
        each_s = elapsed / count
        rate = f"{each_s:.1f} s each" if each_s >= 1 else f"{1 / each_s:.0f} a second"
        return f"{rate}, {_duration(each_s * (total - done))} left"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
