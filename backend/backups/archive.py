"""A backup as a folder: the database, the files of RATCHET_HOME, and a manifest with the SHA-256 of every file.

The copying order makes it consistent while everything runs. Decisions move from the journal to the outbox to the
database, so these are copied in this order: each decision is in at least one of them, and its id makes duplicates
harmless. Rows name files that existed before them, so files are copied after the database.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from django.conf import settings
from django.db import connection
from pydantic import TypeAdapter

from backend.backups.databases import (
    DRAFT,
    POSTGRES_FILE,
    SQLITE_FILE,
    BackupRefused,
    database_check,
    database_copy,
    database_empty,
    database_file,
    database_restore,
    migration_names,
    migrations_applied,
    sqlite_copy,
)
from ratchet_client.outbox import SUFFIX

MANIFEST = "manifest.json"
HOME = "home"
REMADE = ("cache", "metrics", "uploads", "serving-exports.log")
"""Left out of a backup, because they are rebuilt."""
OWN = ("upstream_key",)
"""Left out of a backup, because it decrypts the API keys in the database."""
ASIDE = "before-restore-"
"""Prefix of the folder to which an overwriting restore moves existing files."""
MODES = 0o755
"""Permissions that a restore takes from a backup: no setuid, and nobody else writes."""
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
    files: dict[str, tuple[int, str, int]] = field(default_factory=dict)
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
    manifest.files[copy.name] = (copy.stat().st_size, _sha256(copy), 0o600)
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
    manifest.files[name] = (size, _sha256(to), mode)
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
        manifest = TypeAdapter(Manifest).validate_json(path.read_bytes(), strict=True)
    except ValueError as error:
        why = " ".join(str(error).split())[:300]
        raise BackupRefused(f"{path} cannot be read ({why}): take another backup") from None
    if manifest.database not in (SQLITE_FILE, POSTGRES_FILE) or manifest.database not in manifest.files:
        raise BackupRefused(
            f"{path} names the database {manifest.database!r}: expected {SQLITE_FILE} or {POSTGRES_FILE} in the "
            "backup, with its SHA-256 under files. Take another backup"
        )
    for name in manifest.files:
        if name != manifest.database and not _is_backed_up(PurePosixPath(name)):
            raise BackupRefused(
                f"{path} names {name!r}, which `backup` never writes: expected the database and files under "
                f"{HOME}/. Take another backup"
            )
        _file_check(manifest, name, source / name, source.resolve() / name)
    database_check(source / manifest.database, manifest.rows)
    return manifest


def _is_backed_up(name: PurePosixPath) -> bool:
    """True for a path below `home/` that a backup can contain."""
    first, *rest = name.parts or ("",)
    return (
        first == HOME
        and bool(rest)
        and rest[0] not in (*REMADE, *OWN)
        and not rest[0].startswith(ASIDE)
        and not any(part.startswith(".") or "\0" in part for part in rest)
    )


def _file_check(manifest: Manifest, name: str, file: Path, expected: Path) -> None:
    """Raises BackupRefused unless the file is a regular one at the expected place, with the recorded SHA-256."""
    size, sha256, _ = manifest.files[name]
    if file.resolve() != expected:
        raise BackupRefused(f"{file} is a link or lies behind one: expected a regular file at {expected}")
    if not file.is_file():
        raise BackupRefused(f"{file} is missing: take another backup, or copy this one again")
    if file.stat().st_size != size or _sha256(file) != sha256:
        raise BackupRefused(
            f"{file} is damaged: expected {size:,} bytes with SHA-256 {sha256[:12]}…, found others"
        )


def restore(source: Path, *, overwrite: bool = False) -> Manifest:
    """Verify a backup, then restore the database and RATCHET_HOME from it. Raises BackupRefused.

    overwrite: replace existing data. Files, including an SQLite database, are moved to `before-restore-<time>` in the
    data folder; the tables of a PostgreSQL database are replaced in one transaction. All files are copied and checked
    before the first one is replaced.
    """
    manifest = verify(source)
    home: Path = settings.RATCHET_HOME
    _restorable(manifest, home, overwrite=overwrite)
    draft = home / DRAFT
    if draft.is_dir() and not draft.is_symlink():  # An interrupted restore left it.
        shutil.rmtree(draft)
    draft.mkdir(mode=0o700, parents=True)
    try:
        for name, (_, _, mode) in manifest.files.items():
            to = draft / name
            to.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.copyfile(source / name, to)
            to.chmod(mode & MODES)
            _file_check(manifest, name, to, draft.resolve() / name)
        database_restore(
            draft / manifest.database, manifest.rows, lambda: _files_swap(draft, home, overwrite)
        )
    finally:
        shutil.rmtree(draft)
    return manifest


def _restorable(manifest: Manifest, home: Path, *, overwrite: bool) -> None:
    """Raises BackupRefused if this program or this database cannot take the backup, or data would be replaced."""
    if unknown := sorted(set(manifest.migrations) - migration_names()):
        raise BackupRefused(
            f"the backup is from a newer Ratchet ({manifest.ratchet}, with the migration {unknown[0]}); this is "
            f"{settings.RATCHET_VERSION}: restore it with the newer version"
        )
    kind = "sqlite" if manifest.database == SQLITE_FILE else "postgresql"
    if kind != connection.vendor:
        raise BackupRefused(
            f"the backup holds a {kind} database, and DATABASE_URL names one of {connection.vendor}: set DATABASE_URL "
            f"to {'sqlite:///path' if kind == 'sqlite' else 'a PostgreSQL database'}"
        )
    if overwrite:
        return
    if occupied := _paths_in_use(home):
        raise BackupRefused(
            f"{home} holds {occupied[0].name}: stop the server and add --overwrite to move existing files, or "
            "set RATCHET_HOME to another folder"
        )
    database = database_file()
    is_new = database is not None and (not database.is_file() or not database.stat().st_size)
    if not is_new and not database_empty():
        raise BackupRefused(
            "the database is not empty: stop the server and add --overwrite to replace it, or set DATABASE_URL "
            "to an empty one"
        )


def _files_swap(draft: Path, home: Path, overwrite: bool) -> None:
    """Move existing files aside and the restored ones into their place."""
    database = database_file()
    aside = home / f"{ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S}"
    moved = [*_paths_in_use(home), *(home / name for name in REMADE if (home / name).exists())]
    if database is not None and database.is_file():
        moved += [path for path in database.parent.glob(f"{database.name}*") if path not in moved]
    if overwrite and (home / "secret_key").exists():  # Without --overwrite, this process has just created it.
        moved.append(home / "secret_key")
    for path in moved:
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.rename(aside / path.name)
    for path in (draft / HOME).iterdir() if (draft / HOME).is_dir() else ():
        path.replace(home / path.name)


def _paths_in_use(home: Path) -> list[Path]:
    """Files that a restore would replace, without rebuilt ones and those of an earlier restore."""
    database = database_file()
    own = (*REMADE, *OWN, "secret_key")
    return [
        path
        for path in (sorted(home.iterdir()) if home.is_dir() else [])
        if path.name not in own
        and not path.name.startswith((ASIDE, DRAFT))
        and not (database and path.parent == database.parent and path.name.startswith(database.name))
    ]
