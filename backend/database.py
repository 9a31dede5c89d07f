"""Database connections of threaded web processes, and the checks for missing and unknown migrations.

A thread waits seconds for a model's answer and milliseconds for the database. If each of 256 threads kept a connection,
they would exceed PostgreSQL's `max_connections` (100 by default).
"""

from __future__ import annotations

import threading
from functools import cache

from django.conf import settings
from django.core.signals import request_finished
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

KEPT = 16
"""Threads per process that keep their connection between requests."""

_places = threading.BoundedSemaphore(KEPT)
_thread = threading.local()


def connection_release(**_: object) -> None:
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


NEWER_STEP = "run the newer version, or restore a backup of this one"
ADDITIVE = "_additive"
"""End of a migration's name. The version before works with the tables: it may run until its servers are replaced."""


def newer_fault() -> str:
    """Why this program must not write to the database; empty if it may. Never cached.

    A migration that this program does not know refuses, unless its name ends with `ADDITIVE`.
    Raises DatabaseError if the database does not answer.
    """
    unknown = [key for key in migrations_newer() if not key[1].endswith(ADDITIVE)]
    if not unknown:
        return ""
    return (
        f"the database has {len(unknown)} migrations of a newer version, such as {'.'.join(unknown[0])}; expected only "
        f"those of Ratchet {settings.RATCHET_VERSION}"
    )


def migrations_newer() -> list[tuple[str, str]]:
    """(app, name) of the applied migrations that this program does not know."""
    known = _migrations_known()
    apps = {app for app, _ in known}
    applied = MigrationRecorder(connection).applied_migrations()
    return sorted(key for key in applied if key[0] in apps and key not in known)


@cache
def _migrations_known() -> frozenset[tuple[str, str]]:
    """(app, name) of each migration of this program, and of those that a squashed one replaces."""
    found = MigrationLoader(None).disk_migrations
    return frozenset(found) | {key for migration in found.values() for key in migration.replaces}
