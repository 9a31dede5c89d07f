"""Copies of the database for a backup, and their way back: SQLite's online backup, or pg_dump and pg_restore."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, cast
from urllib.parse import quote

from django.db import DatabaseError, connection, transaction
from django.db.migrations.loader import MigrationLoader

from backend.installation import PROGRAM

DRAFT = ".restoring"
"""Folder in RATCHET_HOME where a restore copies and checks files before it replaces any; begins the name of the file
that becomes the SQLite database."""
SQLITE_FILE, POSTGRES_FILE = "database.sqlite3", "database.dump"


class BackupRefused(ValueError):
    """The backup cannot be made, read or restored."""


def database_file() -> Path | None:
    """The SQLite file; None for PostgreSQL or a database in memory."""
    name = str(connection.settings_dict["NAME"])
    return Path(name) if connection.vendor == "sqlite" and "memory" not in name else None


def migrations_applied() -> list[str]:
    """Names of the applied migrations, such as feedback.0001_initial."""
    return sorted(".".join(key) for key in MigrationLoader(connection).applied_migrations)


def migration_names() -> set[str]:
    """Names of the migrations of this program."""
    return {".".join(key) for key in MigrationLoader(None).disk_migrations}


def database_copy(folder: Path) -> tuple[Path, dict[str, int]]:
    """Copy the database to a folder without blocking writers; returns (file, {table: rows}). Raises BackupRefused."""
    if connection.vendor == "sqlite":
        return _sqlite_copy(folder / SQLITE_FILE)
    if connection.vendor == "postgresql":
        return _postgres_copy(folder / POSTGRES_FILE)
    raise BackupRefused(f"expected an SQLite or PostgreSQL database, found {connection.vendor}")


def database_check(file: Path, rows: Mapping[str, int]) -> None:
    """Raises BackupRefused if the copy is damaged or, for SQLite, holds other numbers of rows."""
    if file.name == SQLITE_FILE:
        with closing(sqlite3.connect(f"file:{quote(str(file))}?mode=ro&immutable=1", uri=True)) as copy:
            try:
                found = [row[0] for row in copy.execute("PRAGMA integrity_check")]
                counts = _sqlite_rows(copy)
            except sqlite3.DatabaseError as error:
                found = [str(error)]
        if found != ["ok"]:
            raise BackupRefused(f"{file} is damaged: {'; '.join(found[:3])}")
        _rows_compare(counts, rows)
        return
    _run([_program("pg_restore"), "--file=/dev/null", str(file)], f"{file} cannot be read")


def database_empty() -> bool:
    """True if no table has rows besides those of `migrate`."""
    counts = _table_rows()
    made = {
        "django_migrations",
        "django_content_type",
        "auth_permission",
        "auth_group",
        "auth_group_permissions",
    }
    return not any(count for table, count in counts.items() if table not in made)


def database_restore(file: Path, rows: Mapping[str, int], files_swap: Callable[[], None]) -> None:
    """Replace the database by a checked copy, and the files beside it by `files_swap`. Raises BackupRefused."""
    target = database_file()
    if connection.vendor == "postgresql":
        _postgres_restore(file, rows, files_swap)
    elif target is None:
        raise BackupRefused("expected a database in a file, found one in memory")
    else:
        _sqlite_restore(file, target, files_swap)


def _rows_compare(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    differing = [name for name, count in expected.items() if found.get(name) != count]
    if differing:
        name = differing[0]
        raise BackupRefused(
            f"{len(differing)} tables differ from the manifest ({name}: {found.get(name)} rows, expected "
            f"{expected[name]}): take another backup. Nothing was replaced"
        )


def _table_rows() -> dict[str, int]:
    with connection.cursor() as cursor:
        return _counts(
            sorted(connection.introspection.table_names(cursor)), lambda query: _scalar(cursor, query)
        )


def _scalar(cursor: object, query: str) -> int:
    cursor.execute(query)  # type: ignore[attr-defined]
    return int(cursor.fetchone()[0])  # type: ignore[attr-defined]


def _counts(tables: list[str], ask: Callable[[str], int]) -> dict[str, int]:
    # Table names come from the database itself.
    return {table: ask(f'SELECT COUNT(*) FROM "{table}"') for table in tables}  # noqa: S608


# --- SQLite -------------------------------------------------------------------------------------------------


def sqlite_copy(source: Path, target: Path) -> None:
    """Copy an SQLite file of one moment, as a single file, while others write to it."""
    target.touch(mode=0o600)
    with (
        closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True, timeout=30)) as original,
        closing(sqlite3.connect(target)) as copy,
    ):
        # All pages in one step: a stepwise copy restarts at every write in between.
        original.backup(copy, pages=-1)
        copy.execute("PRAGMA journal_mode=DELETE")


def _sqlite_copy(target: Path) -> tuple[Path, dict[str, int]]:
    source_file = database_file()
    if source_file is None or not source_file.is_file():
        raise BackupRefused(
            f"expected an SQLite file, found none at {source_file}: run `{PROGRAM} migrate` first"
        )
    sqlite_copy(source_file, target)
    with closing(sqlite3.connect(target)) as copy:
        return target, _sqlite_rows(copy)


def _sqlite_rows(copy: sqlite3.Connection) -> dict[str, int]:
    names = [
        row[0] for row in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    ]
    tables = [name for name in names if not name.startswith("sqlite_")]
    return _counts(tables, lambda query: int(copy.execute(query).fetchone()[0]))


def _sqlite_restore(file: Path, target: Path, files_swap: Callable[[], None]) -> None:
    connection.close()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = target.with_name(f"{DRAFT}-{target.name}")  # On the disk of the target, which may be another one.
    draft.unlink(missing_ok=True)
    shutil.move(file, draft)
    draft.chmod(0o600)
    files_swap()
    for beside in ("-wal", "-shm"):  # Logs of the replaced database would be applied to this one.
        target.with_name(target.name + beside).unlink(missing_ok=True)
    draft.replace(target)


# --- PostgreSQL ---------------------------------------------------------------------------------------------


def _postgres_copy(target: Path) -> tuple[Path, dict[str, int]]:
    target.touch(mode=0o600)
    with transaction.atomic(), connection.cursor() as cursor, _conninfo() as conninfo:
        cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        cursor.execute("SELECT pg_export_snapshot()")
        snapshot = cursor.fetchone()[0]
        rows = _counts(
            sorted(connection.introspection.table_names(cursor)), lambda query: _scalar(cursor, query)
        )
        options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}"]
        command = [_program("pg_dump"), *options, f"--file={target}", f"--dbname={conninfo}"]
        _run(command, "pg_dump cannot read the database")
    return target, rows


COPY_ROWS, END_OF_ROWS = (b"COPY ", b" FROM stdin;\n"), b"\\.\n"
"""How pg_restore's script begins and ends the rows of a table."""


