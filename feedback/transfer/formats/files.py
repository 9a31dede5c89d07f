"""Reads rows from JSON lines, JSON arrays and documents, CSV, TSV and Parquet, compressed too, in bounded memory."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Collection, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from backend import limits
from backend.installation import PROGRAM
from feedback.transfer.formats.cells import row_decoded
from feedback.transfer.formats.columns import has_known_header
from feedback.transfer.formats.compression import PARQUET, ZIP, open_unpacked, suffix_of
from feedback.transfer.formats.records import FormatRefused, RowRefused
from feedback.transfer.formats.records import Row as Row
from feedback.transfer.formats.tables import SAMPLE, delimiter_of, parquet_rows, table_rows

CHUNK = 1 << 20
"""Characters read at once from a JSON array."""

MAX_ROW = limits.ROW_CHARACTERS
"""Longest row, in characters: what is longer is no row but a file of another kind."""

TABLES = {".csv": None, ".tsv": "\t", ".tab": "\t"}
"""Endings of tables, and the delimiter where the ending says it."""

OWN_TYPES = ("decision", "comparison", "trace")
"""`type` of rows in Ratchet's own format."""

JSON_ENDINGS = (".json", ".jsonl", ".ndjson")


MAX_REFUSED = limits.REFUSED_ROWS
"""Refused rows of a file after which it is given up, where they are most of its rows."""

_most_rows: ContextVar[int | None] = ContextVar("most_rows", default=None)


@contextmanager
def rows_bounded(most: int | None) -> Iterator[None]:
    """Within the block a file of more rows is refused while it is read for the first time, not after; None: any number.

    A format may read a file several times, to learn its columns before its rows; the bound holds for each.
    """
    token = _most_rows.set(most)
    try:
        yield
    finally:
        _most_rows.reset(token)


_dropped_columns: ContextVar[tuple[str, ...]] = ContextVar("dropped", default=())


@contextmanager
def columns_dropped(names: Collection[str]) -> Iterator[None]:
    """Within the block rows come without these columns."""
    token = _dropped_columns.set(tuple(names))
    try:
        yield
    finally:
        _dropped_columns.reset(token)


def too_many_rows(name: str, most: int) -> str:
    """A refusal of a file with more rows than are taken here."""
    return (
        f"{name}: more than {most:,} rows; split the file, or read it with `{PROGRAM} import_feedback FILE`, which "
        "takes any number"
    )


def rows(path: Path, name: str = "") -> Iterator[Row | RowRefused]:
    """Read rows within the bounds: of rows where `rows_bounded` sets one, and of lines that cannot be
    read."""
    most, ignored_columns = _most_rows.get(), _dropped_columns.get()
    refused = 0
    for number, row in enumerate(_rows(path, name), 1):
        if most is not None and number > most:
            raise FormatRefused(too_many_rows(name or str(path), most))
        if isinstance(row, RowRefused):
            refused += 1
            if refused > MAX_REFUSED and refused * 2 > number:
                raise FormatRefused(
                    f"{name or path}: given up after {refused:,} refused rows of {number:,}, the last one line "
                    f"{row.line}: {row.reason}"
                )
        elif ignored_columns and isinstance(row.value, dict):
            for column in ignored_columns:
                row.value.pop(column, None)
        # our own rows state how their texts are to be read
        if isinstance(row, Row) and isinstance(row.value, dict) and row.value.get("type") not in OWN_TYPES:
            row_decoded(row.value)
        yield row


def _rows(path: Path, name: str) -> Iterator[Row | RowRefused]:
    """The rows of a file: lines of JSON lines, elements of a JSON array, the one object of a JSON document, or the rows
    of a table (CSV, TSV, Parquet) as objects of their columns.

    name: what errors call the file; its path if empty. A line that is not JSON is a refused row; the lines after it can
    still be read. Raises FormatRefused where the file cannot be opened, is not UTF-8, is of a kind that is not read, or
    is an array or document with a fault in it, naming line and column.
    """
    name = name or str(path)
    try:
        with open_unpacked(path, name) as file:
            head = file.read(len(ZIP))
            file.seek(0)
            if head == ZIP:
                raise FormatRefused(f"{name}: a zip archive within an archive is not read; unpack it first")
            if head == PARQUET:
                yield from parquet_rows(file, name)
                return
            start = _first_character(file)
            if start == "":
                raise FormatRefused(f"{name}: expected rows of JSON or a table, found an empty file")
            if start == "[":
                yield from _array(name, io.TextIOWrapper(file, "utf-8-sig"))
            elif start != "{" and (suffix_of(path.name) in TABLES or _is_table(path, file)):
                yield from table_rows(file, name, TABLES.get(suffix_of(path.name)))
            elif start != "{" and suffix_of(path.name) not in JSON_ENDINGS:
                raise FormatRefused(
                    f"{name}: expected JSON, or a table whose first line names its columns (prompt, response, ...), "
                    f"found a text that starts with {start!r}; tables of other names are called .csv or .tsv"
                )
            elif _is_document(path, file):
                yield from _document(name, file)
            else:
                yield from _lines(name, file)
    except UnicodeDecodeError as error:
        raise FormatRefused(
            f"{name}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x} ({error.reason}); "
            "convert it to UTF-8 first"
        ) from error


