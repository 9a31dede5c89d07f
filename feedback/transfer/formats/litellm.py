"""LiteLLM logs: spend logs of the proxy's database, and the standard logging payload of its callbacks.

In spend logs the prompt stands in `proxy_server_request` unless `messages` holds it, each perhaps as a JSON text, and
all of them are empty unless storing prompts is switched on. Texts that were cut or redacted are no texts of ours:
skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from feedback.transfer.formats.base import has, row_format
from feedback.transfer.formats.calls import (
    call_decision,
    json_value,
    metadata_retained,
    text_or_empty,
    whole_of,
)
from feedback.transfer.formats.records import Record, RowSkipped, number_of, tags_of, text_of, time_of

MARKERS = ("litellm_truncated", "redacted-by-litellm")
"""In a text that is not whole."""


def recognises(row: Mapping[str, Any]) -> bool:
    return has(row, "request_id", "call_type", "api_key") or has(row, "litellm_call_id", "model_parameters")


def records(row: Mapping[str, Any], line: int) -> Iterator[Record]:
    request_id = text_of(row.get("request_id") or row.get("id") or "", "request_id")
    request = json_value(row.get("messages"))
    body = json_value(row.get("proxy_server_request"))
    response = json_value(row.get("response"))
    if request in (None, {}, [], ""):
        request = body
    elif isinstance(request, list):
        tools = body.get("tools") if isinstance(body, Mapping) else None
        request = {"messages": request, "tools": tools}
    if row.get("status") == "failure":
        yield RowSkipped(line, request_id, "no response (error)")
        return
    if request in (None, {}, [], "") or response in (None, {}, [], ""):
        yield RowSkipped(line, request_id, "its prompt or response was not stored")
        return
    written = json.dumps([request, response], ensure_ascii=False)
    if any(marker in written for marker in MARKERS):
        yield RowSkipped(line, request_id, "its text was cut or redacted")
        return
    latency = row.get("request_duration_ms")
    if latency is None and row.get("response_time") is not None:
        latency = number_of(row["response_time"], "response_time") * 1000
    yield from call_decision(
        line,
        request_id,
        request,
        response,
        run_id=request_id[:200],
        policy=text_or_empty(row.get("model")),
        unit=text_or_empty(row.get("end_user")),
        tokens_in=whole_of(row.get("prompt_tokens")),
        tokens_out=whole_of(row.get("completion_tokens")),
        latency_ms=None if latency is None else number_of(latency, "request_duration_ms"),
        created_at=time_of(row.get("startTime"), "startTime"),
        tags=tags_of(json_value(row.get("request_tags")) or None, "request_tags"),
        metadata=metadata_retained(
            session_id=row.get("session_id"), trace_id=row.get("trace_id"), model_group=row.get("model_group")
        ),
    )


FORMAT = row_format(
    "litellm", "LiteLLM spend logs and callback payloads", recognises, records, (), verdicts=()
)
