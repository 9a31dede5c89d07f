"""FeedbackCollector JSON lines: query, response, feedback_type, rating, correction, timestamp, metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.formats.base import has, key_of, row_format, thumb_of
from feedback.formats.records import (
    ImportedDecision,
    ImportedRating,
    Record,
    RowError,
    check_json,
    mapping_of,
    messages_of,
    shown,
    text_of,
    time_of,
)


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "query", "response", "feedback_type")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    metadata = dict(mapping_of(check_json(row.get("metadata") or {}, "metadata"), "metadata"))
    at = time_of(row.get("timestamp"), "timestamp")
    rating = _verdict(row)
    if correction := row.get("correction"):
        rating["correction"] = text_of(correction, "correction")
    user = metadata.get("user_id")
    yield ImportedDecision(
        line=line,
        key=key_of(row),
        messages=messages_of(row.get("query"), "query"),
        response=text_of(row.get("response"), "response"),
        metadata=metadata,
        created_at=at,
        ratings=(ImportedRating(rater=user if isinstance(user, str) else "", created_at=at, **rating),)
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
            raise RowError(f"rating: expected a number, true, false, up or down; found {shown(value)}")
        return {"thumb": thumb}
    if isinstance(value, int) and 1 <= value <= 5:
        return {"stars": value}
    if isinstance(value, float) and value in (1.0, 2.0, 3.0, 4.0, 5.0) and "score" not in kind.lower():
        return {"stars": int(value)}
    if isinstance(value, (int, float)) and 0 <= value <= 1:
        return {"score": float(value)}
    raise RowError(f"rating: expected 1 to 5 stars or a score from 0 to 1, found {shown(value)}")


FORMAT = row_format("feedback_collector", "FeedbackCollector JSON lines", recognises, records)
