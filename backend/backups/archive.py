"""A backup as a folder: the database, the files of RATCHET_HOME, and a manifest with the SHA-256 of every file.

The copying order makes it consistent while everything runs. Decisions move from the journal to the outbox to the
database, so these are copied in this order: each decision is in at least one of them, and its id makes duplicates
harmless. Rows name files that existed before them, so files are copied after the database.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection, transaction
from django.db.migrations.loader import MigrationLoader

from backend.installation import PROGRAM
from ratchet_client.outbox import SUFFIX

MANIFEST = "manifest.json"
HOME = "home"
REMADE = ("cache", "metrics", "uploads", "serving-exports.log")
"""Left out of a backup, because they are rebuilt."""
OWN = ("upstream_key",)
"""Left out of a backup, because it decrypts the API keys in the database."""
ASIDE = "before-restore-"
"""Prefix of the folder to which an overwriting restore moves existing files."""
BLOCK = 1024 * 1024
SPARE_BYTES = 64 * BLOCK
"""Bytes left free on the backup's disk."""

BytesProgress = Callable[[int, int], None]
"""Called with (bytes done, total bytes)."""


@dataclass
class Manifest:
    """Contents of a backup. Written last: a folder without it is not a backup."""

    ratchet: str
    created_at: str
    database: str
    """File name of the database in the backup."""
    migrations: list[str]
    rows: dict[str, int]
    """Table -> rows at the time of the backup."""
    files: dict[str, list[Any]] = field(default_factory=dict)
    """Path in the backup -> [bytes, SHA-256, mode]."""
    vanished: list[str] = field(default_factory=list)
    """Files deleted during copying, such as old checkpoints."""

    @property
    def bytes(self) -> int:
        return sum(size for size, _, _ in self.files.values())


# --- Backing up ---------------------------------------------------------------------------------------------


