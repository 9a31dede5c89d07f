"""OpenAI chat completions: the form in which every other dialect is written and read here too."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from django.utils import timezone
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError

from rl.decoding.unique_items import portable
from rl.serving.assembly import Assembly, joined
from rl.serving.base import Ask, BackendFailed, Extras, Piece

LONGEST_ANSWER = 16 * 1024**2
"""Bytes of an answer, or of one line of a stream, at most."""
LONGEST_RETRY_S = 86_400.0
"""A longer `Retry-After` is passed on as a day."""
MALFORMED = "malformed"
"""Kind of a failure whose cause is what the server sent: it is up, and sent no answer."""
HIDDEN = b"[hidden]"
DONE: Mapping[str, object] = {}
"""Stands for the line `data: [DONE]`; compared by identity."""
DEEPEST = 300
"""Levels of lists and objects within each other, at most: what is deeper can be neither read nor written here."""
EVENT_LINE = re.compile(r"$|:|(?:data|event|id|retry)\b")


def key_hidden(raw: bytes, key: str) -> bytes:
    """What a server sent, without the API key that some repeat in their errors; also as it stands within JSON."""
    if key:
        for secret in (key, json.dumps(key)[1:-1], key.replace("/", "\\/")):
            raw = raw.replace(secret.encode(), HIDDEN)
    return raw


def body_read(response: BaseHTTPResponse, deadline: float, key: str = "") -> bytes:
    """The rest of an answer, without the API key. Raises BackendFailed where it is too long, or not there by the
    deadline."""
    parts: list[bytes] = []
    size = 0
    try:
        while part := response.read1(65_536):
            parts.append(part)
            size += len(part)
            if size > LONGEST_ANSWER or time.monotonic() > deadline:
                response.close()
                raise BackendFailed("the answer is too long, or takes too long to arrive", kind="timeout")
    except (HTTPError, OSError) as error:
        raise BackendFailed(f"the answer broke off: {error}") from error
    return key_hidden(b"".join(parts), key)


def object_read(data: str, name: str) -> Mapping[str, object]:
    """A JSON object; a number that JSON does not have, such as -Infinity, becomes null.

    Raises BackendFailed where it is no object, nested too deep, or an error.
    """
    try:
        found = json.loads(data, parse_float=_finite, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise BackendFailed(f"{name} sent what is not JSON: {data[:200]!r}", kind=MALFORMED) from error
    if not isinstance(found, dict):
        raise BackendFailed(f"{name} sent no JSON object: {data[:200]!r}", kind=MALFORMED)
    if data.count("[") + data.count("{") > DEEPEST and _is_deep(found):
        raise BackendFailed(f"{name} sent JSON of more than {DEEPEST} levels", kind=MALFORMED)
    if fault := found.get("error"):
        said = fault.get("message") if isinstance(fault, Mapping) else fault
        raise BackendFailed(f"{name} failed within its answer: {said or data[:200]}", kind=MALFORMED)
    return found


def _finite(text: str) -> float | None:
    found = float(text)
    return found if math.isfinite(found) else None


def _is_deep(found: object) -> bool:
    level = [found]
    for _ in range(DEEPEST):
        inner = (
            one.values() if isinstance(one, dict) else one for one in level if isinstance(one, (dict, list))
        )
        level = [child for children in inner for child in children]
    return bool(level)


def error_read(raw: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an error body, or what was said instead."""
    try:
        error = json.loads(raw)["error"]
        if isinstance(error, dict):
            code = error.get("code") or error.get("type")
            found = (error.get("message"), code, error.get("param"))
            return str(found[0] or "no reason given"), str(found[1] or ""), str(found[2] or "")
        return str(error), "", ""
    except (ValueError, KeyError, TypeError, RecursionError):
        return raw[:1000].decode("utf-8", "replace") or "no reason given", "", ""


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds a server asked to wait, from a number of seconds or a date; None where it did not say."""
    text = (headers.get("Retry-After") or "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return min(float(text), LONGEST_RETRY_S)
    try:
        left = (parsedate_to_datetime(text) - timezone.now()).total_seconds()
        return min(max(left, 0.0), LONGEST_RETRY_S)
    except (TypeError, ValueError):
        return None


def request_id(headers: Mapping[str, str]) -> str:
    for name in ("x-request-id", "request-id", "apim-request-id", "x-amzn-requestid"):
        if found := headers.get(name):
            return str(found)[:200]
    return ""


def events_read(
    response: BaseHTTPResponse, deadline: float, name: str, key: str = ""
) -> Iterator[Mapping[str, object]]:
    """The JSON objects of an event stream, each as soon as it has arrived; DONE at `[DONE]`, and nothing after it."""
    stray, events = "", 0
    for line in _lines(response, deadline, name, key):
        if not EVENT_LINE.match(line):
            stray = stray or line
        data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
        if data == "[DONE]":
            yield DONE
            return
        if data:  # else a comment, another field of an event, or nothing
            events += 1
            yield object_read(data, name)
    if stray and not events:
        raise BackendFailed(f"{name} sent no event stream: {stray[:200]!r}", kind=MALFORMED)


def _lines(response: BaseHTTPResponse, deadline: float, name: str, key: str) -> Iterator[str]:
    held = b""
    while part := response.read1(65_536):
        if time.monotonic() > deadline:
            raise BackendFailed(f"{name} takes too long", kind="timeout")
        *whole, held = (held + part).split(b"\n")
        if len(held) > LONGEST_ANSWER:
            raise BackendFailed(f"{name} sent a line of more than {LONGEST_ANSWER:,} bytes", kind=MALFORMED)
        for line in whole:
            yield key_hidden(line, key).decode("utf-8", "replace").rstrip("\r")
    if held:
        yield key_hidden(held, key).decode("utf-8", "replace").rstrip("\r")


Object = Mapping[str, Any]

READ = {"id", "object", "created", "model", "choices", "usage", "error"}
"""Fields of a completion that are read here; every other one is passed on as it came."""
CHOICE_READ = {"index", "delta", "message", "text", "finish_reason"}
OF_OTHER_DIALECTS = {"thinking_blocks", "blocks", "items", "content_parts"}
"""Fields of a message that Ratchet itself gives, for what chat completions have no field for."""
ABOUT_THE_CALLER = ("user", "metadata")
"""Fields that say who asks. Ratchet records them itself; an endpoint gets them where its row says so."""


@dataclass(frozen=True)
class Sent:
    """A request's body in a dialect, and the fields of the chat request that the dialect has none for."""

    body: dict[str, object]
    left_out: tuple[str, ...] = ()


