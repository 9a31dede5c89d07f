"""A file of any known format becomes records: recognised, unpacked where it is an archive, read row after row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from feedback.transfer.formats.archives import Member, archive_open
from feedback.transfer.formats.base import Format, OpenFile, refers
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.files import MAX_REFUSED, columns_dropped, rows
from feedback.transfer.formats.order import FORMATS, ORDER, READ_AS
from feedback.transfer.formats.recognition import SAMPLE, format_of
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Record,
    RowRefused,
    RowSkipped,
    prompt_apart,
)


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
        if isinstance(row.value if not isinstance(row, RowRefused) else None, Mapping):
            there.update(row.value)  # type: ignore[union-attr]
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
