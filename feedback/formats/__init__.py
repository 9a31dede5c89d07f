"""Outside formats, one file each: which one a file is of, what it says in our words, how ours are said in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from feedback.formats import (
    argilla,
    feedback_collector,
    hh,
    label_studio,
    langfuse,
    librechat,
    llamafactory,
    oasst,
    open_webui,
    openai,
    pandalm,
    ratchet,
    simulation,
    tensorzero,
    trl,
    vw,
)
from feedback.formats.base import Format
from feedback.formats.files import rows
from feedback.formats.records import FormatRefused, Record, RowRefused
from feedback.formats.records import uuid_of as uuid_of
from feedback.formats.writing import Shape

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT
    # in the order they are asked whether a row is theirs: the ones with keys of their own first
    for module in (
        ratchet,
        simulation,
        feedback_collector,
        open_webui,
        librechat,
        langfuse,
        tensorzero,
        vw,
        oasst,
        label_studio,
        argilla,
        pandalm,
        hh,
        openai,
        llamafactory,
        trl,
    )
}

SHAPES: dict[str, Shape] = {shape.name: shape for format in FORMATS.values() for shape in format.shapes}
"""Every kind of file that can be written."""

_READ_AS: dict[str, Format] = {
    shape.name: format for format in FORMATS.values() for shape in format.shapes
} | FORMATS
"""What was written under a name is read under it, too."""

SAMPLE = 20
"""Rows looked at to recognise a format."""


def detect(path: str | Path) -> str:
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
        for format in FORMATS.values():
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


def read(path: str | Path, format: str = "auto", ratings_path: str | Path | None = None) -> Iterator[Record]:
    """What a file says, row after row: decisions, comparisons, ratings, and rows refused or skipped.

    format: a name in FORMATS or SHAPES, or "auto" to recognise it. ratings_path: the second file, of formats that have
    two. Raises FormatRefused for a file that cannot be read at all; a row that cannot is a RowRefused among the others.
    """
    path = Path(path)
    chosen = named(detect(path) if format == "auto" else format)
    if ratings_path is not None and not chosen.two_files:
        two = ", ".join(f.name for f in FORMATS.values() if f.two_files)
        raise FormatRefused(
            f"{path}: format {chosen.name} keeps ratings in the same file; a ratings file goes with {two}"
        )
    return chosen.read(path, None if ratings_path is None else Path(ratings_path))
