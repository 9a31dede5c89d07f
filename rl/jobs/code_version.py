"""Version of the code that a run's record names."""

from __future__ import annotations

import subprocess

from django.conf import settings

from backend.installation import IS_INSTALLED


def code_version() -> str:
    """The version of this code, with the commit where it is a git checkout."""
    if IS_INSTALLED:  # git would answer with the commit of whatever checkout site-packages lies in
        return settings.RATCHET_VERSION
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(settings.BASE_DIR), "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return settings.RATCHET_VERSION
    commit = found.stdout.strip()
    return (
        f"{settings.RATCHET_VERSION}+{commit}"
        if found.returncode == 0 and commit
        else settings.RATCHET_VERSION
    )
