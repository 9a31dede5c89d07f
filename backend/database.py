"""Database connections of threaded web processes, and the check for missing migrations.

A thread waits seconds for a model's answer and milliseconds for the database. If each of 256 threads kept a connection,
they would exceed PostgreSQL's `max_connections` (100 by default).
"""

from __future__ import annotations

import threading
from typing import Any

from django.conf import settings
from django.core.signals import request_finished
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

KEPT = 16
"""Threads per process that keep their connection between requests."""

_places = threading.BoundedSemaphore(KEPT)
_thread = threading.local()


def connection_release(**_: Any) -> None:
    """Close this thread's PostgreSQL connection unless the thread is one of the KEPT or a transaction is open."""
    if connection.vendor != "postgresql" or connection.connection is None or connection.in_atomic_block:
        return
    if getattr(_thread, "keeps", False):
        return
    if _places.acquire(blocking=False):
        _thread.keeps = True
        return
    connection.close()


def connections_limit() -> None:
    """Call `connection_release` after each request of this process."""
    request_finished.connect(connection_release, dispatch_uid="backend.database")


_complete: set[str] = set()
"""Databases known to have every migration."""


def migrations_waiting() -> int:
    """Number of migrations that are not applied. Raises DatabaseError if the database does not answer."""
    executor = MigrationExecutor(connection)
    return len(executor.migration_plan(executor.loader.graph.leaf_nodes()))


def migrations_complete() -> bool:
    """True if none is missing; cached for the life of the process once it is true."""
    database = str(settings.DATABASES["default"]["NAME"])
    if database not in _complete and not migrations_waiting():
        _complete.add(database)
    return database in _complete