def _first_character(file: IO[bytes]) -> str:
    head = b""
    while not head and (chunk := file.read(4096)):
        head = chunk.removeprefix(b"\xef\xbb\xbf").strip()
    file.seek(0)
    return chr(head[0]) if head else ""


def _is_table(path: Path, file: IO[bytes]) -> bool:
    """True if a file whose name does not say so starts with a header that names a prompt, a response or a
    verdict."""
    if suffix_of(path.name) in JSON_ENDINGS:
        return False
    start = file.read(SAMPLE)
    file.seek(0)
    encoding = "utf-16" if start[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    first = start.decode(encoding, "replace").partition("\n")[0]
    return has_known_header(first.split(delimiter_of(first)))


def _constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_constant)


def _too_many_values(raw: bytes) -> str:
    """Why JSON of so many values is not decoded; empty where it is: 20 million empty lists take gigabytes."""
    most = limits.ROW_VALUES
    if len(raw) <= most or limits.values_in(raw, most) <= most:
        return ""
    return f"more than {most:,} values in one row: no feedback"


def _lines(name: str, file: IO[bytes]) -> Iterator[Row | RowRefused]:
    number = 0
    while data := file.readline(MAX_ROW):
        number += 1
        if len(data) == MAX_ROW:
            raise FormatRefused(
                f"{name} line {number}: longer than {MAX_ROW >> 20} MiB; expected one row a line"
            )
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        if not data.strip():
            continue
        if fault := _too_many_values(data):
            yield RowRefused(number, "", fault, broken=True)
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
    """True if a file that starts with { is one object over several lines, rather than a row a line."""
    if suffix_of(path.name) == ".jsonl":
        return False
    first = b""
    while not first.strip() and (line := file.readline(MAX_ROW)):
        first = line.removeprefix(b"\xef\xbb\xbf")
    rest = file.read(4096).strip()
    file.seek(0)
    if _too_many_values(first):
        return False  # as a line it is refused
    try:
        json.loads(first)
    except ValueError:
        return True
    return not rest


