"""Where the program's files lie (checkout or pip installation), the data folder with its keys, and its disk."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or site-packages if installed."""
_PACKAGE_FOLDER = Path(__file__).resolve().parent
# In a wheel, pyproject.toml maps templates/ and static/ into this package.
IS_INSTALLED = (_PACKAGE_FOLDER / "templates").is_dir()
PROGRAM = "ratchet" if IS_INSTALLED else "python manage.py"
"""What users type before a command's name."""


def program_here() -> str:
    """Prefix of a command: the interpreter of this process and `manage.py`. `python` alone may be another one."""
    if IS_INSTALLED:
        return PROGRAM
    interpreter = Path(sys.executable)
    inside = interpreter.is_relative_to(ROOT)
    return f"{interpreter.relative_to(ROOT) if inside else interpreter} manage.py"


def program_of_checkout() -> str:
    """Prefix of the commands on pages: `program_here`, without a path outside the checkout."""
    inside = Path(sys.executable).is_relative_to(ROOT)
    return program_here() if inside else PROGRAM


def bundled_folder(name: str) -> Path:
    """The folder `templates`, `static` or `docs` of this installation."""
    return (_PACKAGE_FOLDER if IS_INSTALLED else ROOT) / name


def default_home(environment: Mapping[str, str]) -> Path:
    """Default data folder: `var/` of a checkout, else in the user's data folder.

    Never relative to the current directory: commands started elsewhere would use another, empty installation.
    """
    if not IS_INSTALLED:
        return ROOT / "var"
    return Path(environment.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "ratchet"


def dotenv_file(environment: Mapping[str, str]) -> Path:
    """The `.env` of the checkout or, if installed, of the data folder.

    Never of the current directory: it may belong to another app, whose database would be migrated.
    """
    if not IS_INSTALLED:
        return ROOT / ".env"
    return Path(environment.get("RATCHET_HOME") or default_home(environment)).expanduser() / ".env"


def command_arguments(*arguments: str) -> list[str]:
    """Arguments after the interpreter, or a launcher such as torchrun, that run a command in ROOT."""
    return [*(["-m", "backend"] if IS_INSTALLED else [str(ROOT / "manage.py")]), *arguments]


def as_typed(text: str) -> str:
    """The text with commands as users type them: `manage.py` becomes `ratchet` if installed."""
    if not IS_INSTALLED:
        return text
    return re.sub(r"(?:(?:\.venv/bin/)?python )?\bmanage\.py\b|\bmake(?= serve\b)", PROGRAM, text)


PRIVATE = 0o700
OTHERS_PERMISSIONS = 0o007


def home_private(home: Path) -> None:
    """Create the folder with mode 0700, or remove the access of others from an existing one.

    Access of a group stays. Failures (a read-only disk, another owner) are ignored here; `doctor` reports them.
    """
    with contextlib.suppress(OSError):
        home.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if home.stat().st_mode & OTHERS_PERMISSIONS and home.stat().st_uid == os.geteuid():
            home.chmod(PRIVATE)


def key_file(path: Path, make: Callable[[], str]) -> str:
    """The key in a file, created by the first process that asks and readable by the owner alone."""
    with contextlib.suppress(FileNotFoundError):
        if key := path.read_text().strip():
            return key
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written under another name, then linked: simultaneous processes agree on one key, and none reads half of it.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    half = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
        try:
            path.hardlink_to(half)
        except FileExistsError:
            if not path.read_text().strip():  # Left empty by a full disk.
                half.replace(path)
        except OSError:  # A file system without hard links.
            half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path.read_text().strip()


# --- The disk behind a folder: whether it is writable, and what to do if not ---

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
