"""Cache of values computed once per row, on disk for later runs: reference log-probabilities, tokens, self-tests."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger("packed_forward.row_cache")

BUSY_S = 30.0
"""Seconds to wait for another process that is writing."""

LOOKUP = 500
"""Keys asked for in one statement; SQLite takes at most 999 in its oldest builds."""


class RowCache:
    """32-byte keys -> small values, in one SQLite file that several processes may read and write at once.

    It is a cache: a file that is broken, locked for too long or on a full disk is logged and left unused, never a
    reason for a run to fail. A crash in the middle of a write loses that write alone (WAL). Above `max_rows` the tenth
    that was not used for longest goes.
    """

    def __init__(self, path: Path, *, max_rows: int = 4_000_000) -> None:
        self.path = path
        self.max_rows = max_rows

    def get(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those keys that are there."""
        rows: dict[bytes, bytes] = {}
        with self._open() as database:
            if database is None:
                return {}
            for start in range(0, len(keys), LOOKUP):
                some = keys[start : start + LOOKUP]
                marks = ",".join("?" * len(some))
                rows.update(
                    database.execute(f"SELECT key, value FROM rows WHERE key IN ({marks})", some)  # noqa: S608
                )
            self._touch(database, rows)
        return rows

    def put(self, values: Mapping[bytes, bytes]) -> None:
        """Store these values; beyond `max_rows` evict those not used for longest."""
        now = int(time.time())
        with self._open() as database:
            if database is None:
                return
            with database:
                database.executemany(
                    "INSERT OR REPLACE INTO rows (key, value, used) VALUES (?, ?, ?)",
                    [(key, value, now) for key, value in values.items()],
                )
            (count,) = database.execute("SELECT count(*) FROM rows").fetchone()
            if count > self.max_rows:
                with database:
                    database.execute(
                        "DELETE FROM rows WHERE key IN (SELECT key FROM rows ORDER BY used LIMIT ?)",
                        (count - self.max_rows + self.max_rows // 10,),
                    )

    def _touch(self, database: sqlite3.Connection, keys: Iterable[bytes]) -> None:
        # once a day is exact enough to tell what is used, and spares a write on every read
        today = int(time.time())
        with database:
            database.executemany(
                "UPDATE rows SET used = ? WHERE key = ? AND used < ?",
                [(today, key, today - 86_400) for key in keys],
            )

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection | None]:
        database = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self.path, timeout=BUSY_S)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS rows (key BLOB PRIMARY KEY, value BLOB NOT NULL, used INTEGER NOT NULL) "
                "WITHOUT ROWID"
            )
        except (sqlite3.Error, OSError) as error:
            self._give_up(database, error)
            database = None
        try:
            yield database
        except sqlite3.Error as error:
            self._give_up(database, error)
        finally:
            if database is not None:
                database.close()

    def _give_up(self, database: sqlite3.Connection | None, error: Exception) -> None:
        logger.warning("going on without the cache %s: %s", self.path, error)
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            # not a database any more: out of the way, so that the next run starts a new one
            if database is not None:
                database.close()
            with contextlib.suppress(OSError):
                self.path.replace(self.path.with_suffix(".broken"))


def row_key(*parts: str | Sequence[int]) -> bytes:
    """SHA-256 of texts and token ids, each with its length, so that no two lists of parts look alike."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else ",".join(map(str, part)).encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.digest()
