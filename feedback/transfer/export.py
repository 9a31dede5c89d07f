"""Export of all feedback in one of the formats: as a stream, or as a file that is whole or not there."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO

import orjson

from feedback.storage.problem_rows import RowReader, unreadable_summary
from feedback.transfer import formats
from feedback.transfer.export_views import BEYOND_LIMIT, Selection, one_moment, records
from feedback.transfer.formats.writers import Line, LineWritten, RowShape, View

PIECE = 1 << 16
"""Bytes after which a piece of a stream is sent on."""


class FeedbackExportRefused(ValueError):
    """An export that cannot be written; the message says what was found and what to do."""


@dataclass
class ExportReport:
    """Report of an export: what was written, and what was not."""

    format: str
    samples: int = 0
    """Rows written, of `ratchet` decisions; of a shape with files beside it, those of its own file."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason, as in formats.writing.REASONS -> how many."""
    truncated: bool = False
    """True if there was more than the limit."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Decisions that could not be read, the first of them: id -> why."""
    files: list[Mapping[str, object]] = field(default_factory=list)
    """[{path, format, samples, bytes}], the first one the file that was asked for."""

    def as_dict(self) -> dict[str, object]:
        return {
            "format": self.format,
            "path": self.files[0]["path"] if self.files else None,
            "samples": self.samples,
            "left_out": {reason: count for reason, count in self.left_out.items() if count},
            "truncated": self.truncated,
            "unreadable": self.unreadable,
            "files": self.files,
        }


def shape_of(name: str) -> RowShape:
    """The kind of file that is written under a name. Raises ExportRefused."""
    if name not in formats.SHAPES:
        raise FeedbackExportRefused(f"format: expected one of {', '.join(formats.SHAPES)}; found {name!r}")
    return formats.SHAPES[name]


def export_stream(
    name: str, selection: Selection, report: ExportReport, *, limit: int | None = None
) -> Generator[bytes]:
    """The file in pieces of about 64 kB, all of one moment, while the report fills up; at most `limit` rows.

    Needs memory for a few thousand rows, however many there are. Raises ExportRefused for an unknown format.
    """
    shape = shape_of(name)
    # of this pass alone: a selection may be used for several files
    reader = RowReader("", "export")
    selection = replace(selection, reader=reader)

    def pieces() -> Generator[bytes]:
        with one_moment(), closing(_rows(shape, selection, report.left_out)) as rows:
            yield from _encode_lines(shape, _limit_lines(rows, limit, report), report)
        report.truncated |= bool(report.left_out.pop(BEYOND_LIMIT, 0))
        if reader.unreadable:
            report.left_out["unreadable"] += len(reader.unreadable)
            report.unreadable |= unreadable_summary(reader.unreadable)
            reader.save(looked_at=reader.unreadable.keys())

    return pieces()


def export_start(
    name: str, selection: Selection, report: ExportReport, *, limit: int | None = None
) -> Iterator[bytes]:
    """Start `export_stream` and read the first piece: a database that is away is met before anything is
    sent."""
    pieces = export_stream(name, selection, report, limit=limit)
    first = next(pieces, b"")

    def chunks() -> Iterator[bytes]:
        yield first
        yield from pieces

    return chunks()


def _rows(shape: RowShape, selection: Selection, left_out: Counter[str]) -> Generator[Line]:
    for view in shape.views:
        with closing(records(view, selection, left_out)) as found:
            yield from shape.write(found, left_out)


def _limit_lines(rows: Iterator[Line], limit: int | None, report: ExportReport) -> Iterator[Line]:
    yield from islice(rows, limit)
    if limit is not None:
        report.truncated = next(rows, None) is not None


def _encode_lines(shape: RowShape, rows: Iterable[Line], report: ExportReport) -> Iterator[bytes]:
    array = shape.container == "array"
    piece = bytearray(b"[\n" if array else b"")
    end = b"" if array else b"\n"
    first, whole = True, View.HISTORY in shape.views
    for row in rows:
        if array and not first:
            piece += b",\n"
        first = False
        piece += _json(row)
        piece += end
        report.samples += not whole or row["type"] == "decision"
        if len(piece) >= PIECE:
            yield bytes(piece)
            piece.clear()
    if array:
        piece += b"\n]\n"
    if piece:
        yield bytes(piece)


def _json(row: Line) -> bytes:
    if isinstance(row, LineWritten):
        return row.text
    try:
        return orjson.dumps(row)
    except orjson.JSONEncodeError:  # a whole number of more than 64 bits
        return json.dumps(row, ensure_ascii=False).encode()


def filename(name: str, agent: str | None) -> str:
    """File name of a download."""
    return f"{agent or 'feedback'}.{name}.{'json' if shape_of(name).container == 'array' else 'jsonl'}"


def media_type(name: str) -> str:
    return "application/json" if shape_of(name).container == "array" else "application/x-ndjson"


def file_export(path: Path, name: str, selection: Selection, *, limit: int | None = None) -> ExportReport:
    """Write a file, gzipped where its name ends so, and those that belong beside it: `name-<what>.json`.

    A file is whole or not there: it is written under another name first; without a row there is none. Raises
    ExportRefused where nothing can be said in the format, or a file cannot be written.
    """
    shape = shape_of(name)
    if shape.beside or View.HISTORY in shape.views:
        # what stands beside, or is said of them in lines of its own, must be of the same decisions
        selection, limit = replace(selection, decisions=limit), None
    report = _file_written(path, name, selection, limit)
    if not report.samples:
        counts = ", ".join(f"{count} {reason}" for reason, count in report.left_out.items() if count)
        raise FeedbackExportRefused(
            f"nothing of {f'agent {selection.agent}' if selection.agent else 'any agent'} can be written as {name}"
            f"{f' (left out: {counts})' if counts else ''}: record and rate decisions first, lower --min-reward, or "
            "choose another --format"
        )
    for other in shape.beside:
        beside = _file_written(_ratings_path(path, other), other, selection, limit)
        report.files += beside.files
        report.left_out |= beside.left_out
    return report


def _ratings_path(path: Path, name: str) -> Path:
    """entries.json -> entries-ratings.json, for the shape simulation-ratings."""
    stem, dot, ending = path.name.partition(".")
    return path.with_name(f"{stem}-{name.partition('-')[2]}{dot}{ending}")


def _file_written(path: Path, name: str, selection: Selection, limit: int | None) -> ExportReport:
    report = ExportReport(name)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                # closed here, and not whenever memory is cleared up: it holds a transaction
                with closing(export_stream(name, selection, report, limit=limit)) as pieces:
                    _write(file, path, pieces)
                os.fchmod(file.fileno(), 0o644)
                if report.samples:
                    Path(file.name).replace(path)
            finally:
                Path(file.name).unlink(missing_ok=True)
    except OSError as error:
        raise FeedbackExportRefused(
            f"{path} cannot be written: {error.strerror or error}; name a file in a folder that is there and writable"
        ) from error
    if report.samples:
        size = path.stat().st_size
        report.files.append({"path": str(path), "format": name, "samples": report.samples, "bytes": size})
    return report


def _write(file: IO[bytes], path: Path, pieces: Iterable[bytes]) -> None:
    if path.suffix == ".gz":
        # no name and no time in it: the same feedback is the same file
        with gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0, compresslevel=6) as zipped:
            for piece in pieces:
                zipped.write(piece)
    else:
        for piece in pieces:
            file.write(piece)
    file.flush()
    os.fsync(file.fileno())