def _postgres_restore(file: Path, rows: Mapping[str, int], files_swap: Callable[[], None]) -> None:
    """Drop the tables, create those of the backup, swap the files: one transaction, so a failure changes nothing.

    The script of pg_restore runs here and not in psql, because psql runs the shell commands of a forged backup.
    """
    command = [_program("pg_restore"), "--no-owner", "--no-privileges", "--file=-", str(file)]
    try:
        with tempfile.TemporaryFile() as errors, transaction.atomic(), connection.cursor() as cursor:
            for table in connection.introspection.table_names(cursor):
                cursor.execute(f"DROP TABLE IF EXISTS {connection.ops.quote_name(table)} CASCADE")
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as program:  # noqa: S603
                _script_run(cast(IO[bytes], program.stdout))
            errors.seek(0)
            _ended(program.returncode, errors.read().decode(), "pg_restore cannot read the backup")
            cursor.execute("RESET search_path")
            _rows_compare(_table_rows(), rows)
            files_swap()
    except DatabaseError as error:
        why = " ".join(str(error).split())[:500]
        raise BackupRefused(f"the database refuses the backup ({why}): nothing was replaced") from None
    finally:
        connection.close()  # The script changes settings of the session.


def _script_run(script: IO[bytes]) -> None:
    """Run pg_restore's SQL, with the rows of each table as a stream."""
    with connection.cursor() as cursor, connection.wrap_database_errors:
        statements = b""
        for line in script:
            if line.startswith(COPY_ROWS[0]) and line.endswith(COPY_ROWS[1]):
                cursor.execute(statements.decode())
                statements = b""
                with cursor.copy(line) as rows:
                    for row in itertools.takewhile(END_OF_ROWS.__ne__, script):
                        rows.write(row)
            elif not line.startswith((b"\\restrict ", b"\\unrestrict ")):  # Of psql, in newer programs.
                statements += line
        cursor.execute(statements.decode())


@contextmanager
def _conninfo() -> Iterator[str]:
    """Connection string for libpq's programs. The password is in a file, because arguments are visible to all users."""
    from psycopg.conninfo import make_conninfo

    known = connection.settings_dict
    facts = {"dbname": known["NAME"], "user": known["USER"], "host": known["HOST"], "port": known["PORT"]}
    facts |= {name: value for name, value in known["OPTIONS"].items() if name.startswith("ssl")}
    with tempfile.NamedTemporaryFile("w") as passfile:
        password = str(known["PASSWORD"]).replace("\\", "\\\\").replace(":", "\\:")
        passfile.write(f"*:*:*:*:{password}\n")
        passfile.flush()
        yield make_conninfo(**{k: v for k, v in facts.items() if v}, passfile=passfile.name)


def _program(name: str) -> str:
    """Path of a PostgreSQL program: on PATH, else Debian's newest. Raises BackupRefused."""
    if found := shutil.which(name):
        return found
    known = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: path.parts[-3])
    if not known:
        raise BackupRefused(f"{name} was not found: install PostgreSQL's client programs (postgresql-client)")
    return str(known[-1])


def _run(command: list[str], fault: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    _ended(done.returncode, done.stderr, fault)


def _ended(code: int, errors: str, fault: str) -> None:
    if code:
        why = " ".join(errors.split())[:500]
        old = "; its programs must be as new as the server" if "version mismatch" in why else ""
        raise BackupRefused(f"{fault}: {why or f'it ended with {code}'}{old}")
