"""Reading files of outside formats in tests: the examples, what one row comes to, odd values to put in its place."""

import dataclasses
import json
import random
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.base import columns_watched
from feedback.transfer.formats.files import Row, rows
from feedback.transfer.formats.records import Record, RowRefused

HERE = Path(__file__).parents[1] / "formats"
SHARED = Path(__file__).parents[3] / "shared" / "data"

SUPPORT = Path(__file__).parent
STATED: list[dict[str, Any]] = [
    json.loads(line) for line in (SUPPORT / "formats_told.jsonl").read_text("utf-8").splitlines()
]
"""What each example says: its formats, records, left-out columns, and the counts of its import (by hand)."""
FORMAT_OF: dict[str, str] = {case["file"]: case["formats"][0] for case in STATED if not case["beside"]}
"""Example -> its format."""
BY_ROW = [name for name, format in FORMAT_OF.items() if format != "table"]
"""Examples that are read row by row. One odd value decides how a whole table is read."""

QUESTION = "Can I return opened headphones?"
GOOD, BAD = "Yes, within 30 days with the receipt.", "No idea."
ASKED = [{"role": "user", "content": QUESTION}]
BRIEF = [{"role": "system", "content": "Be brief."}, *ASKED]


def read(name: str, **how: Any) -> list[Record]:
    return list(formats.read(HERE / name, **how))


def told(value: Any) -> Any:
    """A record as JSON, without the fields that have their default; of a refused row what is wrong, not the words."""
    if isinstance(value, RowRefused):
        reason = re.sub(r"^/\S+: ", "", value.reason)  # the file
        return {"is": "RowRefused", "line": value.line, "about": re.split("[:,;]", reason)[0][:60]}
    if dataclasses.is_dataclass(value):
        found = {f.name: (getattr(value, f.name), f) for f in dataclasses.fields(value)}
        said = {
            name: told(item)
            for name, (item, f) in found.items()
            if item != f.default and item not in ((), {})
        }
        return {"is": type(value).__name__, **said}
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(item) for item in value]
    return str(value) if isinstance(value, (UUID, datetime)) else value


def file_told(path: Path, format: str = "auto", beside: Path | None = None) -> dict[str, Any]:
    """What a file says, as JSON: its formats, its records, the columns nothing is kept of."""
    with columns_watched() as unread, formats.readings(path, format, beside) as files:
        records = [told(record) for file in files for record in file.records()]
        kinds = [file.format.name for file in files]
    found: dict[str, Any] = json.loads(
        json.dumps({"formats": kinds, "records": records, "left_out": dict(unread)})
    )
    return found


def case_file(folder: Path, case: dict[str, Any] | None, name: str) -> Path | None:
    """The file of a case: an example, rows as JSON lines, or a text under a name."""
    if case is None or "file" in case:
        return case and HERE / case["file"]
    if "rows" in case:
        return written(folder / f"{name}.jsonl", case["rows"])
    (folder / case["name"]).write_text(case["text"], "utf-8")
    return folder / case["name"]


def written(path: Path, items: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return path


def one(path: Path, row: Any, format: str = "auto") -> Record:
    (record,) = formats.read(written(path / "one.jsonl", [row]), format)
    return record


def refusal(path: Path, row: Any, format: str) -> str:
    record = one(path, row, format)
    assert isinstance(record, RowRefused), record
    assert record.line == 1
    return record.reason


def outside(path: str) -> Path:
    if not (SHARED / path).exists():
        pytest.skip(f"outside data ../shared/data/{path} is not here")
    return SHARED / path


ODD: list[Any] = [
    None,
    0,
    -1,
    7.5,
    True,
    "",
    "x",
    "\ud800",
    "a\x00b",
    [],
    [None],
    [[]],
    {},
    {"x": None},
    "{",
    10**400,
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inside for place in places(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy of a JSON value with another one in a place."""
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], odd)
    return copy


def odd_rows(name: str, count: int, seed: int) -> list[Any]:
    """Rows of an example with an odd value in one place each."""
    items = [row.value for row in rows(HERE / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item)[1:] for odd in ODD]
    return random.Random(seed).sample(mutants, min(len(mutants), count))
