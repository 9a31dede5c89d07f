"""Anthropic messages at the gateway: read as a chat request, and written from a chat completion or its chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl.serving.base import BrokenOff, Completion, ServingRefused, StreamItem
from rl.serving.dialects.anthropic import THINKING, arguments_read
from rl.serving.dialects.chat import Call, Object, calls_of, count_of, objects_in

SAME = ("model", "stream", "temperature", "top_p", "top_k", "max_tokens", "service_tier", "thinking")
"""Fields that go by the same name in both dialects."""
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASON = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def request_read(body: object) -> dict[str, object]:
    """The chat request of a messages request. Raises ServingRefused, naming the field."""
    if not isinstance(body, Mapping):
        raise ServingRefused(f"expected a JSON object, found {type(body).__name__}")
    chat: dict[str, object] = {key: body[key] for key in SAME if key in body}
    system = body.get("system")
    messages = [{"role": "system", "content": _parts(system, "system")}] if system else []
    sent = body.get("messages")
    if not isinstance(sent, list) or not sent:
        raise ServingRefused("messages: expected a list of at least one {role, content}", param="messages")
    for number, message in enumerate(sent):
        messages += _message(message, f"messages[{number}]")
    chat["messages"] = messages
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if tools := body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in _list(tools, "tools")]
    if isinstance(choice := body.get("tool_choice"), Mapping):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        kind = choice.get("type")
        chat["tool_choice"] = named if kind == "tool" else "required" if kind == "any" else kind
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    config = body.get("output_config")
    if isinstance(config, Mapping):
        if isinstance(form := config.get("format"), Mapping):
            schema = {"name": "response", "schema": form.get("schema"), "strict": True}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        if config.get("effort"):
            chat["reasoning_effort"] = config["effort"]
    if isinstance(metadata := body.get("metadata"), Mapping) and metadata.get("user_id"):
        chat["user"] = metadata["user_id"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise ServingRefused(f"{where}: expected a list of objects", param=where.partition("[")[0])
    return value


def _message(message: Any, where: str) -> list[dict[str, object]]:
    """A turn as chat messages: each result of a tool is one of its own."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system"):
        raise ServingRefused(f"{where}: expected an object with the role user or assistant", param="messages")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _list(content, f"{where}.content")
    results = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(block.get("content"), f"{where}.content"),
        }
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    made: dict[str, object] = {"role": role}
    calls = [_call(block) for block in blocks if block.get("type") == "tool_use"]
    thoughts = [dict(block) for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    rest = [
        block
        for block in blocks
        if block.get("type") not in ("tool_result", "tool_use", "thinking", "redacted_thinking")
    ]
    if calls:
        made["tool_calls"] = calls
    if thoughts:
        made[THINKING] = thoughts
        made["reasoning_content"] = "".join(str(block.get("thinking", "")) for block in thoughts)
    if rest:
        made["content"] = _parts(rest, f"{where}.content")
    elif calls or thoughts:
        made["content"] = None
    else:
        return results
    return [*results, made]


def _parts(content: object, where: str) -> object:
    """A content as chat has it: one text where it is words alone."""
    if isinstance(content, str):
        return content
    parts = [_part(block, where) for block in _list(content, where)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(block: Object, where: str) -> dict[str, Any]:
    kind, source = block.get("type"), block.get("source")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    if kind in ("image", "document") and isinstance(source, Mapping):
        url = source.get("url")
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        if kind == "image":
            return {"type": "image_url", "image_url": {"url": url}}
        return {"type": "file", "file": {"file_data": url, "filename": str(block.get("title") or "document")}}
    raise ServingRefused(
        f"{where}: blocks of type {kind!r} are not taken here", param=where.partition("[")[0]
    )


def _text(content: object, where: str) -> object:
    return "" if content is None else _parts(content, where)


def _call(block: Object) -> dict[str, object]:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    return {
        "id": block.get("id"),
        "type": "function",
        "function": {"name": block.get("name"), "arguments": arguments},
    }


def _tool(tool: Object) -> dict[str, object]:
    if tool.get("type") not in (None, "custom"):
        raise ServingRefused(
            f"tools: tools of type {tool['type']!r} run at their provider and are not taken here",
            param="tools",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    return {
        "type": "function",
        "function": function | {k: tool[k] for k in ("description", "strict") if k in tool},
    }


# --- What goes back ---------------------------------------------------------------------------------------------


def answer_write(made: Completion) -> dict[str, object]:
    """A completion as a message."""
    said = made.message
    blocks: list[Mapping[str, object]] = list(objects_in(said.get(THINKING)))
    if not blocks and (words := said.get("reasoning_content") or said.get("reasoning")):
        blocks.append({"type": "thinking", "thinking": str(words), "signature": ""})
    if text := said.get("content") or said.get("refusal"):
        blocks.append({"type": "text", "text": text, "citations": None})
    blocks += [_use(call, arguments_read(call.arguments)) for call in calls_of(said)]
    return {
        **_message_head(made),
        "content": blocks,
        "stop_reason": _stop_reason(made, refused=bool(said.get("refusal"))),
        "usage": _usage(made.usage),
    }


def _stop_reason(made: Completion, *, refused: bool) -> str:
    return "refusal" if refused else STOP_REASON.get(made.finish_reason or "", "end_turn")


def _message_head(made: Completion) -> dict[str, object]:
    return {
        "id": str(made.id),
        "type": "message",
        "role": "assistant",
        "model": made.policy,
        "stop_sequence": None,
        "ratchet": made.routing,
    }


def _use(call: Call, arguments: Mapping[str, object]) -> dict[str, object]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _usage(usage: Mapping[str, object] | None) -> dict[str, object]:
    """Token counts as Anthropic has them; 0 where the server does not count, as the clients want numbers."""
    sent = usage or {}
    details = sent.get("prompt_tokens_details")
    details = details if isinstance(details, Mapping) else {}
    cached, stored = count_of(details, "cached_tokens") or 0, count_of(details, "cache_write_tokens") or 0
    read = count_of(sent, "prompt_tokens", "input_tokens") or 0
    return {
        "input_tokens": max(read - cached - stored, 0),
        "output_tokens": count_of(sent, "completion_tokens", "output_tokens") or 0,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": stored,
    }


def error_write(status: int, message: str, code: str | None) -> dict[str, object]:
    """An error as Anthropic's clients read it."""
    kind = ERROR_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def events_write(
    begun: Completion, items: Iterable[StreamItem], include_usage: bool = True
) -> Iterator[dict[str, object]]:
    """The events of a message from the pieces of an answer."""
    open_kind: object = None
    index, refused = -1, False
    at: dict[int, int] = {}

    def block_begun(kind: object, block: Mapping[str, object]) -> Iterator[dict[str, object]]:
        nonlocal open_kind, index
        if open_kind is not None:
            yield {"type": "content_block_stop", "index": index}
        open_kind, index = kind, index + 1
        yield {"type": "content_block_start", "index": index, "content_block": block}

    head = {**_message_head(begun), "content": [], "stop_reason": None, "usage": _usage(None)}
    yield {"type": "message_start", "message": head}
    for item in items:
        if isinstance(item, BrokenOff):
            yield error_write(503, item.message, item.code)
            return
        if isinstance(item, Completion):
            if open_kind is not None:
                yield {"type": "content_block_stop", "index": index}
            stop = {"stop_reason": _stop_reason(item, refused=refused), "stop_sequence": None}
            usage = _usage(item.usage)
            yield {"type": "message_delta", "delta": stop, "usage": usage, "ratchet": item.routing}
            yield {"type": "message_stop"}
            return
        delta = item.delta
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(thought, str) and thought:
            if open_kind != "thinking":
                yield from block_begun("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield _delta(index, {"type": "thinking_delta", "thinking": thought})
        for block in objects_in(delta.get(THINKING)):
            if open_kind == "thinking" and block.get("signature"):
                yield _delta(index, {"type": "signature_delta", "signature": block["signature"]})
        refused = refused or bool(delta.get("refusal"))
        if text := delta.get("content") or delta.get("refusal"):
            if open_kind != "text":
                yield from block_begun("text", {"type": "text", "text": "", "citations": None})
            yield _delta(index, {"type": "text_delta", "text": text})
        for call in calls_of(delta):
            if call.index not in at:
                yield from block_begun(call.index, _use(call, {}))
                at[call.index] = index
            if call.arguments:
                yield _delta(at[call.index], {"type": "input_json_delta", "partial_json": call.arguments})


def _delta(index: int, delta: Mapping[str, object]) -> dict[str, object]:
    return {"type": "content_block_delta", "index": index, "delta": delta}
