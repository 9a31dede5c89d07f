"""Request and response logs of a data flywheel: `timestamp`, `workload_id`, `client_id`, `request`, `response`.

The workload is the agent. Rows without the two ids are read, too, and OpenPipe's, whose columns are `input` and
`output`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import key_of, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    object_or_empty,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import Record, time_of
from feedback.transfer.formats.tensorzero import slug


def recognises(row: Mapping[str, Any]) -> bool:
    request, response = _call(row)
    if "workload_id" in row and "request" in row:
        return True
    if not isinstance(request, Mapping) or not isinstance(response, Mapping):
        return False
    return "messages" in request and ("choices" in response or "error" in response)


def _call(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """(request, response); OpenPipe calls them input and output."""
    names = ("request", "response") if "request" in row else ("input", "output")
    return json_value(row.get(names[0])), json_value(row.get(names[1]))


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    request, response = _call(row)
    request_body = object_or_empty(request)
    answered = object_or_empty(response)
    usage = object_or_empty(answered.get("usage"))
    workload = text_or_empty(row.get("workload_id"))
    yield from call_decision(
        line,
        key_of(row) or text_or_empty(answered.get("id")),
        request,
        response,
        agent=slug(workload),
        run_id=text_or_empty(answered.get("id")),
        policy=text_or_empty(answered.get("model") or request_body.get("model")),
        tokens_in=whole_of(usage.get("prompt_tokens")),
        tokens_out=whole_of(usage.get("completion_tokens")),
        created_at=time_of(row.get("timestamp"), "timestamp"),
        tags=(workload[:100],) if workload else (),
        metadata=metadata_retained(client_id=row.get("client_id")),
    )


FORMAT = row_format("flywheel", "Request and response logs by workload", recognises, records, (), verdicts=())
