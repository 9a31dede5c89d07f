"""The spool: what was collected, in date-named JSON-lines files until a server has it; through crashes and forks."""

from __future__ import annotations

import json
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ratchet_client.problem_log import Problems

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

MAX_WAITING = 1_000
"""Records kept in memory while the disk takes none; those after them are lost, and said to be."""

_descriptors: set[int] = set()


class Forked(Protocol):
    """What must be renewed in the child of a fork: locks may be held by threads that do not exist there."""

    def after_fork(self) -> None: ...


_renewed: weakref.WeakSet[Any] = weakref.WeakSet()


def renew_after_fork(thing: Forked) -> None:
    """Have `thing.after_fork()` called in every child process."""
    _renewed.add(thing)


def _after_fork() -> None:
    # A lock belongs to the open file, which parent and child now share: a copy left open here would keep the lock
    # after the parent's death. Closing the copy leaves the parent's lock alone.
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()
    for thing in _renewed:
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _lock(descriptor: int, wait: bool) -> bool:
    if sys.platform == "win32":
        while True:
            try:
                msvcrt.locking(descriptor, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return True
            except OSError:
                if not wait:
                    return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    if sys.platform == "win32":
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file against every other thread and process; without `wait`, say whether it was free."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    _descriptors.add(descriptor)
    try:
        held = _lock(descriptor, wait)
        try:
            yield held
        finally:
            if held:
                _unlock(descriptor)
    finally:
        if descriptor in _descriptors:
            _descriptors.discard(descriptor)
            os.close(descriptor)


@dataclass
class Progress:
    """How far one day's file was handled; written beside it after every answer of the server."""

    position: int = 0
    """Bytes from the start: every record that begins before it was handled, but those in `held`."""
    held: list[int] = field(default_factory=list)
    """Where records begin that the server failed on while it took others; they are tried again."""
    sent: int = 0
    refused: int = 0


class Record(NamedTuple):
    """A line of a day's file: where it begins and ends, and its object; or what is wrong with it (nothing: blank)."""

    start: int
    end: int
    body: dict[str, Any] | None
    fault: str
    raw: str


class Spool:
    """A folder of `2026-11-21.jsonl` files that any number of threads and processes append to.

    Beside each: `.progress.json` (how much of it the server has) and `.refused.jsonl` (what it refused, with the
    reason). Files are readable by their owner alone. A day's file is removed `keep_days` after it was sent as a whole.
    """

    def __init__(
        self, folder: Path, problems: Problems, *, fsync: bool = True, keep_days: int | None = 30
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
        """What waits in memory is the parent's to write."""
        self._waiting.clear()
        self._guard, self._writing = threading.Lock(), threading.Lock()
        self.problems.after_fork()

    # --- Writing ------------------------------------------------------------------------------------------

    def put(self, record: dict[str, Any], *, hold: bool = True) -> bool:
        """Append a record durably. Raises nothing: while the disk takes none it waits in memory, and False returns.

        Without `hold` it does not wait: False then says that it is kept nowhere.
        """
        line = _line(record)
        with self._guard:
            if len(self._waiting) >= MAX_WAITING:
                self.lost += hold
                self.problems.say("lost", f"{self.folder} cannot be written: a record was lost")
                return False
            self._waiting.append(line)
        # taken back by us, it is nowhere; written by another thread meanwhile, it is on disk
        return self.write_waiting() or (not hold and not self.take_back(record))

    def waiting_lines(self, most: int) -> list[dict[str, Any]]:
        """The oldest records that wait in memory, so many at most."""
        with self._guard:
            return [json.loads(line) for line in list(self._waiting)[:most]]

    def take_back(self, record: dict[str, Any]) -> bool:
        """Forget a record that waits in memory; whether it did."""
        with self._writing, self._guard:
            try:
                self._waiting.remove(_line(record))
            except ValueError:
                return False
            return True

    def write_waiting(self) -> bool:
        """Write what waits; threads that arrive together share one write and one fsync."""
        with self._writing:
            with self._guard:
                lines = list(self._waiting)
            if not lines:
                return True
            try:
                self._append(b"".join(lines))
            except OSError as error:
                self.problems.say(
                    "spool",
                    f"the spool {self.folder} cannot be written; up to {MAX_WAITING:,} records wait in memory. Free "
                    "the disk or make the folder writable",
                    error,
                )
                return False
            with self._guard:
                for _ in lines:
                    self._waiting.popleft()
            self.problems.over("spool", f"the spool {self.folder} can be written again")
            return True

    def _append(self, lines: bytes) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / "append.lock"):
            # the date is read under the lock, so that nothing is appended to a day that `sweep` removes
            path = self.folder / f"{_today().isoformat()}.jsonl"
            descriptor = os.open(
                path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o600
            )
            try:
                size = os.lseek(descriptor, 0, os.SEEK_END)
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":
                        lines = b"\n" + lines  # a writer was killed within its line: it must not swallow ours
                try:
                    _write_whole(descriptor, lines)
                    if self.fsync:
                        os.fsync(descriptor)
                except OSError:
                    os.ftruncate(descriptor, size)
                    raise
            finally:
                os.close(descriptor)
            if self.fsync and not size:
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
                    with locked(self.folder / "append.lock"):
                        # nobody is writing now: it is whole, or whoever wrote it was killed
                        file.seek(start)
                        line = file.readline()
                position = start + len(line)
                yield _record(line, start)

    def record_at(self, day: Path, position: int) -> Record | None:
        """The record that begins there."""
        return next(self.records(day, position), None)

    def progress(self, day: Path) -> Progress:
        try:
            found = json.loads(_beside(day, "progress.json").read_bytes())
            return Progress(**{name: found[name] for name in asdict(Progress())})
        except (OSError, ValueError, KeyError, TypeError):
            # missing, or torn by a power cut: sending once more is safe, for every record carries its id
            return Progress()

    def progress_save(self, day: Path, progress: Progress) -> None:
        """Replace the file as a whole. Not fsynced: losing it costs answers `known already`, nothing else."""
        path = _beside(day, "progress.json")
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(progress)))
        draft.replace(path)

    def refuse(self, day: Path, record: Record, reason: str) -> None:
        """Keep a record the server will never take, with the reason, apart from the others."""
        entry = {
            "reason": reason,
            "file": day.name,
            "at_byte": record.start,
            "record": record.body if record.body is not None else record.raw,
        }
        descriptor = os.open(_beside(day, "refused.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            _write_whole(descriptor, json.dumps(entry).encode("ascii") + b"\n")
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def blank(self, owns: Callable[[Any], bool], *, dry_run: bool = False) -> int:
        """Overwrite with spaces every record, sent or not or refused, that `owns` says is to be erased; how many.

        In place: where the others begin, and how far each day was handled, stays as it is.
        """
        count = 0
        if not self.folder.is_dir():
            return 0
        with locked(self.folder / "append.lock"):
            for path in sorted(self.folder.glob("*.jsonl")):
                count += _blank(path, owns, dry_run)
        return count

    def unhandled(self, goals: dict[Path, int] | None = None) -> dict[Path, int]:
        """Days that hold records not handled yet, each with its size; of `goals` (day -> size) alone where given."""
        found: dict[Path, int] = {}
        for day, goal in (goals or {path: path.stat().st_size for path in self.days()}).items():
            if self._finished.get(day, -1) >= goal:
                continue
            progress = self.progress(day)
            if day.exists() and (progress.position < goal or any(start < goal for start in progress.held)):
                found[day] = goal
            else:
                self._finished[day] = goal  # what is handled stays handled: a month of days is not read again
        return found

    @property
    def waiting(self) -> int:
        """Records in memory, because the disk took none."""
        return len(self._waiting)

    def sweep(self) -> None:
        """Remove days that are wholly sent and older than `keep_days`; what was refused stays."""
        if self.keep_days is None:
            return
        before = _today() - timedelta(days=self.keep_days)
        for day in self.days():
            if (dated := _date(day)) is None or dated >= before:
                continue
            with locked(self.folder / "append.lock"):
                if not self.unhandled({day: day.stat().st_size}):
                    day.unlink()
                    _beside(day, "progress.json").unlink(missing_ok=True)


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode("ascii") + b"\n"


def _blank(path: Path, owns: Callable[[Any], bool], dry_run: bool) -> int:
    count = start = 0
    with path.open("rb" if dry_run else "r+b") as file:
        while line := file.readline():
            try:
                found = bool(line.strip()) and owns(json.loads(line))
            except (ValueError, RecursionError):
                found = owns(line.decode("utf-8", "replace"))
            if found:
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
    try:
        body = json.loads(line)
    except ValueError as error:
        return Record(
            start, end, None, f"expected a line of JSON, found {error}", line.decode("utf-8", "replace")
        )
    if not isinstance(body, dict):
        return Record(start, end, None, "expected a JSON object", line.decode("utf-8", "replace"))
    return Record(start, end, body, "", "")


def _beside(day: Path, suffix: str) -> Path:
    return day.with_name(f"{day.stem}.{suffix}")


def _today() -> date:
    return datetime.now(UTC).date()


def _date(day: Path) -> date | None:
    try:
        return date.fromisoformat(day.stem)
    except ValueError:
        return None


def _write_whole(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _fsync_folder(folder: Path) -> None:
    if sys.platform == "win32":
        return  # a folder cannot be opened there, and need not be
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
