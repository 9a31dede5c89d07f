"""Simulation: two files, entries (the decisions) and ratings of them.

A rating is {"entry_id", "rating": "up" | "down", "tags", "notes"}. An entry has an "entry_id" and either its own
`messages` (or `prompt`) and `response`, or what an agent can make them from: a scenario and the option chosen.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.storage.responses import Message, value_excerpt
from feedback.transfer.formats.base import Format, each_row, key_of, thumb_of, verdicts_read
from feedback.transfer.formats.disk_store import DiskMultimap
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowRefused,
    check_json,
    list_of,
    messages_of,
    tags_of,
    text_of,
    time_of,
)
from feedback.transfer.formats.writers import (
    Line,
    RowShape,
    View,
    each_rating,
    good,
    iso,
    plain,
    words,
    writer_by_record,
)

ENTRY = "entry"
"""Metadata key under which an entry without a prompt is kept whole: an agent knows how to ask it."""

PROMPTS = ("messages", "prompt", "query")
RESPONSES = ("response", "answer")


def recognises(row: Mapping[str, Any]) -> bool:
    # a rating of another kind than up and down is a plain row's
    return "entry_id" in row and (row.get("rating") is None or bool(thumb_of(row["rating"])))


def ratings_row(row: Mapping[str, Any]) -> bool:
    return not {"prompt", "messages", *RESPONSES} & set(row)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    ratings, keys = DiskMultimap(), DiskMultimap()
    if ratings_path:
        yield from _ratings(ratings_path, ratings)

    def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
        key = _entry_id(row)
        if key in keys:
            raise RowError(f"entry_id {key!r} stands there twice")
        keys.add(key)
        inline = [_rating(row)] if row.get("rating") is not None else []
        yield _decision(row, line, key, (*inline, *(_rating(said) for _, said in ratings.all(key))))

    yield from each_row(path, records)
    for key, (line, _) in ratings:
        if key not in keys:
            yield RowRefused(
                line, key, f"{ratings_path}: a rating of an entry that {path.name} does not hold"
            )


def _ratings(path: Path, found: DiskMultimap) -> Iterator[RowRefused]:
    """Put the ratings under their entries, with their lines; a person who changed their mind stands there twice, in
    that order. Gives those that cannot be read."""
    empty = True
    for row in rows(path):
        empty = False
        if isinstance(row, RowRefused):
            yield RowRefused(row.line, row.key, f"{path}: {row.reason}", row.broken)
        elif not isinstance(row.value, Mapping):
            yield RowRefused(row.line, "", f"{path}: expected an object, found {value_excerpt(row.value)}")
        else:
            try:
                verdicts_read(row.value, used=("rating", "rater"))
                _rating(row.value)
                found.add(_entry_id(row.value), (row.line, row.value))
            except RowError as error:
                yield RowRefused(row.line, key_of(row.value), f"{path}: {error}")
    if empty:
        raise FormatRefused(f"{path}: expected ratings, found none")


def _entry_id(row: Mapping[str, Any]) -> str:
    value = row.get("entry_id")
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise RowError(f"entry_id: expected a text or a number, found {value_excerpt(value)}")
    return str(value)


def _rating(row: Mapping[str, Any]) -> ImportedRating:
    thumb = row.get("rating")
    if thumb not in ("up", "down"):
        raise RowError(f"rating: expected up or down, found {value_excerpt(thumb)}")
    notes = row.get("notes")
    rater = row.get("rater")
    return ImportedRating(
        rater="" if rater is None else text_of(rater, "rater"),
        thumb=thumb,
        tags=tags_of(row.get("tags"), "tags"),
        notes="" if notes is None else text_of(notes, "notes"),
        created_at=time_of(row.get("timestamp") or row.get("created_at"), "timestamp"),
    )


def _decision(
    row: Mapping[str, Any], line: int, key: str, ratings: tuple[ImportedRating, ...]
) -> ImportedDecision:
    prompt = next((name for name in PROMPTS if row.get(name) is not None), None)
    answer = next((name for name in RESPONSES if row.get(name) is not None), None)
    agent = row.get("agent")
    messages: list[Message] = []
    metadata: dict[str, Any] = {"entry_id": key}
    response = ""
    if prompt and answer:
        messages, response = messages_of(row[prompt], prompt), _response(row[answer], answer)
    else:
        # only an agent knows what it asks for a scenario, and how it says its choice
        other_fields = {name: value for name, value in row.items() if name not in ("rating", "tags", "notes")}
        metadata = {ENTRY: check_json(other_fields, "entry")}
    candidates = row.get("candidates")
    return ImportedDecision(
        line=line,
        key=key,
        messages=messages,
        response=response,
        agent="" if agent is None else text_of(agent, "agent"),
        state=check_json(row.get("state"), "state"),
        candidates=(
            None
            if candidates is None
            else [
                _response(item, f"candidates[{i}]")
                for i, item in enumerate(list_of(candidates, "candidates"))
            ]
        ),
        metadata=metadata,
        ratings=ratings,
    )


def _response(value: Any, what: str) -> str:
    """A response as the text a policy would have said."""
    if isinstance(value, (Mapping, list)):
        return json.dumps(check_json(value, what), ensure_ascii=False)
    return text_of(value, what)


# --- Writing -----------------------------------------------------------------------------------------------


def _entry(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    yield {
        "entry_id": str(record.id),
        "agent": record.agent,
        "messages": plain(record.messages),
        "response": words(record.response),
        "state": record.state,
        "candidates": None
        if record.candidates is None
        else [item if isinstance(item, str) else item["response"] for item in record.candidates],
        "tags": list(record.tags),
    }


def _rating_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    plain(record.messages)  # what has no entry has no ratings either
    words(record.response)
    return each_rating(
        record,
        left_out,
        lambda rating: {
            "entry_id": str(record.id),
            "rating": "up" if good(rating) else "down",
            "tags": list(rating.tags),
            "notes": rating.notes,
            "rater": rating.rater,
            "timestamp": iso(rating.created_at),
        },
    )


SHAPES = (
    RowShape(
        "simulation",
        "entries, and beside them their ratings",
        (View.DECISIONS,),
        writer_by_record(_entry),
        "array",
        beside=("simulation-ratings",),
    ),
    RowShape(
        "simulation-ratings", "ratings of entries", (View.RATED,), writer_by_record(_rating_lines), "array"
    ),
)

SIMULATION = Format(
    "simulation",
    "simulation entries and ratings",
    recognises,
    read,
    SHAPES,
    two_files=True,
    ratings_row=ratings_row,
)
