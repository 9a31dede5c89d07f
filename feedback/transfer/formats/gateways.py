"""Requests and responses that gateways log: Helicone, LiteLLM, Portkey, data flywheels, OpenAI's stored completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import (
    Format,
    decisions_first,
    holds,
    objects_in,
    row_format,
    rows_in_page,
)
from feedback.transfer.formats.calls import json_value, text_or_empty
from feedback.transfer.formats.cells import JsonObject
from feedback.transfer.formats.declared import Call, at
from feedback.transfer.formats.files import DiskMultimap
from feedback.transfer.formats.records import ImportedRating, Record, RowError, RowLeftOut, time_of

THUMBS = {"true": "up", "false": "down"}


def _helicone_feedback(row: JsonObject) -> tuple[ImportedRating, ...]:
    """The user's feedback is a thumb."""
    rating = row.get("feedback_rating")
    if rating in (None, ""):
        return ()
    thumb = THUMBS.get(str(rating).lower())
    if thumb is None:
        raise RowError(f"feedback_rating: expected true, false or null, found {value_excerpt(rating)}")
    given_at = time_of(row.get("feedback_created_at"), "feedback_created_at")
    return (
        ImportedRating(rater=text_or_empty(row.get("request_user_id")), thumb=thumb, created_at=given_at),
    )


HELICONE = row_format(
    "helicone",
    "Helicone requests with feedback",
    holds("request_id request_body feedback_rating", "request_id request_body response_body"),
    Call(
        request="request_body",
        answer="response_body",
        own="request_id",
        own_id=True,
        fields={
            "policy": "model || response_model || request_model",
            "unit": "request_user_id",
            "tokens_in": "prompt_tokens",
            "tokens_out": "completion_tokens",
            "latency_ms": "delay_ms",
            "created_at": "request_created_at",
        },
        metadata={"properties": "properties || request_properties"},
        left_out={
            "response_status < `200` || response_status >= `300`": "no response (error)",
            "json(response_body).error && !(json(response_body).choices)": "no response (error)",
            "!json(request_body) || !json(response_body)": "exported without its bodies",
        },
        outcomes="scores",
        ratings=_helicone_feedback,
    ),
    verdicts=("feedback_id", "feedback_rating", "feedback_created_at", "scores"),
)

_litellm_call = Call(
    own="request_id || id",
    own_required=False,
    fields={
        "policy": "model",
        "unit": "end_user",
        "tokens_in": "prompt_tokens",
        "tokens_out": "completion_tokens",
        "latency_ms": "request_duration_ms",
        "latency_s": "response_time",
        "created_at": "startTime",
        "tags": "request_tags",
    },
    metadata={"session_id": "session_id", "trace_id": "trace_id", "model_group": "model_group"},
    left_out={"status == 'failure'": "no response (error)"},
)
MARKERS = ("litellm_truncated", "redacted-by-litellm")
"""In a text that is not whole."""


def _litellm(row: JsonObject, line: int) -> Iterator[Record]:
    """The prompt stands in `proxy_server_request` unless `messages` holds it. Both are empty unless storing prompts is
    switched on. Texts that were cut or redacted are no texts of ours."""
    names = ("messages", "proxy_server_request", "response")
    messages, body, response = (json_value(row.get(name)) for name in names)
    request = {"messages": messages, "tools": at(body, "tools")} if messages else body
    if row.get("status") != "failure" and not (request and response):
        raise RowLeftOut("its prompt or response was not stored")
    written = json.dumps([request, response], ensure_ascii=False)
    if any(marker in written for marker in MARKERS):
        raise RowLeftOut("its text was cut or redacted")
    yield _litellm_call.decision(row, line, request=request, answer=response)


LITELLM = row_format(
    "litellm",
    "LiteLLM spend logs and callback payloads",
    holds("request_id call_type api_key", "litellm_call_id model_parameters"),
    _litellm,
    verdicts=(),
)


def _is_portkey(row: JsonObject) -> bool:
    if "request.body" in row and "response.body" in row:
        return True
    parts = (row.get("request"), row.get("response"))
    return all(isinstance(part, Mapping) and "body" in part for part in parts)


_PORTKEY_REQUEST, _PORTKEY_ANSWER = (
    f'json("{side}.body") || json({side}.body)' for side in ("request", "response")
)

