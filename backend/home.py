"""The data folder's permissions: what lies in RATCHET_HOME is its owner's."""

from __future__ import annotations

import contextlib
import os
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
