"""Helicone requests with their bodies. The user's feedback is a thumb; scores have no stated scale and are outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import has, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import (
    ImportedOutcome,
    ImportedRating,
    Record,
    RowError,
    RowSkipped,
    mapping_of,
    number_of,
    text_of,
    time_of,
    uuid_of,
)
from feedback.transfer.formats.verdicts import outcome_name

THUMBS = {"true": "up", "false": "down"}


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "request_id", "request_body") and ("feedback_rating" in row or "response_body" in row)


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    request_id = text_of(row.get("request_id"), "request_id", required=True)
    request, response = (json_value(row.get(name)) for name in ("request_body", "response_body"))
    status = row.get("response_status")
    failed = isinstance(status, int) and not 200 <= status < 300
    if failed or (isinstance(response, Mapping) and "error" in response and "choices" not in response):
        yield RowSkipped(line, request_id, "no response (error)")
        return
    if request in (None, {}, "") or response in (None, {}, ""):
        yield RowSkipped(line, request_id, "exported without its bodies")
        return
    delay = row.get("delay_ms")
    yield from call_decision(
        line,
        request_id,
        request,
        response,
        id=uuid_of(request_id),
        run_id=request_id[:200],
        policy=text_or_empty(row.get("model") or row.get("response_model") or row.get("request_model")),
        unit=text_or_empty(row.get("request_user_id")),
        tokens_in=whole_of(row.get("prompt_tokens")),
        tokens_out=whole_of(row.get("completion_tokens")),
        latency_ms=None if delay is None else number_of(delay, "delay_ms"),
        created_at=time_of(row.get("request_created_at"), "request_created_at"),
        metadata=metadata_retained(properties=row.get("properties") or row.get("request_properties")),
        ratings=tuple(_feedback(row)),
        outcomes=tuple(
            ImportedOutcome(outcome_name(str(name)), number_of(value, f"scores.{name}"))
            for name, value in mapping_of(row.get("scores") or {}, "scores").items()
            if value is not None
        ),
    )


def _feedback(row: Mapping[str, Any]) -> Iterator[ImportedRating]:
    rating = row.get("feedback_rating")
    if rating in (None, ""):
        return
    thumb = THUMBS.get(str(rating).lower())
    if thumb is None:
        raise RowError(f"feedback_rating: expected true, false or null, found {value_excerpt(rating)}")
    at = time_of(row.get("feedback_created_at"), "feedback_created_at")
    yield ImportedRating(rater=text_or_empty(row.get("request_user_id")), thumb=thumb, created_at=at)


VERDICTS = ("feedback_id", "feedback_rating", "feedback_created_at", "scores")
"""Columns of the format that look like a verdict."""

FORMAT = row_format("helicone", "Helicone requests with feedback", recognises, records, (), verdicts=VERDICTS)
