"""The first rows of a file before it is imported: what it was recognised as, and what each column is taken for."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from feedback.transfer.formats.archives import Member, archive_open
from feedback.transfer.formats.columns import ColumnMap, is_verdict
from feedback.transfer.formats.files import columns_dropped, rows
from feedback.transfer.formats.readers import Reading, readings
from feedback.transfer.formats.records import FormatRefused, RowRefused

VALUE_LENGTH = 80
"""Characters of a value shown."""


@dataclass(frozen=True)
class ColumnSeen:
    """A column of a file: its first values, what it is taken for."""

    name: str
    samples: tuple[str, ...]
    field: str | None = None
    """The field it is read as, or the kind of verdict (thumb, stars, score); None where the format has names of its own
    for its columns, or nothing is kept of it."""
    ignored: bool = False
    """True if nothing of it is kept."""
    verdict: bool = False
    """True if its name says that it holds a verdict."""


@dataclass(frozen=True)
class FilePreview:
    """One file before it is imported."""

    name: str
    format: str
    """Name of the format; empty where none knows it."""
    title: str
    columns: tuple[ColumnSeen, ...]
    notes: tuple[str, ...] = ()
    """Decisions about the file as a whole, such as the scale of its ratings."""
    problem: str = ""
    """Reason why it cannot be read as it is, and the column map that would cure it."""


def preview(
    path: str | Path, columns: ColumnMap | None = None, demonstration_rows: int = 5
) -> tuple[FilePreview, ...]:
    """Preview of the files at a path; nothing is stored.

    What only a map of columns can cure is a `problem` beside the columns there are. Raises FormatRefused for a
    file whose rows cannot be read.
    """
    try:
        with readings(path, columns=columns) as files:
            left_out = columns.ignored_columns if columns else ()
            return tuple(_preview(file, demonstration_rows, left_out) for file in files)
    except FormatRefused as error:
        with archive_open(Path(path)) as archive:
            return tuple(_unread(member, str(error), demonstration_rows) for member in archive.members)


def _preview(file: Reading, count: int, left_out: Collection[str] = ()) -> FilePreview:
    field_of = file.open_file.field_lookup if file.open_file else None
    seen = tuple(
        ColumnSeen(
            name,
            samples,
            field_of(name) if field_of else None,
            name in left_out or (field_of is not None and field_of(name) is None),
            is_verdict(name),
        )
        for name, samples in _samples(file.path, file.name, count).items()
    )
    return FilePreview(file.name, file.format.name, file.format.title, seen, file.notes)


def _unread(member: Member, problem: str, count: int) -> FilePreview:
    samples = _samples(member.path, member.name, count)
    seen = tuple(ColumnSeen(name, texts, verdict=is_verdict(name)) for name, texts in samples.items())
    return FilePreview(member.name, "", "", seen, problem=problem)


def _samples(path: Path, name: str, count: int) -> dict[str, tuple[str, ...]]:
    """Column -> its values in the first rows, one for each row: empty where a row has none."""
    found: list[dict[str, str]] = []
    with columns_dropped(()):  # what is left out is shown as such
        for row in islice(rows(path, name), count):
            if not isinstance(row, RowRefused) and isinstance(row.value, Mapping):
                found.append({str(column): _text(value) for column, value in row.value.items()})
    columns = dict.fromkeys(column for row in found for column in row)
    return {column: tuple(row.get(column, "") for row in found) for column in columns}


def _text(value: Any) -> str:
    """A value in a line; of a conversation its last turn, which tells one row from the next."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        turn = value[-1].get("content")
        value = turn if isinstance(turn, str) else value
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= VALUE_LENGTH else text[: VALUE_LENGTH - 3] + "..."
