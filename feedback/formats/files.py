"""Reads rows from JSON lines, JSON arrays and JSON documents, gzipped too, in bounded memory, knowing each line."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from feedback.formats.records import FormatRefused, RowRefused

CHUNK = 1 << 20
"""Characters read at once from a JSON array."""

MAX_ROW = 64 << 20
"""Longest row, in characters: what is longer is no row but a file of another kind."""


@dataclass(frozen=True, slots=True)
class Row:
    """One JSON value of a file and the line it starts on, from 1."""

    line: int
    value: Any


def rows(path: Path) -> Iterator[Row | RowRefused]:
    """The rows of a file: lines of JSON lines, elements of a JSON array, or the one object of a JSON document.

    A line that is not JSON is a refused row; the lines after it can still be read. Raises FormatRefused where the
    file cannot be opened, is not UTF-8, or is an array or document with a fault in it, naming line and column.
    """
    try:
        with _opened(path) as file:
            start = _first_character(file)
            if start == "":
                raise FormatRefused(f"{path}: expected rows of JSON, found an empty file")
            if start == "[":
                yield from _array(path, io.TextIOWrapper(file, "utf-8-sig"))
            elif _is_document(path, file):
                yield from _document(path, file)
            else:
                yield from _lines(path, file)
    except UnicodeDecodeError as error:
        raise FormatRefused(
            f"{path}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x} ({error.reason}); "
            "convert it to UTF-8 first"
        ) from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FormatRefused(f"{path}: the gzip file is damaged or cut short: {error}") from error
    except OSError as error:
        raise FormatRefused(f"{path}: cannot be read: {error.strerror or error}") from error


def _opened(path: Path) -> IO[bytes]:
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")  # type: ignore[return-value]


def _first_character(file: IO[bytes]) -> str:
    head = b""
    while not head and (chunk := file.read(4096)):
        head = chunk.removeprefix(b"\xef\xbb\xbf").strip()
    file.seek(0)
    return chr(head[0]) if head else ""


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_constant)


def _lines(path: Path, file: IO[bytes]) -> Iterator[Row | RowRefused]:
    number = 0
    while data := file.readline(MAX_ROW):
        number += 1
        if len(data) == MAX_ROW:
            raise FormatRefused(
                f"{path} line {number}: longer than {MAX_ROW >> 20} MiB; expected one row a line"
            )
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        if not data.strip():
            continue
        try:
            yield Row(number, _decoder.decode(data.decode("utf-8")))
        except UnicodeDecodeError as error:
            fault = f"not UTF-8: byte {error.start + 1} is 0x{data[error.start]:02x}"
        except json.JSONDecodeError as error:
            fault = f"not JSON: {error.msg} at column {error.colno}"
        except (ValueError, RecursionError) as error:
            fault = f"not JSON: {error}"
        else:
            continue
        yield RowRefused(number, "", fault, broken=True)


def _is_document(path: Path, file: IO[bytes]) -> bool:
    """Whether a file that starts with { is one object over several lines, rather than a row a line."""
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return False
    first = b""
    while not first.strip() and (line := file.readline(MAX_ROW)):
        first = line.removeprefix(b"\xef\xbb\xbf")
    rest = file.read(4096).strip()
    file.seek(0)
    try:
        json.loads(first)
    except ValueError:
        return True
    return not rest


def _document(path: Path, file: IO[bytes]) -> Iterator[Row]:
    text = file.read(MAX_ROW).decode("utf-8-sig")
    if file.read(1):
        raise FormatRefused(f"{path}: one JSON object of more than {MAX_ROW >> 20} MiB; expected rows")
    try:
        yield Row(1, _decoder.decode(text))
    except json.JSONDecodeError as error:
        raise FormatRefused(
            f"{path} line {error.lineno} column {error.colno}: not JSON: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatRefused(f"{path}: not JSON: {error}") from error


class _Window:
    """A stretch of a long text, of which the beginning is forgotten while the line numbers go on."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self.path, self.file = path, file
        self.text, self.at, self.line, self.column = "", 0, 1, 1
        self.ended = False

    def more(self) -> None:
        """Read on, and forget the text before `at`: indexes into the old text are void afterwards."""
        chunk = self.file.read(max(CHUNK, len(self.text) - self.at))
        self.ended = not chunk
        self.text, self.at = self.text[self.at :] + chunk, 0

    def advance(self, to: int) -> None:
        """Go on to an index of the text, counting lines."""
        newlines = self.text.count("\n", self.at, to)
        if newlines:
            self.line += newlines
            self.column = to - self.text.rindex("\n", self.at, to)
        else:
            self.column += to - self.at
        self.at = to

    def skip_space(self) -> str:
        """Go on to the next character that is no white space; "" at the end of the file."""
        while True:
            end = self.at
            while end < len(self.text) and self.text[end] in " \t\r\n":
                end += 1
            self.advance(end)
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def refused(self, fault: str) -> FormatRefused:
        return FormatRefused(f"{self.path} line {self.line} column {self.column}: not JSON: {fault}")


def _array(path: Path, file: IO[str]) -> Iterator[Row]:
    """The elements of a JSON array one after the other; one element and a megabyte of text in memory."""
    window = _Window(path, file)
    window.skip_space()
    window.advance(window.at + 1)
    first = True
    while True:
        character = window.skip_space()
        if character == "]":
            window.advance(window.at + 1)
            if left := window.skip_space():
                raise window.refused(f"expected the end of the file after the array, found {left!r}")
            return
        if not first:
            if character != ",":
                found = repr(character) if character else "the end of the file"
                raise window.refused(f"expected ',' or ']' between the rows of the array, found {found}")
            window.advance(window.at + 1)
            character = window.skip_space()
        if not character:
            raise window.refused("expected another row or ']', found the end of the file")
        line = window.line
        yield Row(line, _element(window))
        first = False


def _element(window: _Window) -> Any:
    """The JSON value that starts at the window's place, reading on until it is whole."""
    while True:
        try:
            value, end = _decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            # cut off at the window's edge, or wrong? Only the first is cured by more text
            cut = error.pos >= len(window.text) - 8 or error.msg.startswith("Unterminated string")
            if cut and not window.ended and len(window.text) - window.at < MAX_ROW:
                window.more()
                continue
            window.advance(min(error.pos, len(window.text)))
            raise window.refused(error.msg) from error
        except (ValueError, RecursionError) as error:
            raise window.refused(str(error)) from error
        if end == len(window.text) and not window.ended:
            window.more()  # a number may go on
            continue
        window.advance(end)
        return value
