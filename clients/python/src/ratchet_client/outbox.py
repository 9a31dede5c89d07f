"""Outbox: records in JSON-lines files, one per day, until a server has them. Crashes and forks lose none."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from ratchet_client.file_locks import file_lock, fsync_folder, renew_after_fork, write_whole
from ratchet_client.problem_log import ProblemLog

MAX_WAITING = 1_000
"""Most records in memory while the disk cannot be written. Further records are lost, and the log says so."""


@dataclass
class Progress:
    """Progress of sending one day's file. It is written beside the file after each response of the server."""

    position: int = 0
    """Byte position: the records before it were handled, except those in `held`."""
    held: list[int] = field(default_factory=list)
    """Positions of records on which the server failed while it took others. They are sent again."""
    sent: int = 0
    refused: int = 0


class Record(NamedTuple):
    """A line of a day's file: start and end in bytes, and its object or its fault. A blank line has neither."""

    start: int
    end: int
    body: dict[str, Any] | None
    fault: str
    raw: str


class Outbox:
    """A folder of files such as `2026-11-21.jsonl`, to which threads and processes append.

    Each has a `.progress.json` (how much the server has) and, if needed, a `.refused.jsonl` (refused records with
    reasons). Only the owner can read the files. A file that was sent completely is removed after `keep_days` days.
    """

    def __init__(
        self, folder: Path, problems: ProblemLog, *, fsync: bool = True, keep_days: int | None = 30
    ) -> None:
        self.folder = folder
        self.problems = problems
        self.fsync = fsync
        self.keep_days = keep_days
        self.lost = 0
        self._waiting: deque[bytes] = deque()
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._finished: dict[Path, int] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Drop the records in memory, which the parent writes, and make new locks."""
        self._waiting.clear()
        self._guard, self._writing = threading.Lock(), threading.Lock()
        self.problems.after_fork()

    # --- Writing ------------------------------------------------------------------------------------------

    def put(self, record: dict[str, Any]) -> bool:
        """Append a record. False if the disk cannot be written: the record then waits in memory. Never raises."""
        line = _line(record)
        with self._guard:
            if len(self._waiting) >= MAX_WAITING:
                self.lost += 1
                self.problems.report("lost", f"{self.folder} cannot be written: a record was lost")
                return False
            self._waiting.append(line)
        return self.write_waiting()

    def write_waiting(self) -> bool:
        """Write the records in memory. Threads that call it together share one write and one fsync."""
        with self._writing:
            with self._guard:
                lines = list(self._waiting)
            if not lines:
                return True
            try:
                self._append(b"".join(lines))
            except OSError as error:
                self.problems.report(
                    "outbox",
                    f"the outbox {self.folder} cannot be written; up to {MAX_WAITING:,} records wait in memory. Free "
                    "the disk or make the folder writable",
                    error,
                )
                return False
            with self._guard:
                for _ in lines:
                    self._waiting.popleft()
            self.problems.resolve("outbox", f"the outbox {self.folder} can be written again")
            return True

    def _append(self, lines: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self.folder / "append.lock"):
            # Under the lock, so that `sweep` does not remove the day's file meanwhile.
            path = self.folder / f"{_today().isoformat()}.jsonl"
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600
            )
            try:
                size = os.lseek(descriptor, 0, os.SEEK_END)
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":
                        lines = (
                            b"\n" + lines
                        )  # A writer was killed within its line. A newline separates it from the next record.
                try:
                    write_whole(descriptor, lines)
                    if self.fsync:
                        os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
            if self.fsync and not size:
                fsync_folder(self.folder)

    # --- Reading ------------------------------------------------------------------------------------------

    def days(self) -> list[Path]:
        """The days' files, oldest first."""
        return sorted(path for path in self.folder.glob("????-??-??.jsonl") if _date(path) is not None)

    def records(self, day: Path, position: int) -> Iterator[Record]:
        """The complete records of a day from a byte position on."""
        with day.open("rb") as file:
            file.seek(position)
            while line := file.readline():
                start = position
                if not line.endswith(b"\n"):
                    with file_lock(self.folder / "append.lock"):
                        # No writer is at work: the line is complete, or its writer was killed.
                        file.seek(start)
                        line = file.readline()
                position = start + len(line)
                yield _record(line, start)

    def record_at(self, day: Path, position: int) -> Record | None:
        """The record that begins there."""
        return next(self.records(day, position), None)

    def progress(self, day: Path) -> Progress:
        """Progress of a day's file; zero if none is stored."""
        try:
            stored = json.loads(_sibling(day, "progress.json").read_bytes())
            return Progress(**{name: stored[name] for name in asdict(Progress())})
        except (OSError, ValueError, KeyError, TypeError):
            # Missing or damaged by a power cut. Records are sent again, which is safe: each has its id.
            return Progress()

    def progress_save(self, day: Path, progress: Progress) -> None:
        """Replace the progress file, without fsync. If it is lost, records are sent twice and stored once."""
        path = _sibling(day, "progress.json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(progress)))
        draft.replace(path)

    def refuse(self, day: Path, record: Record, reason: str) -> None:
        """Write a record that the server refused, with the reason, to the day's `.refused.jsonl`."""
        entry = {
            "reason": reason,
            "file": day.name,
            "at_byte": record.start,
            "record": record.body if record.body is not None else record.raw,
        }
        descriptor = os.open(_sibling(day, "refused.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            write_whole(descriptor, json.dumps(entry).encode("ascii") + b"\n")
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def pending(self, goals: dict[Path, int] | None = None) -> dict[Path, int]:
        """Days with records not handled yet, and the sizes of their files in bytes.

        goals: day -> size. Only these days count, up to these sizes.
        """
        days: dict[Path, int] = {}
        for day, goal in (goals or {path: path.stat().st_size for path in self.days()}).items():
            if self._finished.get(day, -1) >= goal:
                continue
            progress = self.progress(day)
            if day.exists() and (progress.position < goal or any(start < goal for start in progress.held)):
                days[day] = goal
            else:
                self._finished[day] = goal  # Days that are done are not read again.
        return days

    @property
    def waiting(self) -> int:
        """Number of records in memory, because the disk cannot be written."""
        return len(self._waiting)

    def sweep(self) -> None:
        """Remove files that were sent completely and are older than `keep_days`. Refused records stay."""
        if self.keep_days is None:
            return
        before = _today() - timedelta(days=self.keep_days)
        for day in self.days():
            if (dated := _date(day)) is None or dated >= before:
                continue
            with file_lock(self.folder / "append.lock"):
                if not self.pending({day: day.stat().st_size}):
                    day.unlink()
                    _sibling(day, "progress.json").unlink(missing_ok=True)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _record(line: bytes, start: int) -> Record:
    end = start + len(line)
    if not line.strip():
        return Record(start, end, None, "", "")
    try:
        body = json.loads(line)
    except ValueError as error:
        return Record(
            start, end, None, f"expected a line of JSON, found {error}", line.decode("utf-8", "replace")
        )
    if not isinstance(body, dict):
        return Record(start, end, None, "expected a JSON object", line.decode("utf-8", "replace"))
    return Record(start, end, body, "", "")


def _sibling(day: Path, suffix: str) -> Path:
    return day.with_name(f"{day.stem}.{suffix}")


def _today() -> date:
    return datetime.now(UTC).date()


def _date(day: Path) -> date | None:
    try:
        return date.fromisoformat(day.stem)
    except ValueError:
        return None
