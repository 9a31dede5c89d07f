"""Rows of tables: CSV and TSV as texts with the line each starts on, Parquet as plain values."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, TYPE_CHECKING

from backend import limits
from feedback.transfer.formats.cells import Cell
from feedback.transfer.formats.records import FormatRefused, Row, RowRefused

if TYPE_CHECKING:
    from pyarrow import Array
    from pyarrow.parquet import ParquetFile

# --- CSV and TSV -------------------------------------------------------------------------------------------

MAX_CELL = 16 << 20
"""Longest cell, in characters: a longer one is a quote that was never closed."""

DELIMITERS = ",;\t|"

SAMPLE = 64 << 10
"""Characters looked at to find the delimiter."""

_FORMULA = re.compile(r"'[=+\-@]")
_JSON_TURNS = re.compile(r"\s*\[\s*\{.*\}\s*\]\s*", re.DOTALL)


def table_rows(file: IO[bytes], name: str, delimiter: str | None = None) -> Iterator[Row | RowRefused]:
    """The rows of a table whose first line names its columns; an empty cell is None.

    A row with another number of cells than the header is refused, and the next one read. Raises FormatRefused where
    the header cannot be used, or a cell is longer than MAX_CELL.
    """
    text = _text(file)
    start = text.read(SAMPLE)
    text.seek(0)
    delimiter = delimiter or delimiter_of(start)
    if start.lower().startswith("sep="):
        text.readline()
    # the limit is the whole process's and 128 KiB at first; no other part of the project reads CSV
    csv.field_size_limit(MAX_CELL)
    lines = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        header = _header(next(lines, []), name)
    except csv.Error as error:
        raise FormatRefused(f"{name} line 1: the header cannot be read: {error}") from error
    while True:
        line = lines.line_num + 1
        try:
            cells = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise FormatRefused(
                    f"{name} line {line}: a cell longer than {MAX_CELL >> 20} MiB; a quote that is never closed?"
                ) from error
            yield RowRefused(line, "", f"not CSV: {error}", broken=True)
            continue
        if not cells:
            continue
        if len(cells) != len(header):
            yield RowRefused(
                line,
                "",
                f"expected {len(header)} cells as in the header, found {len(cells)}; a cell that holds the delimiter "
                f"{delimiter!r}, a quote or a line break must stand in quotes",
            )
            continue
        yield Row(line, {column: cell_of(cell) for column, cell in zip(header, cells, strict=True) if column})


def cell_of(text: str) -> object:
    """Value of a cell: None where it is empty, chat turns where it is JSON of them, else its text."""
    if not text.strip():
        return None
    if _FORMULA.match(text):
        text = text[1:]  # spreadsheets are kept from taking it for a formula by the apostrophe
    if _JSON_TURNS.fullmatch(text):
        try:
            turns = json.loads(text)
        except (ValueError, RecursionError):
            turns = []
        if turns and all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns):
            return turns
    return Cell(text)


def _text(file: IO[bytes]) -> IO[str]:
    mark = file.read(2)
    file.seek(0)
    encoding = "utf-16" if mark in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    return io.TextIOWrapper(file, encoding, newline="")


def delimiter_of(start: str) -> str:
    """The delimiter that divides the first lines into the same number of cells, more than one; a comma if none does.

    start: the beginning of a file, of which a last line that is cut off does not count.
    """
    if (declaration := re.match(r"sep=(.)\r?\n", start, re.IGNORECASE)) is not None:
        return declaration[1]
    best, most = ",", (0.0, 0)
    for delimiter in DELIMITERS:
        rows = _sample_rows(start, delimiter)
        if not rows or len(rows[0]) < 2:
            continue
        counts = Counter(len(row) for row in rows)
        score = (counts[len(rows[0])] / len(rows), len(rows[0]))
        if score > most:
            best, most = delimiter, score
    return best


def _sample_rows(start: str, delimiter: str) -> list[list[str]]:
    rows: list[list[str]] = []
    try:
        for cells in csv.reader(io.StringIO(start, newline=""), delimiter=delimiter):
            if cells:
                rows.append(cells)
            if len(rows) == 50:
                break
    except csv.Error:
        pass
    # the last one may be cut off
    return rows[:-1] if len(rows) > 1 and len(start) >= SAMPLE else rows


def _header(cells: Sequence[str], name: str) -> list[str]:
    header = [cell.strip() for cell in cells]
    if not any(header):
        raise FormatRefused(f"{name}: expected a header that names the columns, found an empty line")
    if len(header) > limits.COLUMNS:
        raise FormatRefused(f"{name}: expected at most {limits.COLUMNS} columns, found {len(header)}")
    twice = [column for column, count in Counter(filter(None, header)).items() if count > 1]
    if twice:
        raise FormatRefused(
            f"{name}: expected columns of different names, found {', '.join(twice)} more than once"
        )
    return header


# --- Parquet -----------------------------------------------------------------------------------------------

AT_ONCE = 64
"""Rows decoded together."""

MAX_BATCH = 256 << 20
"""Most bytes those may take."""

MISSING = (
    "a Parquet file needs pyarrow, which is not installed: pip install pyarrow (requirements-rl.txt brings it), "
    "or save the table as CSV"
)


def parquet_rows(file: IO[bytes], name: str) -> Iterator[Row | RowRefused]:
    """The rows of a Parquet file, counted from 1. Raises FormatRefused where it cannot be read."""
    try:
        import pyarrow
    except ImportError as error:
        raise FormatRefused(f"{name}: {MISSING}") from error
    with tempfile.TemporaryDirectory() as folder:
        source: object = file
        if not _on_disk(file):
            # its table of contents stands at the end: a stream that is unpacked cannot be read from there
            source = Path(folder) / "unpacked.parquet"
            with source.open("wb") as whole:
                shutil.copyfileobj(file, whole)
        try:
            table = _opened(source, name)
            if (count := len(table.schema_arrow.names)) > limits.COLUMNS:
                raise FormatRefused(f"{name}: expected at most {limits.COLUMNS} columns, found {count}")
            number = 0
            for batch in table.iter_batches(batch_size=AT_ONCE, use_threads=False):
                weights = [_weight(column) for column in batch.columns]
                values, size = sum(count for count, _ in weights), sum(size for _, size in weights)
                if size > MAX_BATCH or values > limits.ROW_VALUES:
                    raise FormatRefused(
                        f"{name} row {number + 1}: {AT_ONCE} rows take more than {MAX_BATCH >> 20} MiB or have more "
                        f"than {limits.ROW_VALUES:,} values: no feedback"
                    )
                for values in batch.to_pylist():
                    number += 1
                    try:
                        yield Row(number, {key: _plain(value, key) for key, value in values.items()})
                    except ValueError as error:
                        yield RowRefused(number, "", str(error))
        except (pyarrow.ArrowException, OSError) as error:
            raise FormatRefused(f"{name}: the Parquet file cannot be read: {error}") from error


def _opened(source: object, name: str) -> ParquetFile:
    """A Parquet file whose repeated texts stay dictionaries, so that a few bytes do not become gigabytes unseen.

    Raises FormatRefused, before a value is decoded, where a column has more values than are read.
    """
    from pyarrow.parquet import ParquetFile

    metadata = ParquetFile(source).metadata
    repeated: set[str] = set()
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.num_values > limits.PARQUET_VALUES:
                raise FormatRefused(
                    f"{name}: {column.path_in_schema} has {column.num_values:,} values in one row group; expected at "
                    f"most {limits.PARQUET_VALUES:,}: no feedback"
                )
            if column.physical_type == "BYTE_ARRAY" and any("DICTIONARY" in how for how in column.encodings):
                repeated.add(column.path_in_schema)
    return ParquetFile(source, read_dictionary=sorted(repeated))


def _weight(column: Array) -> tuple[int, int]:
    """Number of values that an Arrow array becomes, nested ones counted, and their bytes."""
    from pyarrow import compute, types

    if types.is_dictionary(column.type):
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return len(column), compute.sum(lengths).as_py() or 0
    if types.is_map(column.type):
        parts = [column.keys, column.items]
    elif types.is_nested(column.type):
        inner = column.flatten()
        parts = inner if isinstance(inner, list) else [inner]
    else:
        return len(column), column.nbytes
    weights = [_weight(part) for part in parts]
    return len(column) + sum(count for count, _ in weights), sum(size for _, size in weights)


def _on_disk(file: IO[bytes]) -> bool:
    try:
        file.fileno()
    except OSError:
        return False
    return True


def _plain(value: object, column: str) -> object:
    """A value as JSON would hold it. Raises ValueError for bytes: they are images or sound."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(item, column) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, column) for item in value]
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, tuple):  # an entry of a map
        return [_plain(item, column) for item in value]
    if isinstance(value, bytes):
        raise ValueError(f"{column}: holds bytes (an image, sound or a file); only text can be read")
    return value
