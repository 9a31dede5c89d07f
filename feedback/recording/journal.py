"""Write-ahead journal of decisions that are not in the database yet; after a crash another process replays it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from backend.file_locks import descriptor_close, descriptor_hold, descriptor_lock, write_whole

SUFFIX = ".journal"
FILES = 2
"""Segments: one that is written to, and one whose decisions are being recorded."""


class Journal:
    """Lines in two files of a process's own, locked while it lives. Not thread-safe: its owner holds a lock.

    A line is in the operating system's page cache when `append` returns: it outlives the process, however that ends.
    It is not forced to the disk, which takes as long as the database does: a power cut loses the lines since the last
    `rotate`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments: list[tuple[Path, int]] = []
        self._current = 0

    def append(self, line: bytes) -> None:
        """Write a line. Raises OSError where the disk takes nothing."""
        if not self._segments:
            self._open()
        write_whole(self._segments[self._current][1], line)

    def rotate(self) -> int:
        """Continue in the other segment; returns the number of the one written to until now, for `truncate`."""
        before = self._current
        self._current = (self._current + 1) % FILES
        return before

    def truncate(self, segment: int) -> None:
        """Empty one segment: its decisions are recorded."""
        if self._segments:
            os.ftruncate(self._segments[segment][1], 0)

    def close(self) -> None:
        """Remove the files: all decisions are recorded."""
        for path, descriptor in self._segments:
            path.unlink(missing_ok=True)
            descriptor_close(descriptor)
        self._segments.clear()

    def after_fork(self) -> None:
        """The files are the parent's; the copies of its descriptors are closed by `backend.file_locks`."""
        self._segments.clear()

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        segments: list[tuple[Path, int]] = []
        while len(segments) < FILES:
            path = self.folder / f"{uuid.uuid4().hex}{SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            if not descriptor_lock(descriptor, wait=False) or not os.fstat(descriptor).st_nlink:
                # Race: between open() and the lock, another process may have mistaken this new file for an orphan,
                # replayed and unlinked it (st_nlink == 0). Try again with a fresh name.
                os.close(descriptor)
                continue
            descriptor_hold(descriptor)
            segments.append((path, descriptor))
        self._segments = segments


def journals(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


def journal_contains(folder: Path, text: str) -> bool:
    """True if a text stands in the journal of any process of this machine."""
    return any(text.encode("ascii", "replace") in _read(path) for path in journals(folder))


def replay_orphan(path: Path, sink: Callable[[bytes], bool]) -> None:
    """Pass the lines of a journal whose process is gone to `sink`, and remove it once all were taken. The journal of a
    living process is left alone: it is locked."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        # A line without its end was cut by a kill during the write: its user has had no answer.
        if descriptor_lock(descriptor, wait=False) and all(
            sink(line) for line in _read(path).splitlines(keepends=True) if line.endswith(b"\n")
        ):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
