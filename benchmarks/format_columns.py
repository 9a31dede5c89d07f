"""Print the table "format x added column": what becomes of a column that no format knows, in rows of every format.

    python benchmarks/format_columns.py FOLDER...

FOLDER holds example files, such as tests/formats and tests/formats/tools. Of each file one copy is read in which every
row has one more column, and one in which every chat message has one more key. `named`: the report names the column, or
the one around it. `kept`: its value stands in the decision. `refused`: the row is refused by name. `lost` must not be
seen.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "backend.settings")

COLUMN, VALUE = "zz_added", "kept-or-named"


def changed(path: Path, target: Path, where: str) -> bool:
    """Write a copy of JSON rows with a column added to each row, or a key to each message; False where none is."""
    text = path.read_text("utf-8")
    is_lines = path.suffix == ".jsonl"
    rows = [json.loads(line) for line in text.splitlines() if line.strip()] if is_lines else json.loads(text)
    items = rows if isinstance(rows, list) else [rows]
    places = [row for row in items if isinstance(row, dict)] if where == "row" else list(messages_in(items))
    for place in places:
        place[COLUMN] = VALUE
    target.write_text("\n".join(map(json.dumps, items)) if is_lines else json.dumps(rows), "utf-8")
    return bool(places)


def messages_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every chat message inside a value."""
    if isinstance(value, dict):
        if isinstance(value.get("role"), str) and "content" in value:
            yield value
            return
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from messages_in(item)


def holders(path: Path) -> set[str]:
    """Columns of the rows that hold the added value."""
    text = path.read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
    items = rows if isinstance(rows, list) else [rows]
    return {name for row in items for name, value in row.items() if VALUE in json.dumps(value)}


def fate(path: Path, format: str) -> str:
    """What became of the added value: kept, named, refused or lost."""
    from feedback.transfer import formats
    from feedback.transfer.formats.base import columns_watched
    from feedback.transfer.formats.records import FormatRefused, RowRefused, RowSkipped

    seen: set[str] = set()
    try:
        with columns_watched() as unread, formats.readings(path, format) as files:
            records = [record for file in files for record in file.records()]
    except FormatRefused as refusal:
        return "refused" if COLUMN in str(refusal) else f"refused: {str(refusal)[-60:]}"
    for record in records:
        if isinstance(record, RowRefused):
            seen.add("refused" if COLUMN in record.reason else f"refused: {record.reason[:60]}")
        elif not isinstance(record, RowSkipped) and is_dataclass(record):
            seen.add("kept" if VALUE in json.dumps(asdict(record), default=str) else "silent")
    if unread[COLUMN]:
        return "named"
    if "kept" in seen:
        return "kept"
    if unread.keys() & holders(path):
        return "named"
    return ", ".join(sorted(seen - {"silent"})) or ("no record" if not seen else "lost")


def main() -> None:
    import django

    django.setup()
    from feedback.transfer import formats
    from feedback.transfer.formats.records import FormatRefused

    print(f"{'file':52} {'format':26} {'row':10} message")
    for folder in map(Path, sys.argv[1:]):
        for path in sorted([*folder.glob("*.json"), *folder.glob("*.jsonl")]):
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / path.name
                try:
                    name = formats.detect(path)
                    found = [
                        fate(copy, name) if changed(path, copy, where) else "-"
                        for where in ("row", "message")
                    ]
                except (FormatRefused, ValueError) as error:
                    name, found = "?", [str(error)[-60:], ""]
            print(f"{path.name:52} {name:26} {found[0]:10} {found[1]}")


if __name__ == "__main__":
    main()
