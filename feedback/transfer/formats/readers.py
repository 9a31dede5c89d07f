"""A file of any known format becomes records: recognised, unpacked where it is an archive, read, or shown in parts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from feedback.transfer.formats import llamafactory, table
from feedback.transfer.formats.base import Format, OpenFile, refers
from feedback.transfer.formats.columns import ColumnMap, is_verdict, map_guessed
from feedback.transfer.formats.compression import Member, archive_open
from feedback.transfer.formats.files import MAX_REFUSED, columns_dropped, rows
from feedback.transfer.formats.order import FORMATS, ORDER, READ_AS
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Record,
    RowRefused,
    RowSkipped,
    prompt_apart,
)

# --- Reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """One file, recognised and ready to be read, as often as one likes while it is open."""

    name: str
    """Name in reports: its path; of a member of an archive `feedback.zip/ratings.csv`."""
    path: Path
    """Path of the file; of a member of an archive a temporary one."""
    format: Format
    ratings_path: Path | None = None
    notes: tuple[str, ...] = ()
    """Decisions about the file as a whole (such as the scale of its ratings), as sentences for the report."""
    open_file: OpenFile | None = None

    def records(self) -> Iterator[Record]:
        """Records of the file, row after row: decisions, comparisons, ratings, and rows refused or skipped.

        Raises FormatRefused where reading cannot go on, or nearly all of very many rows are refused.
        """
        refused = 0
        try:
            found = (
                self.open_file.records() if self.open_file else self.format.read(self.path, self.ratings_path)
            )
            for number, record in enumerate(found, 1):
                if isinstance(record, RowRefused):
                    refused += 1
                    if refused > MAX_REFUSED and refused * 2 > number:
                        raise FormatRefused(
                            f"{self.path}: given up after {refused:,} refused rows of {number:,}, the last one line "
                            f"{record.line}: {record.reason}. Is it a file of {self.format.title}? Say another --format"
                        )
                yield record if self.format.name == "ratchet" else _extras_apart(record)
        except FormatRefused as error:
            # what lies in a temporary place is called as the user knows it
            raise FormatRefused(str(error).replace(str(self.path), self.name)) from error


def _extras_apart(record: Record) -> Record:
    """Move keys of prompt messages that carry no content, such as ids and times, to the metadata."""
    if isinstance(record, ImportedDecision):
        return _prompt_bare(record)
    if isinstance(record, ImportedComparison):
        left = _prompt_bare(record.left) if isinstance(record.left, ImportedDecision) else record.left
        right = _prompt_bare(record.right) if isinstance(record.right, ImportedDecision) else record.right
        if left is not record.left or right is not record.right:
            return replace(record, left=left, right=right)
    return record


def _prompt_bare(decision: ImportedDecision) -> ImportedDecision:
    messages, kept = prompt_apart(decision.messages)
    return replace(decision, messages=messages, metadata={**decision.metadata, **kept}) if kept else decision


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
    named_format = None if format == "auto" else format_by_name(format)
    dropped_columns = columns.ignored_columns if columns and columns.only_ignores else ()
    with archive_open(path) as archive:
        files = [_reading(member, named_format, columns) for member in archive.members]
        if archive.left_out:
            note = (
                f"left out of the archive, being neither JSON nor a table: {', '.join(archive.left_out[:20])}"
            )
            files[0] = replace(files[0], notes=(*files[0].notes, note))
        if ratings_path is not None:
            files = [_with_ratings(file, Path(ratings_path)) for file in files]
        else:
            with columns_dropped(dropped_columns):
                files = _reading_order(files)
        with columns_dropped(dropped_columns):
            yield tuple(files)


def _reading(member: Member, asked: Format | None, columns: ColumnMap | None) -> Reading:
    ignored = columns.ignored_columns if columns and columns.only_ignores else ()
    if ignored:
        with columns_dropped(ignored):
            chosen = asked or format_of(member.path, member.name)
        if chosen.open_file is None:
            _check_columns(member, ignored)
            return _read_one(member, chosen, (f"left out: {', '.join(ignored)}",))
    chosen = asked or format_of(member.path, member.name, columns)
    if columns and chosen.open_file is None:
        with_map = ", ".join(format.name for format in ORDER if format.open_file is not None)
        raise FormatRefused(
            f"{member.name}: format {chosen.name} has columns of fixed names; a map goes with --format {with_map}"
        )
    try:
        opened = chosen.open_file(member.path, columns) if chosen.open_file else None
    except FormatRefused as error:
        raise FormatRefused(str(error).replace(str(member.path), member.name)) from error
    return _read_one(member, chosen, opened.notes if opened else (), opened)


def _read_one(
    member: Member, chosen: Format, notes: tuple[str, ...], opened: OpenFile | None = None
) -> Reading:
    if chosen.untested_parts:
        notes = (*notes, f"{chosen.name}: {chosen.untested_parts}")
    return Reading(member.name, member.path, chosen, notes=notes, open_file=opened)


def _check_columns(member: Member, ignored: Sequence[str]) -> None:
    """Raises FormatRefused for a column that none of the first rows has."""
    there: set[str] = set()
    for row in islice(rows(member.path, member.name), SAMPLE):
        if not isinstance(row, RowRefused) and isinstance(row.value, Mapping):
            there.update(row.value)
        if there.issuperset(ignored):
            return
    missing = next(name for name in ignored if name not in there)
    raise FormatRefused(
        f"{member.name}: --map ignore={missing}: no row has a column {missing!r}; there are "
        f"{', '.join(sorted(map(str, there))[:30]) or 'none'}"
    )


def _with_ratings(file: Reading, ratings_path: Path) -> Reading:
    if not file.format.two_files:
        two = ", ".join(f.name for f in ORDER if f.two_files)
        raise FormatRefused(
            f"{file.name}: format {file.format.name} keeps ratings in the same file; a ratings file goes with {two}"
        )
    return replace(file, ratings_path=ratings_path)


def _reading_order(files: Sequence[Reading]) -> list[Reading]:
    """Files in the order they are read in: what others refer to first; two that belong together as one."""
    if len(files) == 1:
        return list(files)
    late = {file.name for file in files if _refers(file)}
    found = [file for file in files if file.name not in late] + [file for file in files if file.name in late]
    for format in {file.format.name: file.format for file in files}.values():
        same = [file for file in found if file.format is format]
        if format.two_files and len(same) == 2 and same[0].name not in late:
            first, second = same
            found[found.index(first)] = replace(first, ratings_path=second.path)
            found.remove(second)
    return found


def _refers(file: Reading) -> bool:
    """True if a file speaks of decisions that stand elsewhere: its first record does, or its rows are
    ratings."""
    for row in islice(rows(file.path, file.name), 100):
        if not isinstance(row, RowRefused) and isinstance(row.value, Mapping):
            if file.format.ratings_row(row.value):
                return True
            break
    some = (record for record in file.records() if not isinstance(record, (RowRefused, RowSkipped)))
    return (first := next(some, None)) is not None and refers(first)


def detect(path: str | Path, columns: ColumnMap | None = None) -> str:
    """The name of the format a file is of, of an archive that of its first file.

    Raises FormatRefused where it cannot be read or no format knows it.
    """
    with archive_open(Path(path)) as archive:
        return format_of(archive.members[0].path, archive.members[0].name, columns).name


def format_by_name(name: str) -> Format:
    """The format that reads files of this name, of a format or of one of its shapes. Raises FormatRefused."""
    if name not in READ_AS:
        raise FormatRefused(f"no format {name!r}; there are auto, {', '.join(FORMATS)}")
    return READ_AS[name]


def read(
    path: str | Path,
    format: str = "auto",
    ratings_path: str | Path | None = None,
    columns: ColumnMap | None = None,
) -> Iterator[Record]:
    """Records of a file, row after row: decisions, comparisons, ratings, and rows refused or skipped.

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

    def refers_to_decisions(path: str | Path) -> bool:
        try:
            with readings(path) as files:
                return all(_refers(file) for file in files)
        except FormatRefused:
            return False  # importing it says why

    return sorted(paths, key=refers_to_decisions) if len(paths) > 1 else list(paths)


# --- Recognition: the sampled rows vote, asked for the most specific format first --------------------------

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


# --- Previews ----------------------------------------------------------------------------------------------

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


def _text(value: object) -> str:
    """A value in a line; of a conversation its last turn, which tells one row from the next."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        turn = value[-1].get("content")
        value = turn if isinstance(turn, str) else value
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= VALUE_LENGTH else text[: VALUE_LENGTH - 3] + "..."
