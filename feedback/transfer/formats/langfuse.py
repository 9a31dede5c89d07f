"""Langfuse scores: verdicts on traces that stand elsewhere, named by trace or observation.

Scores of the API, of the pages' export (with `authorUserName`) and of the blob storage's tables (snake case, no
author). A decision is found by its id or its run_id, or as the last one of its trace: import the observations or
traces first, or record the trace's id with the decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, attempt, each_row, has, key_of
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    ImportedReference,
    Record,
    RowError,
    RowSkipped,
    list_of,
    mapping_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import Line, RowShape, View, iso, share_of, writer_by_record

TYPES = ("NUMERIC", "BOOLEAN", "CATEGORICAL", "CORRECTION", "TEXT")


def recognises(row: Mapping[str, Any]) -> bool:
    if isinstance(row.get("data"), list) and "meta" in row:  # a page of the API
        return not row["data"] or any(
            isinstance(item, Mapping) and has(item, "name", "value") for item in row["data"]
        )
    return has(row, "traceId", "name", "dataType") or has(
        row, "trace_id", "name", "data_type", "string_value"
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    if "dataType" in row:
        yield from _score(row, line)
    elif "data_type" in row:
        yield from _score({CAMEL.get(name, name): value for name, value in row.items()}, line)
    else:
        for index, item in enumerate(list_of(row.get("data"), "data")):
            score = mapping_of(item, f"data[{index}]")
            yield from attempt(line, key_of(score), partial(records, {"dataType": None, **score}, line))


CAMEL = {
    "trace_id": "traceId",
    "observation_id": "observationId",
    "session_id": "sessionId",
    "data_type": "dataType",
    "string_value": "stringValue",
}
"""A column of the blob storage's tables -> the name it has in the API and in the exports of the pages."""


def _score(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    key = key_of(row)
    if not row.get("traceId") and not row.get("observationId"):
        yield RowSkipped(line, key, "a score on a session or an experiment, not on a trace")
        return
    if row.get("value") in (None, "") and row.get("stringValue") in (None, "") and not row.get("comment"):
        yield RowSkipped(line, key, "a score without a value")
        return
    name = text_of(row.get("name"), "name", required=True)
    kind, value = row.get("dataType"), number_in(row.get("value"))
    facts: dict[str, Any] = {"tags": (name[:100],), "notes": text_of(row.get("comment") or "", "comment")}
    if kind == "NUMERIC":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise RowError(
                f"value: expected a score in [0, 1], found {value_excerpt(value)} of unknown scale"
            )
        facts["score"] = float(value)
    elif kind == "BOOLEAN":
        if value not in (0, 1):
            raise RowError(f"value: expected 0 or 1, found {value_excerpt(value)}")
        facts["thumb"] = "up" if value else "down"
    elif kind == "CATEGORICAL":
        category = text_of(row.get("stringValue"), "stringValue", required=True)
        facts["tags"] = (f"{name}: {category}"[:100],)
    elif kind == "CORRECTION":
        facts["correction"] = text_of(row.get("stringValue") or value, "stringValue", required=True)
    elif kind == "TEXT":
        facts["notes"] = text_of(row.get("stringValue") or value, "stringValue", required=True)
    else:
        raise RowError(f"dataType: expected one of {', '.join(TYPES)}; found {value_excerpt(kind)}")
    author = row.get("authorUserId") or row.get("authorUserName")
    source = text_of(row.get("source") or "API", "source")
    # scores of different names by one author are different questions, and none supersedes the other
    rater = f"{author if isinstance(author, str) and author else source.lower()}: {name}"
    target = row.get("observationId") or row.get("traceId")
    yield ImportedReference(
        line,
        key,
        text_of(target, "traceId", required=True),
        ImportedRating(
            rater=rater[:200],
            rater_kind="simulated" if source == "EVAL" else "human",
            created_at=time_of(row.get("timestamp"), "timestamp"),
            **facts,
        ),
        also=(text_of(row.get("traceId") or "", "traceId"),),
    )


def number_in(value: Any) -> Any:
    """A number, also where a table holds the text of it; anything else as it is."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    return each_row(path, records, verdicts=())


# --- Writing -----------------------------------------------------------------------------------------------


def _scores(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A score for each thing a rating says, on the trace that has the decision's own id."""
    for rating in record.ratings:
        score_values = list(_values(rating))
        for number, (name, values) in enumerate(score_values):
            yield {
                "id": f"{rating.id}-{name}",
                "traceId": str(record.id),
                "name": name,
                **values,
                "source": "EVAL" if rating.rater_kind == "simulated" else "ANNOTATION",
                "comment": rating.notes if number == 0 and rating.notes else None,
                "authorUserId": rating.rater,
                "timestamp": iso(rating.created_at),
            }


def _values(rating: ImportedRating) -> Iterator[tuple[str, Line]]:
    """(name of the score, its type and value); notes alone are a text, beside a verdict its comment."""
    if rating.thumb:
        up = rating.thumb == "up"
        yield "thumb", {"dataType": "BOOLEAN", "value": int(up), "stringValue": str(up)}
    if (share := share_of(replace(rating, thumb=""))) is not None:
        yield "score", {"dataType": "NUMERIC", "value": share}
    if rating.correction is not None:
        yield "correction", {"dataType": "CORRECTION", "value": 0, "stringValue": rating.correction}
    for tag in rating.tags:
        yield tag, {"dataType": "CATEGORICAL", "value": 1, "stringValue": tag}
    if rating.notes.strip() and not (rating.thumb or share is not None or rating.correction or rating.tags):
        yield "notes", {"dataType": "TEXT", "value": 0, "stringValue": rating.notes}


SHAPES = (
    RowShape(
        "langfuse",
        "scores on traces with the decisions' ids",
        (View.RATED,),
        writer_by_record(_scores),
        "array",
    ),
)

FORMAT = Format("langfuse", "Langfuse scores", recognises, read, SHAPES)
