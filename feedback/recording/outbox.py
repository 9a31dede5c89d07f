"""Outbox of decisions that the database did not take: date-named JSON-lines files, replayed when it is back.

The client package has an outbox of the same file format on the other side of the network; neither imports the other,
for each runs where the other is not installed.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from backend.file_locks import file_lock, renew_after_fork, write_whole
from backend.logs import ProblemLog

MAX_PENDING = 1_000
"""Records kept in memory while the disk takes none; later ones are lost and reported so."""
KEEP_DAYS = 30
"""Days that a file is kept after all of it was replayed."""


@dataclass
class Progress:
    """Progress of replaying one day's file; written beside it after every batch."""

    position: int = 0
    """Bytes from the start: every record that begins before it was handled."""
    sent: int = 0
    refused: int = 0


class Record(NamedTuple):
    """A line of a day's file: where it begins and ends, and its object; or what is wrong with it (nothing: blank)."""

    start: int
    end: int
    body: dict[str, Any] | None
    fault: str
    raw: str


class Outbox:
    """A folder of `2026-11-21.jsonl` files that any number of threads and processes append to.

    Beside each: `.progress.json` (how much of it was replayed) and `.refused.jsonl` (what the database refused, with
    the reason). Files are readable by their owner alone. A day's file is removed KEEP_DAYS after it was replayed whole.
    """

    def __init__(self, folder: Path, problems: ProblemLog | None = None) -> None:
        self.folder = folder
        self.problems = problems or ProblemLog(logging.getLogger("feedback.recording.outbox"))
        self.lost = 0
        self._pending: deque[bytes] = deque()
        self._guard = threading.Lock()
        self._writing = threading.Lock()
        self._finished: dict[Path, int] = {}
        renew_after_fork(self)

    def after_fork(self) -> None:
        """Forget what waits in memory, which is the parent's to write, and replace the locks."""
        self._pending.clear()
        self._guard, self._writing = threading.Lock(), threading.Lock()
        self.problems.after_fork()

    # --- Writing ------------------------------------------------------------------------------------------

    def put(self, record: dict[str, Any], *, hold: bool = True) -> bool:
        """Append a record durably. Raises nothing: while the disk takes none it waits in memory, and False returns.

        Without `hold` it does not wait: False then says that it is kept nowhere.
        """
        line = _line(record)
        with self._guard:
            if len(self._pending) >= MAX_PENDING:
                self.lost += hold
                self.problems.report("lost", f"the outbox {self.folder} cannot be written: a record was lost")
                return False
            self._pending.append(line)
        # taken back by us, it is nowhere; written by another thread meanwhile, it is on disk
        return self.write_pending() or (not hold and not self.take_back(record))

    def pending_records(self, limit: int) -> list[dict[str, Any]]:
        """The oldest records that wait in memory, `limit` of them at most."""
        with self._guard:
            return [json.loads(line) for line in list(self._pending)[:limit]]

    def take_back(self, record: dict[str, Any]) -> bool:
        """Remove a record that waits in memory; returns whether it did."""
        with self._writing, self._guard:
            try:
                self._pending.remove(_line(record))
            except ValueError:
                return False
            return True

    def write_pending(self) -> bool:
        """Write what waits in memory; threads that arrive together share one write and one fsync."""
        with self._writing:
            with self._guard:
                lines = list(self._pending)
            if not lines:
                return True
            try:
                self._append(b"".join(lines))
            except OSError as error:
                self.problems.report(
                    "outbox",
                    f"the outbox {self.folder} cannot be written; up to {MAX_PENDING:,} records wait in "
                    "memory. Free the disk or make the folder writable",
                    error,
                )
                return False
            with self._guard:
                for _ in lines:
                    self._pending.popleft()
            self.problems.resolve("outbox", f"the outbox {self.folder} can be written again")
            return True

    def _append(self, lines: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with file_lock(self.folder / "append.lock"):
            # the date is read under the lock, so that nothing is appended to a day that `sweep` removes
            path = self.folder / f"{_current_day().isoformat()}.jsonl"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                size = os.lseek(descriptor, 0, os.SEEK_END)
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":
                        lines = b"\n" + lines  # a writer was killed within its line: it must not swallow ours
                try:
                    write_whole(descriptor, lines)
                    os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
            if not size:
                _fsync_folder(self.folder)

    # --- Reading ------------------------------------------------------------------------------------------

    def days(self) -> list[Path]:
        """The days' files, oldest first."""
        return sorted(path for path in self.folder.glob("????-??-??.jsonl") if _date(path) is not None)

    def records(self, day: Path, position: int) -> Iterator[Record]:
        """The records of a day from a byte position on, as far as they are written."""
        with day.open("rb") as file:
            file.seek(position)
            while line := file.readline():
                start = position
                if not line.endswith(b"\n"):
                    with file_lock(self.folder / "append.lock"):
                        # nobody is writing now: it is whole, or whoever wrote it was killed
                        file.seek(start)
                        line = file.readline()
                position = start + len(line)
                yield _record(line, start)

    def progress(self, day: Path) -> Progress:
        """Progress of replaying a day's file; at its start where none is stored."""
        try:
            stored = json.loads(_sibling(day, "progress.json").read_bytes())
            return Progress(**{name: stored[name] for name in asdict(Progress())})
        except (OSError, ValueError, KeyError, TypeError):
            # missing, or torn by a power cut: replaying once more is safe, for every record carries its id
            return Progress()

    def progress_save(self, day: Path, progress: Progress) -> None:
        """Replace the file as a whole. Not fsynced: losing it costs a second replay, which changes nothing."""
        path = _sibling(day, "progress.json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(progress)))
        draft.replace(path)

    def refuse(self, day: Path, record: Record, reason: str) -> None:
        """Keep a record the database will never take, with the reason, apart from the others."""
        entry = {
            "reason": reason,
            "file": day.name,
            "at_byte": record.start,
            "record": record.body if record.body is not None else record.raw,
        }
        descriptor = os.open(_sibling(day, "refused.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            write_whole(descriptor, json.dumps(entry).encode("ascii") + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def blank(self, owns: Callable[[Any], bool], *, dry_run: bool = False) -> int:
        """Overwrite with spaces every record, replayed or not or refused, that `owns` says is to be erased; how many.

        In place: where the others begin, and how far each day was replayed, stays as it is.
        """
        if not self.folder.is_dir():
            return 0
        with file_lock(self.folder / "append.lock"):
            return sum(_blank(path, owns, dry_run) for path in sorted(self.folder.glob("*.jsonl")))

    def pending_days(self, goals: dict[Path, int] | None = None) -> dict[Path, int]:
        """Days that hold records not replayed yet, each with its size; of `goals` (day -> size) alone where given."""
        pending: dict[Path, int] = {}
        for day, goal in (goals or {path: path.stat().st_size for path in self.days()}).items():
            if self._finished.get(day, -1) >= goal:
                continue
            if day.exists() and self.progress(day).position < goal:
                pending[day] = goal
            else:
                self._finished[day] = goal  # what is handled stays handled: a month of days is not read again
        return pending

    @property
    def pending_count(self) -> int:
        """Records in memory, because the disk took none."""
        return len(self._pending)

    def sweep(self) -> None:
        """Remove days that are wholly replayed and older than KEEP_DAYS; what was refused stays."""
        before = _current_day() - timedelta(days=KEEP_DAYS)
        for day in self.days():
            if (dated := _date(day)) is None or dated >= before:
                continue
            with file_lock(self.folder / "append.lock"):
                if not self.pending_days({day: day.stat().st_size}):
                    day.unlink()
                    _sibling(day, "progress.json").unlink(missing_ok=True)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _blank(path: Path, owns: Callable[[Any], bool], dry_run: bool) -> int:
    count = start = 0
    with path.open("rb" if dry_run else "r+b") as file:
        while line := file.readline():
            try:
                erase = bool(line.strip()) and owns(json.loads(line))
            except (ValueError, RecursionError):
                erase = owns(line.decode("utf-8", "replace"))
            if erase:
                count += 1
                if not dry_run:
                    file.seek(start)
                    file.write(b" " * (len(line) - line.endswith(b"\n")))
                    file.seek(start + len(line))
            start += len(line)
        if count and not dry_run:
            file.flush()
            os.fsync(file.fileno())
    return count


def _record(line: bytes, start: int) -> Record:
    end = start + len(line)
    if not line.strip():
        return Record(start, end, None, "", "")
    raw = line.decode("utf-8", "replace")
    try:
        body = json.loads(line)
    except ValueError as error:
        return Record(start, end, None, f"expected a line of JSON, found {error}", raw)
    if not isinstance(body, dict):
        return Record(start, end, None, "expected a JSON object", raw)
    return Record(start, end, body, "", "")


def _sibling(day: Path, suffix: str) -> Path:
    return day.with_name(f"{day.stem}.{suffix}")


def _current_day() -> date:
    return datetime.now(UTC).date()


def _date(day: Path) -> date | None:
    try:
        return date.fromisoformat(day.stem)
    except ValueError:
        return None


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