PORTKEY = row_format(
    "portkey",
    "Portkey logs",
    _is_portkey,
    Call(
        request=_PORTKEY_REQUEST,
        answer=_PORTKEY_ANSWER,
        own=f"id || ({_PORTKEY_ANSWER}).id",
        own_required=False,
        fields={
            "policy": "ai_model",
            "tokens_in": "req_units",
            "tokens_out": "res_units",
            "latency_ms": "response_time",
            "created_at": "created_at",
        },
        metadata={"trace_id": "trace_id", "ai_org": "ai_org"},
        left_out={
            "is_success == `false` || is_success == `0` || is_success == '0'": "no response (error)",
            "response_status_code < `200` || response_status_code >= `300`": "no response (error)",
            f"!({_PORTKEY_REQUEST}) || !({_PORTKEY_ANSWER})": "exported without its bodies",
        },
    ),
    untested_parts="columns from the documentation; a nested export was not seen",
    verdicts=(),
)

_FLYWHEEL = ("json(request) || json(input)", "json(response) || json(output)")
"""Request and response; OpenPipe calls them input and output."""

_flywheel_call = Call(
    request=_FLYWHEEL[0],
    answer=_FLYWHEEL[1],
    own=f"({_FLYWHEEL[1]}).id",
    own_required=False,
    fields={"agent": "workload_id", "created_at": "timestamp"},
    metadata={"client_id": "client_id"},
)


def _is_flywheel(row: JsonObject) -> bool:
    names = ("request", "response") if "request" in row else ("input", "output")
    if "workload_id" in row and "request" in row:
        return True
    request, response = (json_value(row.get(name)) for name in names)
    if not isinstance(request, Mapping) or not isinstance(response, Mapping):
        return False
    return "messages" in request and ("choices" in response or "error" in response)


def _flywheel(row: JsonObject, line: int) -> Iterator[Record]:
    workload = text_or_empty(row.get("workload_id"))
    yield _flywheel_call.decision(row, line, tags=(workload[:100],) if workload else ())


FLYWHEEL = row_format(
    "flywheel", "Request and response logs by workload", _is_flywheel, _flywheel, verdicts=()
)

# --- OpenAI's stored completions -----------------------------------------------------------------------------

_completion = Call(
    request="{messages: messages, tools: tools}",
    answer="""{choices: choices, usage: usage, model: model, system_fingerprint: system_fingerprint,
        service_tier: service_tier}""",
    own="id",
    fields={"unit": "input_user", "created_at": "created"},
    metadata={"request_id": "request_id", "stored": "metadata"},
)


def _is_completion(row: JsonObject) -> bool:
    return row.get("object") == "chat.completion"


_is_message = holds("id role content content_parts")


def _read_stored(path: Path, ratings_path: Path | None) -> Iterator[Record]:
    """Completions and the listing of their messages, which are named after them: `<completion id>-<n>`."""
    prompts = DiskMultimap()
    any_completion = False
    for row, _ in objects_in(path, ratings_path):
        if _is_completion(row):
            any_completion = True
        elif _is_message(row):
            completion, _, number = str(row.get("id")).rpartition("-")
            prompts.add(completion, [int(number) if number.isdigit() else 0, row])
    alone = next(iter(prompts), None) is None

    def records(row: JsonObject, line: int) -> Iterator[Record]:
        if not _is_completion(row):
            if any_completion:
                return
            raise RowError(
                "a stored message without its completion is no decision: import the listing of the completions with "
                "this file as its --ratings-file"
            )
        listed = sorted(prompts.all(str(row.get("id"))), key=lambda item: item[0])
        messages = row.get("messages") or [
            {**message, "content": message.get("content") or message.get("content_parts")}
            for _, message in listed
        ]
        if not messages and alone:
            raise RowError(
                "a stored completion without its prompt is no decision: bring the listing of its messages as "
                "--ratings-file"
            )
        if not messages:
            raise RowLeftOut("its prompt is not in the file of messages")
        yield _completion.decision(row, line, request={"messages": messages, "tools": row.get("tools")})

    return decisions_first(path, ratings_path, records, (), pages=True)


OPENAI_STORED = Format(
    "openai_stored",
    "OpenAI stored completions and their messages",
    lambda row: any(_is_completion(item) or _is_message(item) for item in rows_in_page(row)),
    _read_stored,
    two_files=True,
    ratings_row=lambda row: any(map(_is_message, rows_in_page(row))),
)
