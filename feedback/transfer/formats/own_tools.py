"""Files of our own tools: a simulation's entries and ratings, and FeedbackCollector's lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from feedback.messages import Message
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import Format, each_row, has, key_of, row_format, second_file, thumb_of
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    RowRefused,
    check_json,
    completion_of,
    list_of,
    mapping_of,
    messages_of,
    system_in,
    tags_of,
    text_of,
    text_or_json,
    time_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    View,
    each_rating,
    good,
    iso,
    plain,
    question,
    shape,
    words,
)

# --- Simulation --------------------------------------------------------------------------------------------

ENTRY = "entry"
"""Metadata key under which an entry without a prompt is kept whole: an agent knows how to ask it."""

PROMPTS = ("messages", "prompt", "query")
RESPONSES = ("response", "answer")


def recognises(row: JsonObject) -> bool:
    # a rating of another kind than up and down is a plain row's
    return "entry_id" in row and (row.get("rating") is None or bool(thumb_of(row["rating"])))


def ratings_row(row: JsonObject) -> bool:
    return not {"prompt", "messages", *RESPONSES} & set(row)


def read(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    ratings, keys = DiskMultimap(), DiskMultimap()

    def keep(row: JsonObject, line: int) -> None:
        _rating(row)
        ratings.add(_entry_id(row), (line, row))

    if ratings_path:
        any_row = False
        for record in second_file(ratings_path, keep, ("rating", "rater")):
            any_row = True
            yield record
        if not any_row and next(iter(ratings), None) is None:
            raise FormatRefused(f"{ratings_path}: expected ratings, found none")

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        key = _entry_id(row)
        if key in keys:
            raise RowError(f"entry_id {key!r} stands there twice")
        keys.add(key)
        inline = [_rating(row)] if row.get("rating") is not None else []
        # a person who changed their mind stands there twice, in that order
        yield _decision(row, line, key, (*inline, *(_rating(said) for _, said in ratings.all(key))))

    yield from each_row(path, records)
    for key, (line, _) in ratings:
        if key not in keys:
            reason = f"{ratings_path}: a rating of an entry that {path.name} does not hold"
            yield RowRefused(line, key, reason)


def _entry_id(row: JsonObject) -> str:
    value = row.get("entry_id")
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise RowError(f"entry_id: expected a text or a number, found {value_excerpt(value)}")
    return str(value)


def _rating(row: JsonObject) -> ImportedRating:
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


def _decision(row: JsonObject, line: int, key: str, ratings: tuple[ImportedRating, ...]) -> ImportedDecision:
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
    listed = () if candidates is None else list_of(candidates, "candidates")
    return ImportedDecision(
        line=line,
        key=key,
        messages=messages,
        response=response,
        agent="" if agent is None else text_of(agent, "agent"),
        state=check_json(row.get("state"), "state"),
        candidates=None
        if candidates is None
        else [_response(item, f"candidates[{index}]") for index, item in enumerate(listed)],
        metadata=metadata,
        ratings=ratings,
    )


def _response(value: object, what: str) -> str:
    """A response as the text a policy would have said."""
    return text_or_json(value, what) if isinstance(value, (Mapping, list)) else text_of(value, what)


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
    shape(
        "simulation",
        "entries, and beside them their ratings",
        View.DECISIONS,
        _entry,
        "array",
        beside=("simulation-ratings",),
    ),
    shape("simulation-ratings", "ratings of entries", View.RATED, _rating_lines, "array"),
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


# --- FeedbackCollector -------------------------------------------------------------------------------------


def _is_collector(row: JsonObject) -> bool:
    return has(row, "query", "response", "feedback_type")


def _collector(row: JsonObject, line: int) -> Iterator[Record]:
    metadata = dict(mapping_of(check_json(row.get("metadata") or {}, "metadata"), "metadata"))
    created_at = time_of(row.get("timestamp"), "timestamp")
    rating = _verdict(row)
    if correction := row.get("correction"):
        rating["correction"] = text_of(correction, "correction")
    user = metadata.get("user_id")
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        messages=with_system(system_in(row), messages_of(row.get("query"), "query"), "query"),
        response=completion_of(row.get("response"), "response"),
        metadata=metadata,
        created_at=created_at,
        ratings=(
            ImportedRating(rater=user if isinstance(user, str) else "", created_at=created_at, **rating),
        )
        if rating
        else (),
    )


def _verdict(row: JsonObject) -> dict[str, Any]:
    """Thumb, stars or score: what the type says the number is."""
    kind, value = text_of(row.get("feedback_type"), "feedback_type"), row.get("rating")
    if thumb := thumb_of(kind):
        return {"thumb": thumb}
    if value is None:
        return {}
    if "thumb" in kind.lower() and value in (1, 0, -1):
        return {"thumb": "up" if value == 1 else "down"}
    if isinstance(value, (bool, str)):
        thumb = ("up" if value else "down") if isinstance(value, bool) else thumb_of(value)
        if not thumb:
            raise RowError(
                f"rating: expected a number, true, false, up or down; found {value_excerpt(value)}"
            )
        return {"thumb": thumb}
    if isinstance(value, int) and 1 <= value <= 5:
        return {"stars": value}
    if isinstance(value, float) and value in (1.0, 2.0, 3.0, 4.0, 5.0) and "score" not in kind.lower():
        return {"stars": int(value)}
    if isinstance(value, (int, float)) and 0 <= value <= 1:
        return {"score": float(value)}
    raise RowError(f"rating: expected 1 to 5 stars or a score from 0 to 1, found {value_excerpt(value)}")


# --- Writing -----------------------------------------------------------------------------------------------


def _collector_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A line for each rating; what the format has no key for stands in its metadata."""
    try:
        query: object = question(record.messages)
    except NotSaid:
        query = plain(record.messages)
    response = words(record.response)

    def line(rating: ImportedRating) -> Line:
        kind, value = _type_of(rating)
        about = {
            "agent": record.agent,
            "model": record.policy,
            "notes": rating.notes,
            "tags": list(rating.tags),
        }
        return {
            "query": query,
            "response": response,
            "feedback_type": kind,
            "rating": value,
            "correction": rating.correction,
            "timestamp": iso(rating.created_at),
            "metadata": {"user_id": rating.rater, **{name: said for name, said in about.items() if said}},
        }

    return each_rating(record, left_out, line)


def _type_of(rating: ImportedRating) -> tuple[str, float | None]:
    """The type and the number of a rating, by its finest part."""
    if rating.score is not None:
        return "score", rating.score
    if rating.stars is not None:
        return "rating", rating.stars
    if rating.thumb:
        return f"thumbs_{rating.thumb}", None
    if rating.correction is None:
        raise NotSaid("no_verdict")
    return "correction", None


COLLECTOR_SHAPES = (shape("feedback_collector", "a line for each rating", View.RATED, _collector_lines),)

FEEDBACK_COLLECTOR = row_format(
    "feedback_collector",
    "FeedbackCollector JSON lines",
    _is_collector,
    _collector,
    COLLECTOR_SHAPES,
    verdicts=("feedback_type", "rating", "correction"),
)
