"""Ratchet's own format: JSON lines of traces, of decisions with all that was ever said of them, and of comparisons.

A trace is a line {"type": "trace", ...its fields}; a decision a line {"type": "decision", ...its fields, "trace": id,
"ratings": [...], "outcomes": [...]}, after its trace; a comparison a line {"type": "comparison", "left": id,
"right": id, ...}, after its decisions. Superseded and withdrawn ratings are there too, in their order:
what is written, read again, is the same history with the same ids and times.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from datetime import datetime
from typing import Any, NamedTuple

import orjson

from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, TRACE, Body, Field
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedOutcome,
    ImportedRating,
    ImportedTrace,
    Record,
    RowError,
    check_json,
    list_of,
    mapping_of,
    number_of,
    objects_of,
    tags_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.writers import (
    JSON_COLUMNS,
    ComparisonRow,
    DecisionExport,
    DecisionRow,
    DecisionText,
    Line,
    LineWritten,
    OutcomeRow,
    RatingRow,
    RowShape,
    TraceRow,
    View,
)

TYPES = ("decision", "comparison", "trace")


def recognises(row: JsonObject) -> bool:
    if row.get("type") == "decision":
        return has(row, "messages", "response")
    if row.get("type") == "trace":
        return has(row, "agent", "steps")
    return row.get("type") == "comparison" and has(row, "left", "right", "preference")


def records(row: JsonObject, line: int) -> Iterator[Record]:
    kind = row.get("type")
    if kind not in TYPES:
        raise RowError(f"type: expected {', '.join(TYPES[:-1])} or {TYPES[-1]}, found {value_excerpt(kind)}")
    place: dict[str, Any] = {"line": line, "key": key_of(row)}
    if kind == "trace":
        yield ImportedTrace(**place, **_facts(row, TRACE, "type"))
    elif kind == "decision":
        yield ImportedDecision(**place, **_decision_facts(row))
    else:
        facts = _facts(row, COMPARISON, "type", "left", "right", "withdrawn")
        left, right = _id(row.get("left"), "left"), _id(row.get("right"), "right")
        if left is None or right is None:
            raise RowError("left and right: expected the ids of two decisions")
        yield ImportedComparison(**place, **facts, left=left, right=right)


def _decision_facts(row: JsonObject) -> dict[str, Any]:
    facts = _facts(row, DECISION, "type", "trace", "ratings", "outcomes")
    if not facts["messages"]:
        raise RowError("messages: expected at least one message, found none")
    source = row.get("source")
    return facts | {
        # one that says no source has that of the file
        "source": "" if source is None else text_of(source, "source"),
        "trace": _id(row.get("trace"), "trace"),
        "ratings": tuple(
            ImportedRating(**_facts(item, RATING, "withdrawn", where=f"ratings[{number}]."))
            for number, item in enumerate(objects_of(row.get("ratings") or [], "ratings"))
        ),
        "outcomes": tuple(
            ImportedOutcome(**_facts(item, OUTCOME, where=f"outcomes[{number}]."))
            for number, item in enumerate(objects_of(row.get("outcomes") or [], "outcomes"))
        ),
    }


def _facts(row: JsonObject, body: Body, *more: str, where: str = "") -> dict[str, Any]:
    """The id, the time and the declared fields of a row, as far as their types go; what is in them is checked when they
    are recorded. more: other keys that a row may have."""
    if unknown := sorted(set(row) - {"id", *body.names, "created_at", *more}):
        raise RowError(f"{where}unknown keys {', '.join(unknown)[:200]}: nothing may be lost in reading")
    withdrawn = row.get("withdrawn", False)
    if not isinstance(withdrawn, bool):
        raise RowError(f"{where}withdrawn: expected true or false, found {value_excerpt(withdrawn)}")
    return {
        "id": _id(row.get("id"), f"{where}id"),
        "created_at": time_of(row.get("created_at"), f"{where}created_at"),
        **{field.name: _value(row.get(field.name), field, where + field.name) for field in body},
        **({"withdrawn": withdrawn} if "withdrawn" in more else {}),
    }


def _value(value: object, field: Field, what: str) -> object:
    if value is None and not field.is_required:
        return copy(field.default)
    if field.name == "preference" and value is None:
        return ""  # what takes a comparison back prefers nothing
    return READERS[field.kind](value, what)


def _whole_read(value: object, what: str) -> int:
    number = number_of(value, what)
    if number != int(number):
        raise RowError(f"{what}: expected a whole number, found {value_excerpt(number)}")
    return int(number)


READERS: dict[object, Callable[[object, str], object]] = {
    str: text_of,
    int: _whole_read,
    float: number_of,
    datetime: time_of,
    tuple: tags_of,
    list: lambda value, what: list(list_of(check_json(value, what), what)),
    dict: lambda value, what: dict(mapping_of(check_json(value, what), what)),
    Any: check_json,
}
"""Reads a value of each type of field. Raises RowError."""


def _id(value: object, what: str) -> uuid.UUID | None:
    if value is None:
        return None
    found = uuid_of(value)
    if found is None:
        raise RowError(f"{what}: expected a UUID, found {value_excerpt(value)}")
    return found


# --- Writing -----------------------------------------------------------------------------------------------


def write(rows: Iterable[Any], left_out: Counter[str]) -> Iterator[Line]:
    """The rows of feedback.transfer.export_views as lines of this format; nothing is ever left out."""
    for row in rows:
        line: Line
        if isinstance(row, DecisionText):
            line = LineWritten("decision", row.text)
        elif isinstance(row, DecisionExport):
            decision = row.decision
            line = {"type": "decision", **_line(decision)}
            line["trace"] = line.pop("trace_id")
            line["ratings"] = [_feedback_line(rating) for rating in row.ratings]
            line["outcomes"] = [
                {name: value for name, value in _line(outcome).items() if name != "decision_id"}
                for outcome in row.outcomes
            ]
        elif isinstance(row, ComparisonRow):
            line = {"type": "comparison", **_line(row)}
            line["left"], line["right"] = line.pop("left_id"), line.pop("right_id")
            del line["supersedes_id"]
        else:
            line = {"type": "trace", **_line(row)}
        yield line


def _feedback_line(rating: RatingRow) -> Line:
    line = _line(rating)
    del line["decision_id"], line["supersedes_id"]
    return line


def _line(row: NamedTuple) -> Line:
    line: Line = dict(zip(row._fields, row, strict=True))
    for name in _JSON[type(row)]:
        line[name] = _stored_json(line[name])
    return line


_JSON: dict[type, list[str]] = {
    kind: [name for name in kind._fields if name in JSON_COLUMNS]
    for kind in (DecisionRow, RatingRow, OutcomeRow, ComparisonRow, TraceRow)
}


def _stored_json(text: str | None) -> object:
    """JSON as it is stored; SQLite keeps it with every letter that is not ASCII escaped, which nobody can read."""
    if text is None:
        return None
    if "\\u" in text:
        text = json.dumps(json.loads(text), ensure_ascii=False)
    return orjson.Fragment(text)


RATCHET = row_format(
    "ratchet",
    "Ratchet's own: decisions with all that was said of them, traces, comparisons",
    recognises,
    records,
    (RowShape("ratchet", "everything, with ids, times and superseded words", (View.HISTORY,), write),),
)
