"""Signals of the registry: other packages take part in a move of a policy without being imported here."""

from __future__ import annotations

from django.dispatch import Signal

policy_promoting = Signal()
"""Sent with `policy` before it is promoted. A receiver that finds it cannot be served raises PreparationRefused."""


class PreparationRefused(RuntimeError):
    """A policy whose files for serving cannot be written; the message says which, why and what to do."""
