"""The queue of the workers in our database, which waits out an outage instead of dying of it."""

from __future__ import annotations

import logging
import time
from typing import Any

from django.db import InterfaceError, OperationalError
from django_q.brokers.orm import ORM

from backend.logs import OutageLog

PAUSE_S = 2.0
"""Between two tries of a database that is away."""

outage = OutageLog(logging.getLogger("rl.jobs.child_process"))


class WaitingOrm(ORM):
    """django-q2's own, but that its reader goes on: at any error the library's ends itself with a traceback of sixty
    lines, every ten seconds while an outage lasts."""

    def dequeue(self) -> Any:
        """Tasks, or None where there are none or the database is away."""
        try:
            return super().dequeue()
        except (OperationalError, InterfaceError) as error:
            outage.report("the database cannot be reached, and the workers wait for it", error)
            time.sleep(PAUSE_S)
            return None
