"""Outbox: records in an SQLite file until somebody has them. Crashes, forks and power cuts lose none."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ratchet_client.problem_log import ProblemLog
from ratchet_client.processes import renew_after_fork

MAX_WAITING = 1_000
"""Most records in memory while the disk cannot be written. Further records are lost, and the log says so."""
BUSY_S = 10.0
"""Seconds that a write waits for the writes of other processes."""
CHECKPOINT_S = 1.0
"""Least seconds between two checkpoints of an outbox without fsync."""
SUFFIX = ".sqlite3"
FAULTS = (OSError, sqlite3.Error)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS record (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key TEXT NOT NULL,
    body TEXT NOT NULL,
    put_at REAL NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0,
    refused TEXT
);
CREATE INDEX IF NOT EXISTS record_key ON record (key);
"""

T = TypeVar("T")

_left_to_parent: list[sqlite3.Connection | None] = []
"""Connections of a parent process. SQLite forbids to use or to close them in its child."""


class Record(NamedTuple):
    """A record that waits. Numbers grow in the order in which records were put."""

    number: int
    body: dict[str, Any]
    tries: int
    put_at: float
    """Unix time."""


class Outbox:
    """A file of records, such as `outbox.sqlite3`, to which threads and processes append.

    A record is deleted when its receiver has it. A refused one stays, with the reason. Only the owner can read the
    file. fsync=False: a power cut may lose the last records; the end of a process loses none.
    """

    def __init__(
        self, folder: Path, problems: ProblemLog, *, name: str = "outbox", fsync: bool = True
    ) -> None:
        self.folder, self.path = folder, folder / f"{name}{SUFFIX}"
        self.problems = problems
        self.fsync = fsync
        self.lost = 0
        self._waiting: deque[tuple[str, str, float]] = deque()
        self._guard = threading.Lock()
        self._database = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._checkpointed = 0.0
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Drop the records in memory, which the parent writes, and make new locks."""
        _left_to_parent.append(self._connection)
        self._connection = None
        self._waiting.clear()
        self._guard, self._database = threading.Lock(), threading.Lock()
        self.problems.after_fork()

    # --- Writing ------------------------------------------------------------------------------------------

    def put(self, record: Mapping[str, object], *, key: str = "", hold: bool = True) -> bool:
        """Append a record. False if the disk cannot be written: the record then waits in memory. Never raises.

        key: by which `contains` and `remove` find it. hold=False: it does not wait, so False means that it is nowhere.
        """
        row = (key, json.dumps(record, allow_nan=False), time.time())
        with self._guard:
            if len(self._waiting) >= MAX_WAITING:
                self.lost += hold
                self.problems.report("lost", f"{self.folder} cannot be written: a record was lost")
                return False
            self._waiting.append(row)
        # If it cannot be taken back, another thread has written it meanwhile.
        return self.write_waiting() or (not hold and not self._take_back(row))

    def write_waiting(self) -> bool:
        """Write the records in memory. Threads that call it together share one transaction."""
        with self._database:
            with self._guard:
                rows = list(self._waiting)
            if not rows:
                return True
            statement = "INSERT INTO record (key, body, put_at) VALUES (?, ?, ?)"
            try:
                self._run(lambda database: database.executemany(statement, rows), durable=self.fsync)
            except FAULTS as error:
                self.problems.report(
                    "outbox",
                    f"the outbox {self.folder} cannot be written; up to {MAX_WAITING:,} records wait in memory. Free "
                    "the disk or make the folder writable",
                    error,
                )
                return False
            with self._guard:
                for _ in rows:
                    self._waiting.popleft()
            self.problems.resolve("outbox", f"the outbox {self.folder} can be written again")
            return True

    @property
    def waiting(self) -> int:
        """Number of records in memory, because the disk cannot be written."""
        return len(self._waiting)

    def waiting_bodies(self, limit: int) -> list[dict[str, Any]]:
        """The oldest records in memory."""
        with self._guard:
            return [json.loads(body) for _, body, _ in list(self._waiting)[:limit]]

    def take_back(self, record: Mapping[str, object]) -> bool:
        """Remove a record that waits in memory. False if none is equal to it."""
        body = json.dumps(record, allow_nan=False)
        row = next((row for row in list(self._waiting) if row[1] == body), None)
        return row is not None and self._take_back(row)

    def _take_back(self, row: tuple[str, str, float]) -> bool:
        with self._database, self._guard:
            if row not in self._waiting:
                return False
            self._waiting.remove(row)
            return True

    def settle(self, numbers: Iterable[int]) -> None:
        """Delete records that their receiver has."""
        self._change("DELETE FROM record WHERE number = ?", [(number,) for number in numbers])

    def remove(self, keys: Iterable[str]) -> None:
        """Delete the records with these keys."""
        self._change("DELETE FROM record WHERE key = ?", [(key,) for key in keys])
        if not self.fsync and time.monotonic() - self._checkpointed >= CHECKPOINT_S:
            self._checkpoint()

    def defer(self, number: int) -> None:
        """Put a record behind those that were tried less often."""
        self._change("UPDATE record SET tries = tries + 1 WHERE number = ?", [(number,)])

    def refuse(self, number: int, reason: str) -> None:
        """Keep a record that its receiver will never take, apart from the others."""
        self._change("UPDATE record SET refused = ? WHERE number = ?", [(reason, number)])

    def retry_refused(self) -> int:
        """Let refused records wait again, as if they were new; returns how many."""
        count = self._number("SELECT count(*) FROM record WHERE refused IS NOT NULL")
        statement = "UPDATE record SET refused = NULL, tries = 0, put_at = ? WHERE refused IS NOT NULL"
        self._change(statement, [(time.time(),)])
        return count

    def erase(self, owns: Callable[[object], bool], *, dry_run: bool = False) -> int:
        """Overwrite the records, refused ones too, that `owns` says are to be erased; returns how many."""
        rows = self._rows("SELECT number, body FROM record")
        numbers = [(number,) for number, body in rows if owns(json.loads(body))]
        if not dry_run:
            self._change("DELETE FROM record WHERE number = ?", numbers)
            self.compact()
        return len(numbers)

    def compact(self) -> None:
        """Empty SQLite's log, in which deleted records stand until others overwrite them."""
        if self.path.exists():
            with self._database:
                self._run(lambda database: database.execute("PRAGMA wal_checkpoint(TRUNCATE)"))

    def _checkpoint(self) -> None:
        """Move SQLite's log into the file, beside writers. What fails now is done the next time."""
        self._checkpointed = time.monotonic()
        with (
            contextlib.suppress(*FAULTS),
            contextlib.closing(sqlite3.connect(self.path, timeout=0)) as database,
        ):
            database.execute("PRAGMA wal_checkpoint(PASSIVE)")

    # --- Reading ------------------------------------------------------------------------------------------

    def pending(self, limit: int = -1, *, older_than_s: float = 0.0) -> list[Record]:
        """Records that are neither settled nor refused: the least tried first, then the oldest."""
        # A clock that was set back must not make a record young for ever.
        query = (
            "SELECT number, body, tries, put_at FROM record WHERE refused IS NULL AND abs(? - put_at) >= ? "
            "ORDER BY tries, number LIMIT ?"
        )
        rows = self._rows(query, time.time(), older_than_s, limit)
        return [Record(number, json.loads(body), tries, put_at) for number, body, tries, put_at in rows]

    def pending_count(self, *, up_to: int | None = None) -> int:
        """Number of such records; up_to: among those up to this number."""
        return self._number(
            "SELECT count(*) FROM record WHERE refused IS NULL AND number <= ?",
            2**62 if up_to is None else up_to,
        )

    def pending_bytes(self) -> int:
        return self._number("SELECT coalesce(sum(length(body)), 0) FROM record WHERE refused IS NULL")

    def newest(self) -> int:
        """Number of the newest record; 0 without one."""
        return self._number("SELECT coalesce(max(number), 0) FROM record")

    def contains(self, key: str) -> bool:
        """True if a record with this key waits; a refused one does not."""
        with self._guard:
            if any(row[0] == key for row in self._waiting):
                return True
        return bool(self._rows("SELECT 1 FROM record WHERE key = ? AND refused IS NULL LIMIT 1", key))

    def holds_kind(self, kind: str) -> bool:
        """True if a pending record is of this kind."""
        start = json.dumps({"kind": kind})[:-1]
        return bool(
            self._rows(
                "SELECT 1 FROM record WHERE refused IS NULL AND substr(body, 1, ?) = ? LIMIT 1",
                len(start),
                start,
            )
        )

    def refused(self) -> list[dict[str, object]]:
        """Refused records, oldest first: {reason, record}."""
        rows = self._rows("SELECT refused, body FROM record WHERE refused IS NOT NULL ORDER BY number")
        return [{"reason": reason, "record": json.loads(body)} for reason, body in rows]

    # --- The file -----------------------------------------------------------------------------------------

    def _change(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        # Not forced to the disk: what a power cut takes back is sent twice, and has its id.
        if rows and self.path.exists():
            with self._database:
                self._run(lambda database: database.executemany(statement, rows))

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        if not self.path.exists():
            return []
        with self._database:
            return self._run(lambda database: database.execute(query, values).fetchall())

    def _number(self, query: str, *values: object) -> int:
        return next((int(row[0]) for row in self._rows(query, *values)), 0)

    def _run(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Do this in one transaction. durable: it is on the disk afterwards. Raises one of FAULTS."""
        connection = self._connection or self._opened()
        try:
            connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            with connection:
                found = work(connection)
        except sqlite3.Error:
            # The disk may have failed within a write: begin with the file as it is.
            self._connection = None
            connection.close()
            raise
        self._connection = connection
        return found

    def _opened(self) -> sqlite3.Connection:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = sqlite3.connect(self.path, timeout=BUSY_S, check_same_thread=False)
        try:
            _write_ahead(connection)
            connection.execute("PRAGMA secure_delete=ON")
            if not self.fsync:  # A checkpoint waits for the disk. `remove` makes it, so no `put` waits.
                connection.execute("PRAGMA wal_autocheckpoint=0")
            connection.executescript(_SCHEMA)
        except sqlite3.Error:
            connection.close()
            raise
        return connection


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Switch to SQLite's write-ahead log. Two that open a new file at once are refused at once: ask again."""
    until = time.monotonic() + BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)