def backup(target: Path, told: BytesProgress = lambda done, total: None) -> Manifest:
    """Write a backup to a new or empty folder and verify it, while others write. Raises BackupRefused."""
    home = settings.RATCHET_HOME
    target = target.resolve()
    if target.is_relative_to(home):
        raise BackupRefused(f"expected a folder outside RATCHET_HOME ({home}), found {target}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BackupRefused(f"expected a new or empty folder, found files in {target}: name another folder")
    total = _space_needed(home, target)
    target.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.chmod(0o700)
    manifest = Manifest(
        settings.RATCHET_VERSION,
        datetime.now(UTC).isoformat(timespec="seconds"),
        "",
        migrations_applied(),
        {},
    )
    bytes_done = 0

    def take(paths: Iterator[Path]) -> None:
        nonlocal bytes_done
        for path in paths:
            bytes_done += _take(path, home, target, manifest)
            told(bytes_done, total)

    take(_spool_files(home))
    copy, manifest.rows = database_copy(target)
    manifest.database = copy.name
    manifest.files[copy.name] = [copy.stat().st_size, _sha256(copy), 0o600]
    bytes_done += copy.stat().st_size
    told(bytes_done, total)
    take(_other_files(home))
    draft = target / f"{MANIFEST}.draft"
    draft.write_text(json.dumps(asdict(manifest), indent=1), "utf-8")
    draft.replace(target / MANIFEST)
    verify(target)
    return manifest


def _space_needed(home: Path, target: Path) -> int:
    database = database_file()
    total = sum(path.stat().st_size for path in [*_spool_files(home), *_other_files(home)] if path.exists())
    total += database.stat().st_size if database and database.is_file() else 0
    folder = target
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < total + SPARE_BYTES:
        raise BackupRefused(
            f"expected {(total + SPARE_BYTES) / 1e6:,.0f} MB on the disk of {folder}, found {free / 1e6:,.0f} MB: free "
            "some, or name a folder on another disk"
        )
    return total


def _spool_files(home: Path) -> Iterator[Path]:
    """Journals, then outboxes, in the order in which decisions move."""
    found = (path for path in _walk(home / "spool") if path.suffix == SUFFIX)
    yield from sorted(found, key=lambda path: (not path.stem.startswith("journal"), path))


def _other_files(home: Path) -> Iterator[Path]:
    database = database_file()
    for path in sorted(home.iterdir()) if home.is_dir() else []:
        if (
            path.name in (*REMADE, *OWN, "spool")
            or path.name.startswith(ASIDE)
            or (
                database is not None
                and path.parent == database.parent
                and path.name.startswith(database.name)
            )
        ):
            continue
        yield from _walk(path)


def _walk(path: Path) -> Iterator[Path]:
    """Regular files, without links and half-written files (leading dot)."""
    if path.is_symlink() or path.name.startswith("."):
        return
    if path.is_file():
        yield path
    elif path.is_dir():
        try:
            entries = sorted(path.iterdir())
        except FileNotFoundError:
            return  # A running training deleted an old checkpoint.
        for entry in entries:
            yield from _walk(entry)


def _take(path: Path, home: Path, target: Path, manifest: Manifest) -> int:
    name = f"{HOME}/{path.relative_to(home).as_posix()}"
    to = target / name
    to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        mode = path.stat().st_mode & 0o777
        sqlite_copy(path, to) if path.suffix == SUFFIX else shutil.copyfile(path, to)
    except FileNotFoundError:
        manifest.vanished.append(name)
        return 0
    to.chmod(0o600)
    size = to.stat().st_size
    manifest.files[name] = [size, _sha256(to), mode]
    return size


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Verifying and restoring --------------------------------------------------------------------------------


def verify(source: Path) -> Manifest:
    """Check every file and the database of a backup. Raises BackupRefused."""
    path = source / MANIFEST
    if not path.is_file():
        raise BackupRefused(f"{source} is not a complete backup: expected {MANIFEST} in it")
    try:
        manifest = Manifest(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise BackupRefused(f"{path} cannot be read ({error}): take another backup") from None
    for name, (size, sha256, _) in manifest.files.items():
        file = source / name
        if not file.resolve().is_relative_to(source.resolve()):
            raise BackupRefused(f"{path} names a file outside the backup: {name}")
        if not file.is_file():
            raise BackupRefused(f"{file} is missing: take another backup, or copy this one again")
        if file.stat().st_size != size or _sha256(file) != sha256:
            raise BackupRefused(
                f"{file} is damaged: expected {size:,} bytes with SHA-256 {sha256[:12]}…, found others"
            )
    database_check(source / manifest.database)
    return manifest


def restore(source: Path, *, overwrite: bool = False) -> Manifest:
    """Verify a backup, then restore the database and RATCHET_HOME from it. Raises BackupRefused.

    overwrite: replace existing data. Files, including an SQLite database, are moved to `before-restore-<time>` in the
    data folder; the tables of a PostgreSQL database are dropped.
    """
    manifest = verify(source)
    home: Path = settings.RATCHET_HOME
    if unknown := sorted(set(manifest.migrations) - migration_names()):
        raise BackupRefused(
            f"the backup is from a newer Ratchet ({manifest.ratchet}, with the migration {unknown[0]}); this is "
            f"{settings.RATCHET_VERSION}: restore it with the newer version"
        )
    database = database_file()
    is_new = database is not None and (not database.is_file() or not database.stat().st_size)
    if not overwrite:
        if occupied := _paths_in_use(home):
            raise BackupRefused(
                f"{home} holds {occupied[0].name}: stop the server and add --overwrite to move existing files, or "
                "set RATCHET_HOME to another folder"
            )
        if not is_new and not database_empty():
            raise BackupRefused(
                "the database is not empty: stop the server and add --overwrite to replace it, or set DATABASE_URL "
                "to an empty one"
            )
    aside = home / f"{ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S}"
    moved = [*_paths_in_use(home), *(home / name for name in REMADE if (home / name).exists())]
    if database is not None and database.is_file():
        moved += [path for path in database.parent.glob(f"{database.name}*") if path not in moved]
    if overwrite and (home / "secret_key").exists():  # Without --overwrite, this process has just created it.
        moved.append(home / "secret_key")
    for path in moved:
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(aside / path.name)
    for name, (_, _, mode) in manifest.files.items():
        if name.startswith(f"{HOME}/"):
            to = home / name.removeprefix(f"{HOME}/")
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(source / name, to)
            to.chmod(mode)
    database_restore(source / manifest.database, manifest.rows)
    return manifest


def _paths_in_use(home: Path) -> list[Path]:
    """Files that a restore would replace, without rebuilt ones and those of an earlier restore."""
    database = database_file()
    own = (*REMADE, *OWN, "secret_key")
    return [
        path
        for path in (sorted(home.iterdir()) if home.is_dir() else [])
        if path.name not in own
        and not path.name.startswith(ASIDE)
        and not (database and path.parent == database.parent and path.name.startswith(database.name))
    ]


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


def database_check(file: Path) -> None:
    """Raises BackupRefused if the copy is damaged."""
    if file.name == SQLITE_FILE:
        with closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as copy:
            try:
                found = [row[0] for row in copy.execute("PRAGMA integrity_check")]
            except sqlite3.DatabaseError as error:
                found = [str(error)]
        if found != ["ok"]:
            raise BackupRefused(f"{file} is damaged: {'; '.join(found[:3])}")
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


def database_restore(file: Path, rows: Mapping[str, int]) -> None:
    """Replace the database by a copy and compare the numbers of rows. Raises BackupRefused."""
    kind = "sqlite" if file.name == SQLITE_FILE else "postgresql"
    if kind != connection.vendor:
        raise BackupRefused(
            f"the backup holds a {kind} database, and DATABASE_URL names one of {connection.vendor}: set DATABASE_URL "
            f"to {'sqlite:///path' if kind == 'sqlite' else 'a PostgreSQL database'}"
        )
    if kind == "sqlite":
        _sqlite_restore(file)
    else:
        _postgres_restore(file)
    found = _table_rows()
    differing = [name for name, count in rows.items() if found.get(name) != count]
    if differing:
        name = differing[0]
        raise BackupRefused(
            f"{len(differing)} tables differ from the backup ({name}: {found.get(name)} rows, expected {rows[name]}): "
            "stop every process that writes to this database, and restore again"
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
        tables = [
            row[0]
            for row in copy.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
        ]
        tables = [name for name in tables if not name.startswith("sqlite_")]
        rows = _counts(tables, lambda query: int(copy.execute(query).fetchone()[0]))
    return target, rows


def _sqlite_restore(file: Path) -> None:
    target = database_file()
    if target is None:
        raise BackupRefused("expected a database in a file, found one in memory")
    connection.close()
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.restored")
    shutil.copyfile(file, draft)
    draft.chmod(0o600)
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


def _postgres_restore(file: Path) -> None:
    with connection.cursor() as cursor:
        tables = connection.introspection.table_names(cursor)
        for table in tables:
            cursor.execute(f"DROP TABLE IF EXISTS {connection.ops.quote_name(table)} CASCADE")
    connection.close()
    with _conninfo() as conninfo:
        options = [
            "--no-owner",
            "--no-privileges",
            "--single-transaction",
            "--exit-on-error",
            "--clean",
            "--if-exists",
        ]
        command = [_program("pg_restore"), *options, f"--dbname={conninfo}", str(file)]
        _run(command, "pg_restore cannot write the database")


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
    if done.returncode:
        why = " ".join(done.stderr.split())[:500]
        old = "; its programs must be as new as the server" if "version mismatch" in why else ""
        raise BackupRefused(f"{fault}: {why or f'it ended with {done.returncode}'}{old}")
