"""The data folder: its permissions, and the keys that are made in it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

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
