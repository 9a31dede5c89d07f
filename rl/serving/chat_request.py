"""Read an OpenAI chat completion request: everything that is wrong with it is refused before anybody is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from pydantic import Field

from backend import limits
from backend.bodies import value_excerpt
from feedback.storage.factories import check_reserved
from feedback.storage.fields import Json, JsonObject, Messages, Name, Storable
from feedback.storage.validation import Check
from rl.serving.base import Ask, SentMessage, ServingRefused

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
READ = {
    "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "stop", "seed", "n",
}  # fmt: skip
"""Fields that are read here; every other one goes to the backend as it is."""
ModelName: TypeAlias = Annotated[Storable, Field(max_length=1000)]


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered."""

    model: str
    ask: Ask
    stream: bool = False
    include_usage: bool = False
    unit: str = ""
    run_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    body_hash: str = ""
    """SHA-256 of the body: tells a retry from another question."""
    has_format: bool = False
    """The client said how the answer is to be formed, or gave tools: the agent's own schema stands back."""


def chat_request(body: Any, *, unit: str = "", run_id: str = "", caller: str = "") -> ChatRequest:
    """Read a body; unit and run_id are what the headers say, and win over the body's `user` and metadata.
    caller: whose request it is, such as key:3: the same words of another caller are another request.

    Raises ServingRefused, naming the parameter.
    """
    if not isinstance(body, Mapping):
        raise ServingRefused(f"expected a JSON object, found {type(body).__name__}")
    model = body.get("model")
    if not isinstance(model, str) or not model.strip():
        raise _fault("model", "an agent, a policy, or agent:policy", model)
    messages = read_messages(body.get("messages"))
    stream, include_usage = _stream(body)
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise _fault("metadata", "an object", metadata)
    check_metadata(metadata)
    if body.get("n") not in (None, 1):
        raise _fault("n", "1: a completion is one decision", body["n"])
    limit_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    tools = _tools(body)
    request = ChatRequest(
        model=model,
        ask=Ask(
            messages=messages,
            max_tokens=_parse_int(body, limit_field, 1, 2**31 - 1),
            temperature=_number(body, "temperature", 0, 2),
            top_p=_number(body, "top_p", 0, 1),
            stop=_stop(body.get("stop")),
            seed=_parse_int(body, "seed", 0, 2**63 - 1),
            response_schema=read_format(body.get("response_format")),
            extra={name: value for name, value in body.items() if name not in READ and value is not None},
            limit_field=limit_field,
        ),
        stream=stream,
        include_usage=include_usage,
        unit=unit or _text(body, "user") or _text(body, "safety_identifier"),
        run_id=run_id or _text(metadata, "run_id"),
        metadata=metadata,
        body_hash=hashlib.sha256(json.dumps([caller, unit, body], sort_keys=True).encode()).hexdigest(),
        has_format=body.get("response_format") is not None or tools,
    )
    _storable(request)
    return request


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse the keys of metadata that only Ratchet writes. Raises ServingRefused."""
    check = Check()
    check_reserved(check, "", metadata, reserved=False)
    if fault := check.fields.get("metadata"):
        raise ServingRefused(f"metadata: {fault}", param="metadata")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages as a chat has them. Raises ServingRefused, naming the place."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise _fault("messages", "a list of at least one {role, content}", value)
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise _fault(where, "an object {role, content}", message)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise _fault(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        _content(message, where)
    return [dict(message) for message in value]


def _content(message: SentMessage, where: str) -> None:
    content = message.get("content")
    if isinstance(content, str):
        return
    if content in (None, []) and message.get("role") in ("assistant", "tool", "function"):
        return  # an answer may be a refusal, calls, or nothing; a result may be nothing
    if not isinstance(content, list) or not content:
        raise _fault(f"{where}.content", 'a text or a list of {"type": "text", "text": ...}', content)
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or (kind == "text" and not isinstance(part.get("text"), str)):
            raise _fault(f"{where}.content[{number}]", 'a part such as {"type": "text", "text": ...}', part)


def read_format(value: Any) -> Mapping[str, Any] | None:
    """The JSON schema a `response_format` asks for: None for text, {} for any object. Raises ServingRefused."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise _fault("response_format", "a type of text, json_object or json_schema", value)
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(named.get("name"), str):
        raise _fault("response_format.json_schema", "{name, schema} with a JSON schema", named)
    # the size before the check: checking 9 MB took minutes. A schema within the limit is checked in milliseconds
    try:
        length = len(json.dumps(schema))
        if length > limits.SCHEMA_CHARACTERS:
            raise ServingRefused(
                f"response_format.json_schema.schema: expected a JSON schema of at most "
                f"{limits.SCHEMA_CHARACTERS:,} characters, found {length:,}",
                param="response_format",
            )
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError) as error:
        message = error.message if isinstance(error, SchemaError) else "nested too deep"
        raise ServingRefused(
            f"response_format.json_schema.schema: expected a JSON schema, found: {message[:300]}",
            param="response_format",
        ) from error
    return schema


def _stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    stream, options = body.get("stream") or False, body.get("stream_options")
    if not isinstance(stream, bool):
        raise _fault("stream", "true or false", stream)
    if options is None:
        return stream, False
    if not stream or not isinstance(options, Mapping):
        raise _fault("stream_options", "an object, beside stream: true", options)
    usage = options.get("include_usage") or False
    if not isinstance(usage, bool):
        raise _fault("stream_options.include_usage", "true or false", usage)
    return stream, usage


def _tools(body: Mapping[str, Any]) -> bool:
    """True if tools are offered. Raises ServingRefused where they are not as OpenAI has them."""
    tools = body.get("tools")
    if tools is None:
        return bool(body.get("functions"))
    if not isinstance(tools, list):
        raise _fault("tools", 'a list of {"type": "function", "function": {"name": ...}}', tools)
    if len(tools) > limits.TOOLS:
        raise ServingRefused(
            f"tools: expected at most {limits.TOOLS} tools, found {len(tools):,}", param="tools"
        )
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not isinstance(tool, Mapping) or (tool.get("type") == "function" and not named):
            raise _fault(f"tools[{number}]", '{"type": "function", "function": {"name": ...}}', tool)
    return bool(tools)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > 4 or not all(isinstance(t, str) and t for t in texts):
        raise _fault("stop", "a text or a list of up to four", value)
    if any(len(text) > limits.STOP_CHARACTERS for text in texts):
        raise _fault("stop", f"texts of at most {limits.STOP_CHARACTERS:,} characters", value)
    return tuple(texts)


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise _fault(name, f"a number from {low:g} to {high:g}", value)
    return float(value)


def _parse_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _fault(name, f"a whole number from {low} to {high:,}", value)
    return value


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _fault(name, "a text", value)
    return value


def _storable(request: ChatRequest) -> None:
    """Raises ServingRefused for a request that could be answered but never recorded: a decision must not be
    lost for it."""
    check = Check()
    check.value("model", ModelName, request.model)
    check.value("messages", Messages, request.ask.messages)
    check.value("user", Name, request.unit)
    check.value("metadata.run_id", Name, request.run_id)
    check.value("metadata", JsonObject, request.metadata)
    check.value("tools", Json, request.ask.extra.get("tools"))
    for name, fault in check.fields.items():
        raise ServingRefused(f"{name}: {fault}", param=name)


def _fault(param: str, expected: str, found: Any) -> ServingRefused:
    return ServingRefused(f"{param}: expected {expected}; found {value_excerpt(found)}", param=param)
