"""Database connections of a web process with many threads: a few threads keep theirs, the others open one when needed.

A thread waits seconds for a model's answer and milliseconds for the database. If each of 256 threads kept a connection,
PostgreSQL's `max_connections` (100 by default) would be used up.
"""

from __future__ import annotations

import threading
from typing import Any

from django.conf import settings
from django.core.signals import request_finished
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

KEPT = 16
"""Threads of a process that keep their connection between requests."""

_places = threading.BoundedSemaphore(KEPT)
_thread = threading.local()


def connection_release(**_: Any) -> None:
    """Close this thread's connection, unless it is one of the KEPT, or a transaction is open. Of PostgreSQL only: a
    connection to SQLite is an open file."""
    if connection.vendor != "postgresql" or connection.connection is None or connection.in_atomic_block:
        return
    if getattr(_thread, "keeps", False):
        return
    if _places.acquire(blocking=False):
        _thread.keeps = True
        return
    connection.close()


def connections_limit() -> None:
    """Release after each request of this process from now on."""
    request_finished.connect(connection_release, dispatch_uid="backend.database")


_complete: set[str] = set()
"""Databases that had every migration of this program when they were last asked; code changes with a new process."""


def migrations_waiting() -> int:
    """Number of migrations not applied yet. Raises DatabaseError where the database does not answer."""
    executor = MigrationExecutor(connection)
    return len(executor.migration_plan(executor.loader.graph.leaf_nodes()))


def migrations_complete() -> bool:
    """Cached `migrations_waiting`, for callers that ask every few seconds: a yes is remembered for the life
    of the process."""
    database = str(settings.DATABASES["default"]["NAME"])
    if database not in _complete and not migrations_waiting():
        _complete.add(database)
    return database in _complete