def _document(name: str, file: IO[bytes]) -> Iterator[Row]:
    text = file.read(MAX_ROW).decode("utf-8-sig")
    if file.read(1):
        raise FormatRefused(f"{name}: one JSON object of more than {MAX_ROW >> 20} MiB; expected rows")
    if fault := _too_many_values(text.encode()):
        raise FormatRefused(f"{name}: {fault}")
    try:
        yield Row(1, _decoder.decode(text))
    except json.JSONDecodeError as error:
        raise FormatRefused(
            f"{name} line {error.lineno} column {error.colno}: not JSON: {error.msg}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatRefused(f"{name}: not JSON: {error}") from error


class _Window:
    """A stretch of a long text, of which the beginning is forgotten while the line numbers go on."""

    def __init__(self, name: str, file: IO[str]) -> None:
        self.name, self.file = name, file
        self.text, self.at, self.line, self.column = "", 0, 1, 1
        self.ended = False

    def read_more(self) -> None:
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
            self.read_more()

    def refusal(self, fault: str) -> FormatRefused:
        return FormatRefused(f"{self.name} line {self.line} column {self.column}: not JSON: {fault}")


def _array(name: str, file: IO[str]) -> Iterator[Row]:
    """The elements of a JSON array one after the other; one element and a megabyte of text in memory."""
    window = _Window(name, file)
    window.skip_space()
    window.advance(window.at + 1)
    first = True
    while True:
        character = window.skip_space()
        if character == "]":
            window.advance(window.at + 1)
            if left := window.skip_space():
                raise window.refusal(f"expected the end of the file after the array, found {left!r}")
            return
        if not first:
            if character != ",":
                found = repr(character) if character else "the end of the file"
                raise window.refusal(f"expected ',' or ']' between the rows of the array, found {found}")
            window.advance(window.at + 1)
            character = window.skip_space()
        if not character:
            raise window.refusal("expected another row or ']', found the end of the file")
        line = window.line
        yield Row(line, _element(window))
        first = False


def _element(window: _Window) -> object:
    """The JSON value that starts at the window's place, reading on until it is whole."""
    while True:
        if len(window.text) - window.at > 2 * CHUNK and (
            fault := _too_many_values(window.text[window.at :].encode())
        ):
            raise window.refusal(fault)
        try:
            value, end = _decoder.raw_decode(window.text, window.at)
        except json.JSONDecodeError as error:
            # cut off at the window's edge, or wrong? Only the first is cured by more text
            cut = error.pos >= len(window.text) - 8 or error.msg.startswith("Unterminated string")
            if cut and not window.ended and len(window.text) - window.at < MAX_ROW:
                window.read_more()
                continue
            window.advance(min(error.pos, len(window.text)))
            raise window.refusal(error.msg) from error
        except (ValueError, RecursionError) as error:
            raise window.refusal(str(error)) from error
        if end == len(window.text) and not window.ended:
            window.read_more()  # a number may go on
            continue
        window.advance(end)
        return value


# --- Rows that wait for later rows of the same file --------------------------------------------------------

CACHE_KIB = 16 << 10
"""Memory of one store, in KiB; what does not fit lies in a temporary file that is gone when the store is."""


def _store(table: str) -> sqlite3.Connection:
    # no name: SQLite's own kind of temporary database, and no transaction of it is ever looked at again
    database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    database.execute("PRAGMA journal_mode = OFF")
    database.execute("PRAGMA synchronous = OFF")
    database.execute(table)
    database.execute("BEGIN")
    return database


class DiskMultimap:
    """JSON values under texts, several under one text in the order they came."""

    def __init__(self) -> None:
        self._database = _store("CREATE TABLE kept (number INTEGER PRIMARY KEY, key TEXT, value TEXT)")
        self._database.execute("CREATE INDEX by_key ON kept (key)")

    def add(self, key: str, value: object = None) -> None:
        # as JSON, in which a half of a surrogate pair, which no database takes for text, is written out
        self._database.execute(
            "INSERT INTO kept (key, value) VALUES (?, ?)", (json.dumps(key), json.dumps(value))
        )

    def all(self, key: str) -> list[Any]:
        found = self._database.execute(
            "SELECT value FROM kept WHERE key = ? ORDER BY number", (json.dumps(key),)
        )
        return [json.loads(value) for (value,) in found]

    def last(self, key: str) -> Any:
        """The newest value; None where there is none."""
        found = self._database.execute(
            "SELECT value FROM kept WHERE key = ? ORDER BY number DESC LIMIT 1", (json.dumps(key),)
        )
        return next((json.loads(value) for (value,) in found), None)

    def count(self, key: str, most: int = 2) -> int:
        """Number of values, counted up to `most`."""
        statement = "SELECT count(*) FROM (SELECT 1 FROM kept WHERE key = ? LIMIT ?)"
        return int(self._database.execute(statement, (json.dumps(key), most)).fetchone()[0])

    def __contains__(self, key: str) -> bool:
        return self.count(key, 1) > 0

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Keys and values in the order they came."""
        for key, value in self._database.execute("SELECT key, value FROM kept ORDER BY number"):
            yield json.loads(key), json.loads(value)


class Tally(MutableMapping[int, int]):
    """Numbers of at most 63 bits and a sign, under such numbers."""

    def __init__(self) -> None:
        self._database = _store("CREATE TABLE tally (key INTEGER PRIMARY KEY, value INTEGER)")

    def __getitem__(self, key: int) -> int:
        for (value,) in self._database.execute("SELECT value FROM tally WHERE key = ?", (key,)):
            return int(value)
        raise KeyError(key)

    def __setitem__(self, key: int, value: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO tally VALUES (?, ?)", (key, value))

    def __delitem__(self, key: int) -> None:
        if not self._database.execute("DELETE FROM tally WHERE key = ?", (key,)).rowcount:
            raise KeyError(key)

    def __iter__(self) -> Iterator[int]:
        for (key,) in self._database.execute("SELECT key FROM tally"):
            yield int(key)

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM tally").fetchone()[0])
