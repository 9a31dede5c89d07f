"""Snapshot files: written whole, named by their hash, never changed, checked whenever they are read."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from django.conf import settings
from django.db import transaction

from rl import artifacts
from rl.datasets.feedback_types import Row
from rl.models import Snapshot


class DatasetRefused(ValueError):
    """The dataset cannot be made or read."""

    code = "invalid"


class DatasetTooSmall(DatasetRefused):
    """There are fewer rows than required."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(f"{reason}: {next_step}")
        self.reason, self.next_step = reason, next_step


@contextmanager
def temporary_file(folder: Path) -> Iterator[IO[bytes]]:
    """A new file in the folder, deleted unless it was renamed. Raises DatasetRefused if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", suffix=".jsonl", delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise DatasetRefused(
            f"the snapshot cannot be written to {folder}: {error.strerror or error}. Nothing was kept; free some "
            "space, make the folder writable, or set RATCHET_HOME to another folder"
        ) from error


def rows_write(file: IO[bytes], rows: Iterable[Row]) -> str:
    """Write and fsync JSON lines; returns their SHA-256."""
    digest = hashlib.sha256()
    for row in rows:
        line = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        digest.update(line)
        file.write(line)
    file.flush()
    os.fsync(file.fileno())
    return digest.hexdigest()


def file_store(file: IO[bytes], sha256: str) -> Path:
    """Rename a written file to its hash, read-only, and store it; replaces an equal file."""
    path = Path(file.name).with_name(f"{sha256[:16]}.jsonl")
    os.fchmod(file.fileno(), 0o444)
    Path(file.name).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # Makes the rename survive a power cut.
    finally:
        os.close(folder)
    artifacts.put(path)
    return path


def snapshot_of(**facts: object) -> Snapshot:
    """The Snapshot of a file: the existing one with equal content, or a new one."""
    same = {name: facts[name] for name in ("agent", "kind", "sha256")}
    with transaction.atomic():
        return Snapshot.objects.filter(**same).order_by("id").first() or Snapshot.objects.create(**facts)


def snapshot_rows(snapshot: Snapshot, split: str | None = None) -> Iterator[Row]:
    """The rows of one split or of all. Raises DatasetRefused before the first row if the file is gone or changed."""
    path: Path = settings.RATCHET_HOME / snapshot.path
    try:
        artifacts.fetch(snapshot.path)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != snapshot.sha256:
                raise DatasetRefused(
                    f"the file of snapshot {snapshot.pk} was changed: {path} has SHA-256 {found[:16]}..., expected "
                    f"{snapshot.sha256[:16]}...; restore it from a backup, or prepare a new dataset"
                )
            file.seek(0)
            for line in file:
                row = json.loads(line)
                if split is None or row["split"] == split:
                    yield row
    except OSError as error:
        raise DatasetRefused(
            f"the file of snapshot {snapshot.pk} cannot be read: {path}: {error.strerror or error}; "
            "restore it from a backup, or prepare a new dataset"
        ) from error
