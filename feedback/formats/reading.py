"""A file of any known format becomes records: recognised, unpacked where it is an archive, read row after row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from feedback.formats import llamafactory
from feedback.formats.base import Format, refers
from feedback.formats.columns import ColumnMap
from feedback.formats.files import rows
from feedback.formats.order import ORDER
from feedback.formats.records import FormatRefused, Record, RowRefused, RowSkipped
from feedback.formats.writing import Shape

FORMATS: dict[str, Format] = {format.name: format for format in ORDER}

SHAPES: dict[str, Shape] = {shape.name: shape for format in ORDER for shape in format.shapes}
"""Every kind of file that can be written."""

_READ_AS: dict[str, Format] = {shape.name: format for format in ORDER for shape in format.shapes} | FORMATS
"""What was written under a name is read under it, too."""

SAMPLE = 20
"""Rows looked at to recognise a format."""


@dataclass(frozen=True)
class Reading:
    """One file, recognised and ready to be read, as often as one likes while it is open."""

    name: str
    """What reports call it: its path; of a member of an archive `feedback.zip/ratings.csv`."""
    path: Path
    """Where it lies; of a member of an archive a temporary place."""
    format: Format
    ratings_path: Path | None = None
    columns: ColumnMap | None = None
    notes: tuple[str, ...] = ()
    """What was decided about the file as a whole (which scale its ratings have), as sentences for the report."""

    def records(self) -> Iterator[Record]:
        """What the file says, row after row: decisions, comparisons, ratings, and rows refused or skipped."""
        return self.format.read(self.path, self.ratings_path)


@contextmanager
def readings(
    path: str | Path,
    format: str = "auto",
    ratings_path: str | Path | None = None,
    columns: ColumnMap | None = None,
) -> Iterator[tuple[Reading, ...]]:
    """The files to read at a path, while the block lasts: one, or the readable members of an archive.

    format: a name in FORMATS or SHAPES, or "auto" to recognise each. ratings_path: the second file, of formats that
    have two. columns: which column holds what, for tables and plain rows. Raises FormatRefused.
    """
    path = Path(path)
    chosen = named(detect(path, columns) if format == "auto" else format)
    if ratings_path is not None and not chosen.two_files:
        two = ", ".join(f.name for f in FORMATS.values() if f.two_files)
        raise FormatRefused(
            f"{path}: format {chosen.name} keeps ratings in the same file; a ratings file goes with {two}"
        )
    yield (Reading(str(path), path, chosen, None if ratings_path is None else Path(ratings_path), columns),)


def detect(path: str | Path, columns: ColumnMap | None = None) -> str:
    """The name of the format a file is of. Raises FormatRefused where it cannot be read or no format knows it."""
    path = Path(path)
    if llamafactory.names_file(path):
        return llamafactory.FORMAT.name
    seen: list[str] = []
    for number, row in enumerate(rows(path)):
        if number == SAMPLE:
            break
        if isinstance(row, RowRefused) or not isinstance(row.value, Mapping):
            continue
        for format in ORDER:
            if format.recognises(row.value):
                return format.name
        seen = seen or [str(key)[:40] for key in list(row.value)[:12]]
    found = f"found rows with {', '.join(seen)}" if seen else "found no row that is a JSON object"
    raise FormatRefused(
        f"{path}: of no known format: {found}. Say which with --format {'|'.join(FORMATS)}; docs/formats.md shows each"
    )


def named(name: str) -> Format:
    """The format that reads files of this name, of a format or of one of its shapes. Raises FormatRefused."""
    if name not in _READ_AS:
        raise FormatRefused(f"no format {name!r}; there are auto, {', '.join(FORMATS)}")
    return _READ_AS[name]


def read(
    path: str | Path,
    format: str = "auto",
    ratings_path: str | Path | None = None,
    columns: ColumnMap | None = None,
) -> Iterator[Record]:
    """What a file says, row after row: decisions, comparisons, ratings, and rows refused or skipped.

    As `readings`, all members of an archive after each other. Raises FormatRefused for a file that cannot be read at
    all, at once; a row that cannot is a RowRefused among the others.
    """
    opened = readings(path, format, ratings_path, columns)
    files = opened.__enter__()

    def records() -> Iterator[Record]:
        try:
            for file in files:
                yield from file.records()
        finally:
            opened.__exit__(None, None, None)

    return records()


def decisions_before_feedback(paths: Sequence[str | Path]) -> list[str | Path]:
    """Files in the order to import them: those that only speak of decisions elsewhere after all others."""

    def only_refers(path: str | Path) -> bool:
        try:
            said = (record for record in read(path) if not isinstance(record, (RowRefused, RowSkipped)))
            return (first := next(said, None)) is not None and refers(first)
        except FormatRefused:
            return False  # importing it says why

    return sorted(paths, key=only_refers) if len(paths) > 1 else list(paths)
