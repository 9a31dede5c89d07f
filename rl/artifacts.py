"""The artefact store: files of policies, snapshots and reward models for every server, by their SHA-256.

`ARTIFACT_STORE` names a folder or an S3-compatible bucket. Without it RATCHET_HOME is the only place. With it
RATCHET_HOME is this node's cache: whoever makes a file puts it into the store and notes its path and sum in the
database, and a node that needs the file fetches it and compares the sum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

from django.conf import settings
from django.core.files import File
from django.core.files.storage import Storage, storages
from django.db import connections, transaction
from django.db.models import Q, QuerySet

from rl.checksums import file_sum
from rl.models import Artifact, Policy, RewardModelVersion, Snapshot, StoredFile

logger = logging.getLogger("rl.artifacts")

WAIT_S = 10.0
"""Seconds that a request waits for a file; the transfer goes on afterwards."""
STALE_S = 3600.0
"""Age in seconds at which the half of a file belongs to no transfer any more."""
CARD = "README.md"
"""Not stored: its figures change after the folder is made."""

_transfers: dict[str, threading.Thread] = {}
_guard = threading.Lock()


class StoreFailed(OSError):
    """The store cannot be reached, or gave another file than was put there."""


def store() -> Storage | None:
    """The store of ARTIFACT_STORE; None without one."""
    return storages["artifacts"] if "artifacts" in settings.STORAGES else None


def stored(*paths: str | Path) -> QuerySet[StoredFile]:
    """Stored files at these paths, and those of folders at them."""
    wanted = Q(pk=None)
    for name in filter(None, map(_name, paths)):
        wanted |= Q(path=name) | Q(path__startswith=f"{name}/")
    return StoredFile.objects.filter(wanted).order_by("pk")


def put(path: str | Path) -> None:
    """Put a file, or each file of a folder, into the store. Without a store, and outside RATCHET_HOME, does nothing.

    Raises StoreFailed.
    """
    storage, name = store(), _name(path)
    if storage is None or not name:
        return
    whole = settings.RATCHET_HOME / name
    for file in sorted(whole.rglob("*")) if whole.is_dir() else [whole]:
        if file.is_file() and file.name != CARD and not file.name.startswith("."):
            _put(storage, file)


def put_all() -> int:
    """Put every file here that a row names into the store; returns the number of stored files. Raises StoreFailed."""
    columns = ((Policy, "adapter_path"), (Artifact, "path"), (Snapshot, "path"), (RewardModelVersion, "path"))
    for model, column in columns:
        for path in model._default_manager.exclude(**{column: ""}).values_list(column, flat=True):
            put(path)
    put("exports/bases")
    return StoredFile.objects.count()


def fetch(path: str | Path) -> None:
    """Bring a stored file, or the files of a stored folder, here where they are missing or differ.

    Raises StoreFailed.
    """
    if (storage := store()) is not None:
        for row in stored(path):
            _fetch(storage, row)


def fetch_wait(paths: Iterable[str | Path], wait_s: float) -> bool:
    """Start to fetch what is stored at these paths and wait for it; False if nothing is stored there."""
    rows = list(stored(*paths))
    transfers = [_transfer(row) for row in rows]
    for thread in transfers:
        thread.join(wait_s / len(transfers))
    return bool(rows)


def forget(path: str | Path) -> None:
    """Remove a file, or the files of a folder, from the store; other nodes remove their copies at `sweep`."""
    storage = store()
    rows = list(stored(path)) if storage is not None else []
    for row in rows:
        row.delete()
    for sha256 in {row.sha256 for row in rows}:
        transaction.on_commit(partial(_blob_drop, sha256))


def sweep() -> None:
    """Remove this node's copies of files that are in the store no longer, and what broken transfers left."""
    for half in _notes().glob("*.half"):
        with suppress(FileNotFoundError):  # another process removes it too
            if time.time() - half.stat().st_mtime > STALE_S:
                half.unlink()
    for note in sorted(_notes().glob("*.json")):
        with suppress(FileNotFoundError):
            fetched = json.loads(note.read_text("utf-8"))
            if StoredFile.objects.filter(**fetched).exists():
                continue
            copy = settings.RATCHET_HOME / fetched["path"]
            if copy.is_file() and file_sum(copy) == fetched["sha256"]:
                copy.unlink()
            note.unlink()


