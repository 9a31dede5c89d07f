"""Store on disk for rows that wait for later rows of the same file, so that memory stays bounded."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, MutableMapping
from typing import Any

CACHE_KIB = 16 << 10
"""Memory of one store, in KiB; what does not fit lies in a temporary file that is gone when the store is."""


def _store(table: str) -> sqlite3.Connection:
    # no name: SQLite's own kind of temporary database, and no transaction of it is ever looked at again
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute(table)
    database.execute("BEGIN")
    return database


class DiskMultimap:
    """JSON values under texts, several under one text in the order they came."""

    def __init__(self) -> None:
        self._database = _store("CREATE TABLE kept (number INTEGER PRIMARY KEY, key TEXT, value TEXT)")
        self._database.execute("CREATE INDEX by_key ON kept (key)")

    def add(self, key: str, value: Any = None) -> None:
        # as JSON, in which a half of a surrogate pair, which no database takes for text, is written out
        self._database.execute(
            "INSERT INTO kept (key, value) VALUES (?, ?)", (json.dumps(key), json.dumps(value))
        )

    def all(self, key: str) -> list[Any]:
        found = self._database.execute(
            "SELECT value FROM kept WHERE key = ? ORDER BY number", (json.dumps(key),)
        )
        return [json.loads(value) for (value,) in found]

    def last(self, key: str) -> Any:
        """The newest value; None where there is none."""
        found = self._database.execute(
            "SELECT value FROM kept WHERE key = ? ORDER BY number DESC LIMIT 1", (json.dumps(key),)
        )
        return next((json.loads(value) for (value,) in found), None)

    def count(self, key: str, most: int = 2) -> int:
        """Number of values, counted up to `most`."""
        statement = "SELECT count(*) FROM (SELECT 1 FROM kept WHERE key = ? LIMIT ?)"
        return int(self._database.execute(statement, (json.dumps(key), most)).fetchone()[0])

    def __contains__(self, key: str) -> bool:
        return self.count(key, 1) > 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Keys and values in the order they came."""
        for key, value in self._database.execute("SELECT key, value FROM kept ORDER BY number"):
            yield json.loads(key), json.loads(value)


class Tally(MutableMapping[int, int]):
    """Numbers of at most 63 bits and a sign, under such numbers."""

    def __init__(self) -> None:
        self._database = _store("CREATE TABLE tally (key INTEGER PRIMARY KEY, value INTEGER)")

    def __getitem__(self, key: int) -> int:
        for (value,) in self._database.execute("SELECT value FROM tally WHERE key = ?", (key,)):
            return int(value)
        raise KeyError(key)

    def __setitem__(self, key: int, value: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO tally VALUES (?, ?)", (key, value))

    def __delitem__(self, key: int) -> None:
        if not self._database.execute("DELETE FROM tally WHERE key = ?", (key,)).rowcount:
            raise KeyError(key)

    def __iter__(self) -> Iterator[int]:
        for (key,) in self._database.execute("SELECT key FROM tally"):
            yield int(key)

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM tally").fetchone()[0])
