"""The first rows of a file before it is imported: what it was recognised as, and what each column is taken for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from feedback.formats.columns import ColumnMap
from feedback.formats.files import rows
from feedback.formats.reading import readings
from feedback.formats.records import RowRefused

SHOWN = 80
"""Characters of a value shown."""


@dataclass(frozen=True)
class ColumnSeen:
    """A column of a file: its first values, what it is taken for."""

    name: str
    samples: tuple[str, ...]
    field: str | None = None
    """The field of ColumnMap it is read as; None where the format reads it its own way or does not read it."""
    ignored: bool = False
    """Whether nothing of it is kept."""
    verdict: bool = False
    """Whether its name says that it holds a verdict."""


@dataclass(frozen=True)
class Preview:
    """One file before it is imported."""

    name: str
    format: str
    title: str
    columns: tuple[ColumnSeen, ...]
    notes: tuple[str, ...] = ()
    """Which scale the ratings have, and whatever else was decided for the file as a whole."""
    problem: str = ""
    """Why it cannot be read as it is, and which map would cure it."""


def preview(path: str | Path, columns: ColumnMap | None = None, rows_shown: int = 5) -> tuple[Preview, ...]:
    """What each file at a path would be read as; nothing is stored. Raises FormatRefused as `readings`."""
    with readings(path, columns=columns) as files:
        return tuple(
            Preview(
                file.name, file.format.name, file.format.title, _columns(file.path, rows_shown), file.notes
            )
            for file in files
        )


def _columns(path: Path, count: int) -> tuple[ColumnSeen, ...]:
    seen: dict[str, list[str]] = {}
    for row in islice(rows(path), count):
        if isinstance(row, RowRefused) or not isinstance(row.value, Mapping):
            continue
        for name, value in row.value.items():
            seen.setdefault(str(name), []).append(_text(value))
    return tuple(ColumnSeen(name, tuple(samples)) for name, samples in seen.items())


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
