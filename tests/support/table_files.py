"""Records, ratings and refusals of a file of rows."""

from collections import Counter
from pathlib import Path
from typing import Any

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap
from feedback.transfer.formats.records import ImportedDecision, Record
from tests.support.formats import written

Q = "prompt=q,response=a"


def kinds(records: list[Record]) -> dict[str, int]:
    return dict(Counter(type(record).__name__ for record in records))


def text(path: Path, content: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(content.encode(encoding))
    return path


def ratings(path: Path, columns: ColumnMap | None = None) -> list[Any]:
    """thumb, stars or score of each decision; None where it has no rating."""
    found = []
    for record in formats.read(path, columns=columns):
        assert isinstance(record, ImportedDecision), record
        rating = record.ratings[0] if record.ratings else None
        found.append(None if rating is None else rating.thumb or rating.stars or rating.score)
    return found


def rated(tmp_path: Path, values: list[Any], name: str = "rating", map: str = "") -> list[Any]:
    path = written(
        tmp_path / "r.jsonl", [{"prompt": f"q{i}", "response": "a", name: v} for i, v in enumerate(values)]
    )
    return ratings(path, ColumnMap.parse(map) if map else None)


def rated_rows(path: Path) -> list[str]:
    return [record.ratings[0].thumb for record in formats.read(path) if isinstance(record, ImportedDecision)]
