"""Portkey log exports: `request.body` and `response.body` as columns. They hold no feedback.

A nested spelling (`request: {body}`) is read leniently: it was not seen in a real file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import has, key_of, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import Record, RowSkipped, number_of, time_of


def recognises(row: Mapping[str, Any]) -> bool:
    if has(row, "request.body", "response.body"):
        return True
    request, response = row.get("request"), row.get("response")
    return (
        isinstance(request, Mapping)
        and isinstance(response, Mapping)
        and "body" in request
        and "body" in response
    )


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    request, response = (json_value(_body(row, name)) for name in ("request", "response"))
    response_body = object_or_empty(response)
    key = key_of(row) or text_or_empty(response_body.get("id"))
    status, succeeded = row.get("response_status_code"), row.get("is_success")
    if succeeded in (0, "0", False) or (isinstance(status, int) and not 200 <= status < 300):
        yield RowSkipped(line, key, "no response (error)")
        return
    if request in (None, {}, "") or response in (None, {}, ""):
        yield RowSkipped(line, key, "exported without its bodies")
        return
    latency = row.get("response_time")
    yield from call_decision(
        line,
        key,
        request,
        response,
        run_id=text_or_empty(row.get("id") or response_body.get("id")),
        policy=text_or_empty(row.get("ai_model") or response_body.get("model")),
        tokens_in=whole_of(row.get("req_units")),
        tokens_out=whole_of(row.get("res_units")),
        latency_ms=None if latency is None else number_of(latency, "response_time"),
        created_at=time_of(row.get("created_at"), "created_at"),
        metadata=metadata_retained(trace_id=row.get("trace_id"), ai_org=row.get("ai_org")),
    )


def _body(row: Mapping[str, Any], name: str) -> Any:
    nested = row.get(name)
    return row.get(f"{name}.body", nested.get("body") if isinstance(nested, Mapping) else None)


FORMAT = row_format(
    "portkey",
    "Portkey logs",
    recognises,
    records,
    (),
    untested_parts="columns from the documentation; a nested export was not seen",
    verdicts=(),
)
