"""A database file with every migration applied: made once for each worker, copied where a process needs one."""

from __future__ import annotations

import shutil
from pathlib import Path

from django.db import connection

_template: Path | None = None
"""None until the tests' own database was made, and outside the tests."""


def template_write(path: Path) -> None:
    """Write the tests' own SQLite database, as it is before the first test, to `path`."""
    global _template
    with connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [str(path)])
    _template = path


def template_copy(database: Path) -> bool:
    """Put a migrated database at `database`; False where there is none to copy, or something stands there already."""
    if _template is None or database.exists():
        return False
    shutil.copyfile(_template, database)
    return True
