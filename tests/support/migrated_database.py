"""A database file with every migration applied: made once for each worker, copied where a process needs one."""

import shutil
from pathlib import Path

from django.core.management import call_command
from django.db import connection

_template: Path | None = None
"""None until the tests' own database was made, and outside the tests."""


def template_write(path: Path) -> None:
    """Write the tests' own SQLite database, as it is before the first test, to `path`."""
    global _template
    if not connection.introspection.table_names():
        # no test of this session asked for the database, so that it was not made
        call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM INTO %s", [str(path)])
    _template = path


def template_copy(database: Path) -> bool:
    """Put a migrated database at `database`; False where there is none to copy, or something stands there already."""
    if _template is None or database.exists():
        return False
    shutil.copyfile(_template, database)
    return True
