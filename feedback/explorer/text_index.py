"""Trigram index of every text, for PostgreSQL: finds a phrase among millions of decisions and costs time at every
write."""

from __future__ import annotations

from django.db import Error, connection

from feedback.cache import TTLCache
from feedback.models import Decision

NAME = "feedback_decision_text_trgm"
SHORTEST = 3
"""Shortest text that the index can find: its entries are trigrams."""

_presence: TTLCache[bool] = TTLCache()


class TextIndexRefused(ValueError):
    """Raised where the database cannot have such an index, or the user may not create it."""


def text_index_exists() -> bool:
    """True if the index exists and is valid."""
    if connection.vendor != "postgresql":
        return False
    return _presence.get("there", _prefers_scan)


def text_looked_through(q: str) -> bool:
    """True if decisions are looked through for this text, one after the other, rather than found in the
    index."""
    return bool(q) and not (len(q) >= SHORTEST and text_index_exists())


def text_index_make() -> None:
    """Create the index concurrently with reads and writes. Raises TextIndexRefused."""
    if connection.vendor != "postgresql":
        raise TextIndexRefused(
            f"expected PostgreSQL, found {connection.vendor}: here a search reads 20,000 decisions per page"
        )
    # what a broken attempt before left behind; and in the words that Django asks with, or it is not used
    text_index_drop()
    try:
        with connection.cursor() as cursor:
            cursor.execute("CREATE EXTENSION IF NOT EXISTS pg_trgm")
            cursor.execute(
                f"CREATE INDEX CONCURRENTLY {NAME} ON {Decision._meta.db_table} USING gin "
                "(UPPER(response) gin_trgm_ops, UPPER(reasoning) gin_trgm_ops, UPPER(messages::text) gin_trgm_ops)"
            )
            cursor.execute(f"ANALYZE {Decision._meta.db_table}")
    except Error as error:
        raise TextIndexRefused(
            f"PostgreSQL refused: {str(error).strip()}. The extension pg_trgm must be installed, and the user own the "
            "database"
        ) from error
    _presence.clear()


def text_index_drop() -> None:
    """Drop the index, if there is one."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(f"DROP INDEX IF EXISTS {NAME}")
    _presence.clear()


def text_index_bytes() -> int:
    """Size of the index in bytes; 0 where there is none."""
    if not text_index_exists():
        return 0
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_relation_size(%s::regclass)", [NAME])
        return int(cursor.fetchone()[0])


def _prefers_scan() -> bool:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid WHERE relname = %s AND indisvalid",
            [NAME],
        )
        return cursor.fetchone() is not None