def chat_body(ask: Ask, model: str, schemas: str, *, forward_fields: bool) -> dict[str, object]:
    """A chat request. schemas: how the endpoint is told the form of an answer, as `Upstream.Schemas` names it."""
    extra = {key: value for key, value in ask.extra.items() if forward_fields or key not in ABOUT_THE_CALLER}
    own_format = extra.pop("response_format", None)
    body: dict[str, object] = {**extra, "model": model, "messages": list(ask.messages)}
    chosen: Mapping[str, object] = {
        ask.limit_field: ask.max_tokens,
        "temperature": ask.temperature,
        "top_p": ask.top_p,
        "stop": list(ask.stop) or None,
        "seed": ask.seed,
        "response_format": _response_format(ask, own_format, schemas),
    }
    return body | {key: value for key, value in chosen.items() if value is not None}


def _response_format(ask: Ask, own_format: object, schemas: str) -> object:
    """The client's own format as it is where the endpoint takes schemas, else the agent's schema as it takes it."""
    if schemas == "json_schema" and own_format is not None:
        return own_format
    if ask.response_schema is None or schemas == "none":
        return None
    schema = portable(ask.response_schema)
    if schema and schemas == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema, "strict": True}}
    # llama.cpp's servers hold an answer to a schema that stands beside `json_object`
    return {"type": "json_object", "schema": schema} if schema else {"type": "json_object"}


def request_write(chat: Object) -> Sent:
    """The request of an endpoint that speaks chat completions: without the fields that other dialects put into
    messages here."""
    messages = [
        {key: value for key, value in one.items() if key not in OF_OTHER_DIALECTS} for one in chat["messages"]
    ]
    named = set().union(*chat["messages"]) & OF_OTHER_DIALECTS
    return Sent({**chat, "messages": messages}, tuple(sorted(named)))


def chat_whole(body: Object, name: str) -> Object:
    """A whole completion, its first choice in front. Raises BackendFailed where it is none."""
    choices = body.get("choices")
    if isinstance(choices, list) and len(choices) > 1:
        # the first is the one with index 0, wherever it stands
        choices = sorted(choices, key=lambda one: one.get("index") != 0 if isinstance(one, Mapping) else True)
    first = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(first, Mapping) or not any(
        first.get(key) is not None for key in CHOICE_READ - {"index"}
    ):
        raise BackendFailed(f"{name} sent no chat completion: {str(body)[:200]}", kind=MALFORMED)
    return {**body, "choices": choices}


def chat_chunks(events: Iterable[Object], name: str) -> Iterator[Object]:
    """The chunks of a stream. Raises BackendFailed where it breaks off before its end."""
    has_reason = False
    for chunk in events:
        if chunk is DONE:
            return
        choices = chunk.get("choices")
        has_reason = has_reason or any(
            isinstance(one, Mapping) and one.get("finish_reason")
            for one in (choices if isinstance(choices, list) else ())
        )
        yield chunk
    if not has_reason:
        raise BackendFailed(f"{name} closed the connection before the end of its answer")


