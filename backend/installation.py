"""Location of the program's own files: a checkout (`python manage.py`) or an installation by pip (`ratchet`)."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The checkout; where installed, the folder that holds the packages (site-packages)."""
_PACKAGE_FOLDER = Path(__file__).resolve().parent
# A wheel has no folders beside its packages: pyproject.toml maps templates/ and static/ into this one.
IS_INSTALLED = (_PACKAGE_FOLDER / "templates").is_dir()
PROGRAM = "ratchet" if IS_INSTALLED else "python manage.py"
"""Words typed before the name of a command: `python manage.py`, or `ratchet` where it is installed."""


def bundled_folder(name: str) -> Path:
    """`templates`, `static` or `docs`, where it lies in this installation."""
    return (_PACKAGE_FOLDER if IS_INSTALLED else ROOT) / name


def default_home(environment: Mapping[str, str]) -> Path:
    """The data folder where RATCHET_HOME is not set: `var/` of a checkout, else the user's data folder.

    Not a folder of the current directory: a command started elsewhere would begin a second, empty installation.
    """
    if not IS_INSTALLED:
        return ROOT / "var"
    return Path(environment.get("XDG_DATA_HOME") or "~/.local/share").expanduser() / "ratchet"


def dotenv_file(environment: Mapping[str, str]) -> Path:
    """The `.env` that is read: of the checkout, else of the data folder.

    Never of the current directory where installed: it may belong to another app, whose database would be migrated.
    """
    if not IS_INSTALLED:
        return ROOT / ".env"
    return Path(environment.get("RATCHET_HOME") or default_home(environment)).expanduser() / ".env"


def command_arguments(*arguments: str) -> list[str]:
    """Words after the interpreter (or a launcher such as torchrun) that run a command of ours, started in ROOT."""
    return [*(["-m", "backend"] if IS_INSTALLED else [str(ROOT / "manage.py")]), *arguments]


def as_typed(text: str) -> str:
    """A text for people with its commands as they are typed here: `manage.py` becomes `ratchet` where installed."""
    if not IS_INSTALLED:
        return text
    return re.sub(r"(?:(?:\.venv/bin/)?python )?\bmanage\.py\b|\bmake(?= serve\b)", PROGRAM, text)


PRIVATE = 0o700
OTHERS_PERMISSIONS = 0o007


def home_private(home: Path) -> None:
    """Make the folder with mode 0700; take everyone's access away from one that is there.

    A folder that is closed to everyone but open to a group was made so by somebody, and stays. Where nothing can be
    changed (a read-only disk, another owner) the folder stays as it is: `manage.py doctor` says so.
    """
    with contextlib.suppress(OSError):
        home.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        if home.stat().st_mode & OTHERS_PERMISSIONS and home.stat().st_uid == os.geteuid():
            home.chmod(PRIVATE)


def key_file(path: Path, make: Callable[[], str]) -> str:
    """The key in a file; made by the first process that asks, and readable by the owner alone."""
    with contextlib.suppress(FileNotFoundError):
        if key := path.read_text().strip():
            return key
    path.parent.mkdir(parents=True, exist_ok=True)
    # written whole under another name: of processes that start at once one's becomes the key, and none is read half
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    half = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(make())
        try:
            path.hardlink_to(half)
        except FileExistsError:
            if not path.read_text().strip():  # left empty by a full disk
                half.replace(path)
        except OSError:  # a file system without hard links
            half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return path.read_text().strip()
