"""Files of an export: written completely, hashed and checked, or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.checksums import MANIFEST

Progress = Callable[[str, int, int], None]
"""Progress callback: (task, amount done, total amount)."""

FREE_MARGIN = 64 * 1024**2
"""Bytes that must stay free on the disk beside the export."""


class ExportRefused(ValueError):
    """An export that cannot or must not be made; the message says what was expected, found, and what to do."""


@dataclass(frozen=True)
class ExportedFile:
    """One finished file, with its size in bytes and its SHA-256."""

    path: Path
    bytes: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class ExportResult:
    """A finished export: its files, the figures of its checks, and notes for a person."""

    format: str
    files: list[ExportedFile]
    equality: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "files": [file.as_dict() for file in self.files],
            "checked": self.equality,
            "notes": self.notes,
        }


def silent(step: str, done: int, total: int) -> None:
    """A Progress that does nothing."""


def sha256_file(path: Path) -> str:
    """SHA-256 of a file in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def exported_file(path: Path) -> ExportedFile:
    return ExportedFile(path, path.stat().st_size, sha256_file(path))


@contextmanager
def staged_file(output: Path, needed_bytes: int) -> Iterator[Path]:
    """A path in a temporary folder beside `output`; the file becomes `output` when the block succeeds.

    Other files in the folder are deleted. `needed_bytes` is the most it will hold at once. Raises ExportRefused if the
    folder cannot be written or the disk is or becomes full. Nothing half-written remains.
    """
    if output.is_dir():
        raise ExportRefused(
            f"expected a file name for the export, found the folder {output}; add a file name"
        )
    with _stage(output, needed_bytes) as folder:
        staged = folder / output.name
        yield staged
        staged.replace(output)


@contextmanager
def staged_folder(output: Path, needed_bytes: int) -> Iterator[Path]:
    """A temporary folder beside `output` that becomes `output` when the block succeeds; see `staged_file`.

    An existing `output` must be empty or an earlier export (it holds export.json), which is replaced.
    """
    if output.exists() and not output.is_dir():
        raise ExportRefused(
            f"expected a folder for the export, found the file {output}; choose another output"
        )
    if output.is_dir() and not (output / MANIFEST).is_file() and any(output.iterdir()):
        raise ExportRefused(
            f"expected a new or empty folder, or an earlier export, found other files in {output}; "
            "choose another output"
        )
    with _stage(output, needed_bytes) as folder:
        staged = folder / "export"
        staged.mkdir()
        yield staged
        if output.exists():
            output.replace(folder / "replaced")
        staged.replace(output)


def manifest_write(folder: Path, result: ExportResult) -> None:
    """Writes export.json into a staged folder, with file names relative to it."""
    facts = result.as_dict()
    facts["files"] = [
        {"path": str(file.path.relative_to(folder)), "bytes": file.bytes, "sha256": file.sha256}
        for file in result.files
    ]
    (folder / MANIFEST).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", "utf-8")


@contextmanager
def _stage(output: Path, needed_bytes: int) -> Iterator[Path]:
    parent = output.absolute().parent
    new_folders = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    is_done = False
    try:
        with _refusals(parent):
            parent.mkdir(parents=True, exist_ok=True)
            space_check(parent, needed_bytes)
            # beside the output, so that the last step is a rename on one file system
            folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".partial", dir=parent))
        try:
            with _refusals(parent):
                yield folder
            is_done = True
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        if not is_done:
            for folder in new_folders:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()


def space_check(folder: Path, needed_bytes: int) -> None:
    """Raises ExportRefused unless `folder`'s disk has room for `needed_bytes` and the margin."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + FREE_MARGIN:
        raise ExportRefused(
            f"the export needs {size_text(needed_bytes + FREE_MARGIN)} in {folder}, found {size_text(free)} free; "
            "free some space or choose an output on another disk"
        )


def size_text(count: int) -> str:
    """A number of bytes for people: 1.4 GB, 350 MB, 12 kB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1000:.0f} kB"


@contextmanager
def _refusals(parent: Path) -> Iterator[None]:
    """Turns disk errors into refusals; other errors pass."""
    try:
        yield
    except OSError as error:
        # numpy's tofile reports a short write without saying why
        short = error.errno is None and shutil.disk_usage(parent).free < FREE_MARGIN
        if short or error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportRefused(
                f"the disk of {parent} became full while exporting ({error.strerror or error}); nothing was left "
                "behind, free some space or choose an output on another disk"
            ) from error
        denied = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)
        if error.errno in denied and not os.access(parent, os.W_OK | os.X_OK):
            raise ExportRefused(
                f"expected a folder that can be written for the export, found {parent} ({error.strerror}); "
                "choose another output or change its permissions"
            ) from error
        raise