@dataclass
class _Completion:
    """What the chunks say beside the message."""

    source: dict[str, object]
    usage: Object | None = None
    reason: object = None
    fields: dict[str, object] = field(default_factory=dict)
    of_choice: dict[str, object] = field(default_factory=dict)
    pending: dict[str, object] = field(default_factory=dict)
    """Fields of the completion that wait for a chunk with a choice."""
    _told: tuple[object, ...] = ()

    def news(self) -> dict[str, Any]:
        """Who answers and the counts so far, where they changed: of an answer that breaks off they are all there is."""
        if self._told == (self.source, self.usage):
            return {}
        self._told = (dict(self.source), self.usage)
        return {**self.counts(), "extras": Extras(dict(self.source), self.usage)}

    def counts(self) -> dict[str, Any]:
        usage = self.usage or {}
        return {
            "tokens_in": count_of(usage, "prompt_tokens", "input_tokens"),
            "tokens_out": count_of(usage, "completion_tokens", "output_tokens"),
        }

    def read(self, chunk: Object) -> None:
        named = {key: chunk.get(key) for key in ("id", "model")}
        self.source |= {key: value for key, value in named.items() if isinstance(value, str) and value}
        self.usage = _usage(chunk) or self.usage
        more = {key: value for key, value in chunk.items() if key not in READ and value is not None}
        # what every chunk repeats is passed on once
        self.pending |= {key: value for key, value in more.items() if self.fields.get(key) != value}
        self.fields |= more


def pieces(
    chunks: Iterable[Object], request_id: str, name: str, left_out: tuple[str, ...] = ()
) -> Iterator[Piece]:
    """The pieces that chunks come to, or one whole completion. Every field goes on with the piece it came with."""
    assembly, others = Assembly(), {}  # type: ignore[var-annotated]
    found = _Completion({"request_id": request_id} if request_id else {})
    first = None
    for chunk in chunks:
        found.read(chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            index = choice.get("index") or 0
            first = index if first is None else first
            said, whole = _said(choice)
            if index != first:
                other = others.setdefault(index, Assembly())
                other.add(other.read(said, whole=whole))
                continue
            found.reason = choice.get("finish_reason") or found.reason
            beside = {key: value for key, value in choice.items() if key not in CHOICE_READ}
            beside = {key: value for key, value in beside.items() if value is not None}
            found.of_choice |= {k: joined(k, found.of_choice.get(k), v) for k, v in beside.items()}
            delta = assembly.read(said, whole=whole)
            assembly.add(delta)
            if any(value not in ("", None) for value in delta.values()) or beside or (whole and delta):
                yield Piece(delta, beside, found.pending, **found.news())
                found.pending = {}
    if first is None:
        raise BackendFailed(f"{name} sent no chat completion: it holds no choice", kind=MALFORMED)
    yield Piece(
        body=found.pending,
        end=True,
        finish_reason=found.reason if isinstance(found.reason, str) else None,
        **found.counts(),
        extras=Extras(
            found.source,
            found.usage,
            found.of_choice,
            found.fields,
            [other.message for other in others.values()],
            left_out,
        ),
    )


def _said(choice: Object) -> tuple[object, bool]:
    """The delta or the message of a choice, and whether it is a whole message."""
    if isinstance(delta := choice.get("delta"), Mapping):
        return delta, False
    if isinstance(message := choice.get("message"), (Mapping, str)):
        return ({"content": message} if isinstance(message, str) else message), True
    return {"content": choice.get("text")}, False


def _usage(chunk: Object) -> Object | None:
    """Token counts of a chunk; Groq's stand in an object of its own."""
    for holder in (chunk, chunk.get("x_groq")):
        if isinstance(holder, Mapping) and isinstance(usage := holder.get("usage"), Mapping) and usage:
            return usage
    return None


def objects_in(value: object) -> list[Object]:
    """The objects of a list; none where it is no list."""
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


@dataclass(frozen=True)
class Call:
    """A call of a function in a message, or the part of one in a delta."""

    id: object
    name: object
    arguments: str
    index: int


def calls_of(said: Mapping[str, object]) -> list[Call]:
    """The calls of functions in a message or a delta; no other dialect has words for others."""
    return [
        Call(
            call.get("id"),
            function.get("name"),
            str(function.get("arguments") or ""),
            int(call.get("index") or 0),
        )
        for call in objects_in(said.get("tool_calls"))
        if isinstance(function := call.get("function"), Mapping)
    ]


def count_of(usage: Object, *names: str) -> int | None:
    """The first of these counts that is there; None where it is no count."""
    found = next((usage[name] for name in names if name in usage), None)
    is_count = isinstance(found, (int, float)) and not isinstance(found, bool) and 0 <= found < 2**31
    return int(found) if is_count else None  # type: ignore[arg-type]