def _name(path: str | Path) -> str:
    """A path relative to RATCHET_HOME; "" for one outside, and for RATCHET_HOME itself."""
    home = settings.RATCHET_HOME.resolve()
    whole = (home / path).resolve()
    return str(whole.relative_to(home)) if whole.is_relative_to(home) and whole != home else ""


def _blob(sha256: str) -> str:
    return f"{sha256[:2]}/{sha256}"


def _notes() -> Path:
    """Folder with a note of each file that was fetched here, and the halves of those under way."""
    folder: Path = settings.RATCHET_HOME / "cache" / "fetched"
    return folder


def _put(storage: Storage, file: Path) -> None:
    name, sha256 = _name(file), file_sum(file)
    try:
        blob, size = _blob(sha256), file.stat().st_size
        if storage.exists(blob) and storage.size(blob) != size:
            storage.delete(blob)  # a crash or a full disk broke it off
        if not storage.exists(blob):
            with file.open("rb") as content:
                storage.save(blob, File(content))
    except Exception as error:  # each kind of store has its own
        raise StoreFailed(f"{name} cannot be put into the artefact store: {error}") from error
    before = StoredFile.objects.filter(path=name).values_list("sha256", flat=True).first()
    StoredFile.objects.update_or_create(path=name, defaults={"sha256": sha256, "bytes": size})
    if before and before != sha256:
        transaction.on_commit(partial(_blob_drop, before))


def _blob_drop(sha256: str) -> None:
    storage = store()
    if storage is None or StoredFile.objects.filter(sha256=sha256).exists():
        return
    try:
        storage.delete(_blob(sha256))
    except Exception:  # each kind of store has its own
        logger.exception("%s could not be removed from the artefact store; remove it by hand", _blob(sha256))


def _fetch(storage: Storage, row: StoredFile) -> None:
    target: Path = settings.RATCHET_HOME / row.path
    if not _name(row.path):
        raise StoreFailed(f"{row.path} is outside the data folder")
    if target.is_file() and file_sum(target) == row.sha256:
        return
    fetched = json.dumps({"path": row.path, "sha256": row.sha256})
    note = _notes() / f"{hashlib.sha256(fetched.encode()).hexdigest()}.json"
    half = note.with_suffix(f".{os.getpid()}.{threading.get_ident()}.half")
    digest = hashlib.sha256()
    try:
        for folder in (target.parent, _notes()):
            folder.mkdir(parents=True, exist_ok=True)
        half.write_text(fetched, "utf-8")
        half.replace(note)
        with storage.open(_blob(row.sha256)) as content, half.open("wb") as file:
            for chunk in content.chunks():
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != row.sha256:
            found = digest.hexdigest()
            raise StoreFailed(
                f"has SHA-256 {found[:16]}..., expected {row.sha256[:16]}...: put it there again"
            )
        half.replace(target)
    except Exception as error:  # each kind of store has its own
        raise StoreFailed(f"{row.path} cannot be fetched from the artefact store: {error}") from error
    finally:
        half.unlink(missing_ok=True)
    logger.info("%s was fetched, %.1f MB", row.path, row.bytes / 1e6)


def _transfer(row: StoredFile) -> threading.Thread:
    """The thread that fetches a file; one per file and process."""

    def fetch_logged() -> None:
        try:
            if (storage := store()) is not None:
                _fetch(storage, row)
        except StoreFailed as failure:
            logger.error("%s", failure)
        finally:
            connections.close_all()
            with _guard:
                _transfers.pop(row.path, None)

    with _guard:
        thread = _transfers.get(row.path)
        if thread is None:
            thread = _transfers[row.path] = threading.Thread(
                target=fetch_logged, name="ratchet-fetch", daemon=True
            )
            thread.start()
        return thread
