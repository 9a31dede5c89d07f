"""Migrations that the database lacks: what commands and `/readyz` ask before anything else."""

from __future__ import annotations

from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor

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
