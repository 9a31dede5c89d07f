"""This machine and this code, as jobs detect them and runs record them."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from django.conf import settings

from backend.installation import IS_INSTALLED
from rl.recipes.methods import method_named

if TYPE_CHECKING:
    from rl.training.hardware import Hardware


def hardware_detect(profile: str | None = None) -> Hardware:
    """This machine; the probe of its arithmetic is kept in RATCHET_HOME/cache. `profile`: in place of RATCHET_PROFILE.

    Raises HardwareRefused (a ValueError) for a profile that it cannot have.
    """
    from rl.training.hardware import detect

    return detect(settings.RATCHET_HOME / "cache", profile or settings.RATCHET_PROFILE)


def hardware_of(method: str) -> Hardware | None:
    """This machine where a method trains an adapter; None, and no torch loaded, where it does not."""
    return hardware_detect() if method_named(method).adapter else None


def code_version() -> str:
    """The version of this code, with the commit where it is a git checkout."""
    if IS_INSTALLED:  # git would answer with the commit of whatever checkout site-packages lies in
        return settings.RATCHET_VERSION
    try:
        found = subprocess.run(  # noqa: S603
            ["git", "-C", str(settings.BASE_DIR), "rev-parse", "--short=12", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return settings.RATCHET_VERSION
    commit = found.stdout.strip()
    return (
        f"{settings.RATCHET_VERSION}+{commit}"
        if found.returncode == 0 and commit
        else settings.RATCHET_VERSION
    )
