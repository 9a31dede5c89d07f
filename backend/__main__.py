"""Entry point of `python manage.py`, the console script `ratchet` and `python -m backend` (child processes)."""

from __future__ import annotations

import atexit
import gc
import os
import sys


def main() -> None:
    """Run the command line. An unusable setting ends it with one line."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")
    # Busy waiting makes training seven times slower on a machine with other work. OpenMP reads this once, before torch
    # is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Python's last search for garbage takes two seconds with torch, and the end of the process frees the same memory.
    atexit.register(gc.freeze)
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
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"CommandError: {error}")


if __name__ == "__main__":
    main()
