"""Database connections of a web process with many threads: a few threads keep theirs, the others open one when needed.

A thread waits seconds for a model's answer and milliseconds for the database. If each of 256 threads kept a connection,
PostgreSQL's `max_connections` (100 by default) would be used up.
"""

from __future__ import annotations

import threading
from typing import Any

from django.core.signals import request_finished
from django.db import connection

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
    request_finished.connect(connection_release, dispatch_uid="backend.database_connections")
