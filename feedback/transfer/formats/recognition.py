"""Recognition of a file's format: the sampled rows vote, asked for the most specific format first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from feedback.transfer.formats import llamafactory, table
from feedback.transfer.formats.base import Format
from feedback.transfer.formats.columns import ColumnMap, map_guessed
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.order import ORDER
from feedback.transfer.formats.records import FormatRefused, RowRefused

SAMPLE = 1000
"""Rows looked at to recognise a format."""


def format_of_row(row: Mapping[str, object]) -> Format | None:
    """The first format in ORDER that knows a row; None where none does."""
    return next((format for format in ORDER if format.recognises(row)), None)


def format_of(path: Path, name: str = "", columns: ColumnMap | None = None) -> Format:
    """The format a file is of: the one that knows most of its rows, the more specific one of two that know as many.

    columns: where any is mapped, the file is a table. Raises FormatRefused where it cannot be read or is
    of no format.
    """
    name = name or str(path)
    if columns:
        return table.TABLE
    if llamafactory.names_file(path):
        return llamafactory.LLAMAFACTORY
    votes: Counter[str] = Counter()
    first_keys: list[str] = []
    number = -1
    for number, row in enumerate(rows(path, name)):
        if number == SAMPLE:
            break
        if isinstance(row, RowRefused) or not isinstance(row.value, Mapping):
            continue
        if (known := format_of_row(row.value)) is not None:
            votes[known.name] += 1
        else:
            first_keys = first_keys or [str(key)[:40] for key in list(row.value)[:12]]
    if votes:
        return max(ORDER, key=lambda format: votes[format.name])
    if number < 0:
        raise FormatRefused(f"{name}: expected rows below the header, or in the list, found none")
    found = f"found rows with {', '.join(first_keys)}" if first_keys else "found no row that is an object"
    raise FormatRefused(
        f"{name}: of no known format: {found}. Say which column holds what, as in {map_guessed(first_keys)}, "
        "or what wrote the file, with --format NAME; docs/formats.md shows the columns and the names of every format"
    )
