"""Command line of Ratchet: what `python manage.py`, the console script `ratchet` and `python -m backend` run."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command named on the command line; a setting that cannot be used ends it with one line."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    # Threads that wait for each other busily make training seven times slower on a machine that does other work too;
    # OpenMP reads this once, before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        from django.core.exceptions import ImproperlyConfigured
        from django.core.management import execute_from_command_line
    except ImportError as error:
        sys.exit(
            f"Django is not installed in this Python ({error}). Run `make demo` once, then use .venv/bin/python."
        )
    try:
        execute_from_command_line(sys.argv)
    except ImproperlyConfigured as error:
        # a setting that cannot be used is for the person who set it: its message is written for them
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"CommandError: {error}")
