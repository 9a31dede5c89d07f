"""FeedbackCollector JSON lines: query, response, feedback_type, rating, correction, timestamp, metadata."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, key_of, row_format, thumb_of
from feedback.transfer.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    check_json,
    completion_of,
    mapping_of,
    messages_of,
    system_in,
    text_of,
    time_of,
    with_system,
)
from feedback.transfer.formats.writers import (
    Line,
    NotSaid,
    RowShape,
    View,
    each_rating,
    iso,
    plain,
    question,
    words,
    writer_by_record,
)


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "query", "response", "feedback_type")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
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


def _verdict(row: Mapping[str, Any]) -> dict[str, Any]:
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


def _rating_lines(record: ImportedDecision, left_out: Counter[str]) -> Iterator[Line]:
    """A line for each rating; what the format has no key for stands in its metadata."""
    try:
        query: Any = question(record.messages)
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


SHAPES = (
    RowShape("feedback_collector", "a line for each rating", (View.RATED,), writer_by_record(_rating_lines)),
)

FEEDBACK_COLLECTOR = row_format(
    "feedback_collector",
    "FeedbackCollector JSON lines",
    recognises,
    records,
    SHAPES,
    verdicts=("feedback_type", "rating", "correction"),
)
