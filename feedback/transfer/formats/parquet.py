"""Rows of Parquet as plain values: times as ISO texts, missing and NaN as None."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

from backend import limits
from feedback.transfer.formats.records import FormatRefused, Row, RowRefused

AT_ONCE = 64
"""Rows decoded together."""

MAX_BATCH = 256 << 20
"""Most bytes those may take."""

MAX_COLUMNS = limits.COLUMNS

MISSING = (
    "a Parquet file needs pyarrow, which is not installed: pip install pyarrow (requirements-rl.txt brings it), "
    "or save the table as CSV"
)


def parquet_rows(file: IO[bytes], name: str) -> Iterator[Row | RowRefused]:
    """The rows of a Parquet file, counted from 1. Raises FormatRefused where it cannot be read."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise FormatRefused(f"{name}: {MISSING}") from error
    with tempfile.TemporaryDirectory() as folder:
        source: Any = file
        if not _on_disk(file):
            # its table of contents stands at the end: a stream that is unpacked cannot be read from there
            source = Path(folder) / "unpacked.parquet"
            with source.open("wb") as whole:
                shutil.copyfileobj(file, whole)
        try:
            table = pyarrow.parquet.ParquetFile(source)
            if len(table.schema_arrow.names) > MAX_COLUMNS:
                raise FormatRefused(
                    f"{name}: expected at most {MAX_COLUMNS} columns, found {len(table.schema_arrow.names)}"
                )
            number = 0
            for batch in table.iter_batches(batch_size=AT_ONCE, use_threads=False):
                if batch.nbytes > MAX_BATCH:
                    raise FormatRefused(
                        f"{name} row {number + 1}: {AT_ONCE} rows take more than {MAX_BATCH >> 20} MiB: no feedback"
                    )
                for values in batch.to_pylist():
                    number += 1
                    try:
                        yield Row(number, {key: _plain(value, key) for key, value in values.items()})
                    except ValueError as error:
                        yield RowRefused(number, "", str(error))
        except (pyarrow.ArrowException, OSError) as error:
            raise FormatRefused(f"{name}: the Parquet file cannot be read: {error}") from error


def _on_disk(file: IO[bytes]) -> bool:
    try:
        file.fileno()
    except OSError:
        return False
    return True


def _plain(value: Any, column: str) -> Any:
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
