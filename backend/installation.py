"""Where the program's files lie (checkout or pip installation), and the data folder with its keys."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or site-packages if installed."""
_PACKAGE_FOLDER = Path(__file__).resolve().parent
# In a wheel, pyproject.toml maps templates/ and static/ into this package.
IS_INSTALLED = (_PACKAGE_FOLDER / "templates").is_dir()
PROGRAM = "ratchet" if IS_INSTALLED else "python manage.py"
"""What users type before a command's name."""


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
