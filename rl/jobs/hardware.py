"""Detection of this machine for the jobs that load models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings

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
