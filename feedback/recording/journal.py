"""Write-ahead journal of decisions that are not in the database yet; after a crash another process replays it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

from backend.file_locks import descriptor_close, descriptor_hold, descriptor_lock, write_whole

SUFFIX = ".journal"
FILES = 2
"""One that is written to, and one whose decisions are being recorded."""


class Journal:
    """Lines in two files of a process's own, locked while it lives. Not thread-safe: its owner holds a lock.

    A line is in the operating system's hands when `note` returns: it outlives the process, however that ends. It is not
    forced to the disk, which takes as long as the database does: a power cut takes what was noted since the last turn.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[tuple[Path, int]] = []
        self._now = 0

    def note(self, line: bytes) -> None:
        """Raises OSError where the disk takes nothing."""
        if not self._files:
            self._open()
        write_whole(self._files[self._now][1], line)

    def turn(self) -> int:
        """Go on in the other file; the one that was written to until now, for `empty`."""
        before = self._now
        self._now = (self._now + 1) % FILES
        return before

    def empty(self, number: int) -> None:
        """Delete the segments up to `number`: their decisions are recorded."""
        if self._files:
            os.ftruncate(self._files[number][1], 0)

    def close(self) -> None:
        """Remove the files: nothing is in hand any more."""
        for path, descriptor in self._files:
            path.unlink(missing_ok=True)
            descriptor_close(descriptor)
        self._files.clear()

    def after_fork(self) -> None:
        """The files are the parent's; the copies of its descriptors are closed by `backend.file_locks`."""
        self._files.clear()

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        made: list[tuple[Path, int]] = []
        while len(made) < FILES:
            path = self.folder / f"{uuid.uuid4().hex}{SUFFIX}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            if not descriptor_lock(descriptor, wait=False) or not os.fstat(descriptor).st_nlink:
                os.close(descriptor)  # another process took it for one that was left behind, and removed it
                continue
            descriptor_hold(descriptor)
            made.append((path, descriptor))
        self._files = made


def journals(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


def noted(folder: Path, text: str) -> bool:
    """True if a text stands in what any process of this machine has in hand."""
    return any(text.encode("ascii", "replace") in _read(path) for path in journals(folder))


def take_over(path: Path, keep: Callable[[bytes], bool]) -> None:
    """Hand on the lines of one whose process is gone, and remove it once all are kept. One that lives is let be."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        # a line without its end is of a process that was killed before it answered
        if descriptor_lock(descriptor, wait=False) and all(
            keep(line) for line in _read(path).splitlines(keepends=True) if line.endswith(b"\n")
        ):
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""
