"""Location of the program's own files: a checkout (`python manage.py`) or an installation by pip (`ratchet`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
