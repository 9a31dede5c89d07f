"""The disk behind a folder: whether it is writable, and what to do if not."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

LEAST_FREE_BYTES = 1024 * 1024
"""A disk with less free space counts as full."""


@dataclass(frozen=True)
class DiskState:
    """`state` is `ok`, `full` or `read-only`; `reason` says why."""

    path: Path
    state: str
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.state == "ok"


def disk_state(path: Path) -> DiskState:
    """State of the disk of `path` or of its nearest existing parent. Two system calls."""
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    # access(2) reports a read-only file system to root too.
    if not os.access(folder, os.W_OK | os.X_OK):
        return DiskState(
            path, "read-only", f"{folder} cannot be written: mount it writable, or change its permissions"
        )
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < LEAST_FREE_BYTES:
        return DiskState(path, "full", f"the disk of {folder} has {free:,} bytes left: free some space")
    if found.f_files and not found.f_favail:
        return DiskState(path, "full", f"the disk of {folder} has no inodes left: remove some files")
    return DiskState(path, "ok")


FULL = (errno.ENOSPC, errno.EDQUOT)
PERMISSION_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
SQLITE_FAULTS = {
    "disk is full": "the disk of {folder} is full: free some space and run it again",
    "readonly database": "{folder} cannot be written: mount it writable, or change its permissions",
    "unable to open database file": "{folder} must be there and be writable: make it so, or correct DATABASE_URL",
    "disk I/O error": "the disk of {folder} takes nothing: free some space, and look at the system's log",
}
"""SQLite error -> what happened and what to do."""


def disk_fault(error: BaseException, database: str = "") -> str:
    """The disk fault behind an error, with path and remedy; "" for other errors. database: the SQLite file, if any."""
    folder = Path(database).parent if database else None
    for text, meaning in SQLITE_FAULTS.items():
        if folder is not None and text in str(error):
            return (
                f"the database {database} cannot be written: {meaning.format(folder=folder)}; {INTACT_NOTE}"
            )
    if not isinstance(error, OSError) or error.errno not in (*FULL, *PERMISSION_ERRORS):
        return ""
    path = str(error.filename2 or error.filename or "the disk")
    if error.errno in FULL:
        return f"{path} cannot be written: its disk is full; free some space and run it again; {INTACT_NOTE}"
    return (
        f"{path} cannot be written ({error.strerror}): mount it writable, change its permissions, or name another "
        f"folder (RATCHET_HOME for everything); {INTACT_NOTE}"
    )


INTACT_NOTE = "existing data is unchanged"


def file_replace(path: Path, text: str) -> None:
    """Replace a file's text atomically. Raises OSError with the path."""
    half = path.with_name(f".{path.name}.{os.getpid()}.half")
    try:
        half.write_text(text, "utf-8")
        half.replace(path)
    except OSError as error:
        # Errors of write(2) name no path.
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
