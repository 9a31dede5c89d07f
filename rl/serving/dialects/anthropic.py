"""Anthropic messages, written from a chat request and read as a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl.serving.base import BackendFailed, BackendUnable
from rl.serving.dialects.chat import DONE, MALFORMED, Object, Sent, count_of

VERSION = "2023-06-01"
MAX_TOKENS = 4096
"""Tokens of an answer where nobody says: the endpoint wants a number."""
SAME = {"model", "stream", "service_tier", "thinking"}
"""Fields that go by the same name in both dialects."""
TRANSLATED = {
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "tools",
    "tool_choice",
    "user",
    "metadata",
}
TRANSLATED |= {"parallel_tool_calls", "response_format", "reasoning_effort", "stream_options"}
FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Anthropic's reasons why an answer ended -> OpenAI's."""
THINKING = "thinking_blocks"
"""Field of an assistant's message: its thinking as Anthropic signed it, to be sent back beside results of tools."""


def headers(key: str) -> dict[str, str]:
    return {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})


def request_write(chat: Object) -> Sent:
    """The messages request of a chat request. Raises BackendUnable for what the dialect has no words for."""
    system, messages = _messages(chat["messages"])
    body: dict[str, object] = {key: chat[key] for key in SAME & chat.keys()}
    body |= {"messages": messages}
    body["max_tokens"] = chat.get("max_completion_tokens") or chat.get("max_tokens") or MAX_TOKENS
    if system:
        body["system"] = system
    if stop := chat.get("stop"):
        body["stop_sequences"] = stop
    if tools := chat.get("tools"):
        body["tools"] = [_tool(tool) for tool in tools]
        if (choice := _tool_choice(chat)) is not None:
            body["tool_choice"] = choice
    config: dict[str, object] = {}
    if isinstance(format := chat.get("response_format"), Mapping) and format.get("type") == "json_schema":
        config["format"] = {"type": "json_schema", "schema": format["json_schema"]["schema"]}
    if effort := chat.get("reasoning_effort"):
        config["effort"] = effort
    if config:
        body["output_config"] = config
    if user := chat.get("user") or (chat.get("metadata") or {}).get("user_id"):
        body["metadata"] = {"user_id": user}
    return Sent(body, tuple(sorted(chat.keys() - SAME - TRANSLATED)))


def _messages(sent: Sequence[Object]) -> tuple[str, list[dict[str, object]]]:
    """The system prompt, and the turns: Anthropic's results of tools are parts of the user's turn."""
    system: list[str] = []
    turns: list[dict[str, Any]] = []
    for message in sent:
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            system.append(_words(content))
            continue
        if role == "tool":
            blocks = [
                {
                    "type": "tool_result",
                    "tool_use_id": message.get("tool_call_id"),
                    "content": _blocks(content) if isinstance(content, list) else str(content or ""),
                }
            ]
        elif role == "assistant":
            blocks = [*(message.get(THINKING) or ()), *_blocks(content or message.get("refusal"))]
            blocks += [_tool_use(call) for call in message.get("tool_calls") or ()]
        elif role == "user":
            blocks = _blocks(content)
        else:
            raise BackendUnable(f"messages: Anthropic's messages know no role {role!r}", param="messages")
        turn = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == turn:
            turns[-1]["content"] += blocks
        elif blocks:
            turns.append({"role": turn, "content": blocks})
    return "\n\n".join(system), turns


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, Mapping))


def _blocks(content: Any) -> list[dict[str, object]]:
    """A content as blocks; a text that is empty is none, which Anthropic refuses."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [_block(part) for part in content if part.get("type") != "text" or part.get("text")]


def _block(part: Object) -> dict[str, object]:
    kind = part.get("type")
    if kind in ("text", "refusal"):
        return {"type": "text", "text": str(part.get(kind, ""))}
    if kind == "image_url":
        image = part.get("image_url")
        url = str(image.get("url", "") if isinstance(image, Mapping) else image)
        return {"type": "image", "source": _source(url)}
    file = part.get("file")
    if kind == "file" and isinstance(file, Mapping) and isinstance(file.get("file_data"), str):
        return {"type": "document", "source": _source(file["file_data"])}
    raise BackendUnable(f"messages: Anthropic's messages take no part of type {kind!r}", param="messages")


def _source(url: str) -> dict[str, object]:
    """A `data:` address as its bytes; any other as an address."""
    if not url.startswith("data:"):
        return {"type": "url", "url": url}
    head, _, data = url.partition(",")
    return {"type": "base64", "media_type": head.removeprefix("data:").partition(";")[0], "data": data}


def _tool_use(call: Object) -> dict[str, object]:
    function = call.get("function") or {}
    return {
        "type": "tool_use",
        "id": call.get("id"),
        "name": function.get("name"),
        "input": arguments_read(function.get("arguments")),
    }


def arguments_read(text: Any) -> dict[str, object]:
    """The arguments of a call as an object."""
    try:
        read = json.loads(text or "{}")
    except (TypeError, ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {"arguments": text}


def _tool(tool: Object) -> dict[str, object]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping):
        raise BackendUnable(
            f"tools: Anthropic's messages take functions, found a tool of type {tool.get('type')!r}",
            param="tools",
        )
    made = {key: function[key] for key in ("name", "description", "strict") if function.get(key) is not None}
    return {**made, "input_schema": function.get("parameters") or {"type": "object"}}


def _tool_choice(chat: Object) -> dict[str, object] | None:
    choice = chat.get("tool_choice") or "auto"
    if isinstance(choice, Mapping):
        made = {"type": "tool", "name": (choice.get("function") or {}).get("name")}
    else:
        made = {"type": {"required": "any"}.get(choice, choice)}
    if chat.get("parallel_tool_calls") is False and made["type"] != "none":
        return {**made, "disable_parallel_tool_use": True}
    return None if made == {"type": "auto"} else made


# --- What comes back ------------------------------------------------------------------------------------------


def whole(body: Object, name: str) -> Object:
    """A whole message as a chat completion. Raises BackendFailed where it is none."""
    blocks = body.get("content")
    if body.get("type") != "message" or not isinstance(blocks, list):
        raise BackendFailed(f"{name} sent no message: {str(body)[:200]}", kind=MALFORMED)
    message: dict[str, object] = {"role": "assistant", "content": None}
    for number, block in enumerate(blocks):
        for delta in _delta_of(block, number):
            _join(message, delta)
    choice = {"index": 0, "message": message, "finish_reason": _reason(body.get("stop_reason"))}
    return {**_head(body), "choices": [choice], "usage": _usage(body.get("usage") or {})}


def _join(message: dict[str, Any], delta: Mapping[str, object]) -> None:
    for key, value in delta.items():
        before = message.get(key)
        message[key] = value if before is None else before + value


def _delta_of(block: Object, number: int) -> Iterator[dict[str, object]]:
    """A whole block as deltas of a chat message."""
    kind = block.get("type")
    if kind == "text":
        yield {"content": str(block.get("text", ""))}
        if block.get("citations"):
            yield {"annotations": list(block["citations"])}
    elif kind == "thinking":
        yield {"reasoning_content": str(block.get("thinking", "")), THINKING: [dict(block)]}
    elif kind == "redacted_thinking":
        yield {THINKING: [dict(block)]}
    elif kind == "tool_use":
        arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
        yield {"tool_calls": [_call(block, number, arguments)]}
    else:
        yield {"blocks": [dict(block)]}


def _call(block: Object, number: int, arguments: str) -> dict[str, object]:
    function = {"name": block.get("name"), "arguments": arguments}
    return {"index": number, "id": block.get("id"), "type": "function", "function": function}


def _head(body: Object) -> dict[str, object]:
    more = ("stop_sequence", "stop_details", "container")
    return {key: body.get(key) for key in ("id", "model", *more) if body.get(key) is not None}


def _reason(stop_reason: object) -> str | None:
    return FINISH.get(stop_reason, stop_reason) if isinstance(stop_reason, str) else None


def _usage(sent: Object) -> dict[str, object] | None:
    """Token counts as OpenAI names them: Anthropic counts cached prompt tokens beside the others."""
    read, written = count_of(sent, "input_tokens"), count_of(sent, "output_tokens")
    if read is None or written is None:
        return None
    cached = count_of(sent, "cache_read_input_tokens") or 0
    stored = count_of(sent, "cache_creation_input_tokens") or 0
    prompt = read + cached + stored
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": stored},
    }
    if (details := sent.get("output_tokens_details")) and isinstance(details, Mapping):
        usage["completion_tokens_details"] = {"reasoning_tokens": count_of(details, "thinking_tokens") or 0}
    return usage


def chunks(events: Iterable[Object], name: str) -> Iterator[Object]:
    """The events of a stream as chunks of a chat completion. Raises BackendFailed where it breaks off."""
    head: dict[str, object] = {}
    usage: dict[str, object] = {}
    opened: dict[int, dict[str, object]] = {}
    for event in events:
        kind = event.get("type")
        if event is DONE or kind == "message_stop":
            return
        if kind == "message_start":
            head = _head(event["message"])
            usage = dict(event["message"].get("usage") or {})
            yield {**_chunk(head, {"content": ""}), "usage": _usage(usage)}
        elif kind == "content_block_start":
            number, block = event["index"], dict(event["content_block"])
            opened[number] = block
            if block.get("type") == "tool_use":
                yield _chunk(head, {"tool_calls": [_call(block, number, "")]})
            elif block.get("type") == "text" and block.get("text"):
                yield _chunk(head, {"content": block["text"]})
        elif kind == "content_block_delta":
            if delta := _delta(event["delta"], event["index"], opened.get(event["index"], {})):
                yield _chunk(head, delta)
        elif kind == "content_block_stop":
            block = opened.get(event["index"], {})
            if block.get("type") in ("thinking", "redacted_thinking"):
                yield _chunk(head, {THINKING: [block]})
            elif block.get("type") not in ("text", "tool_use", None):
                yield _chunk(head, {"blocks": [block]})
        elif kind == "message_delta":
            usage |= {key: value for key, value in (event.get("usage") or {}).items() if value is not None}
            said = event["delta"]
            head |= _head({key: value for key, value in said.items() if key not in ("id", "model")})
            yield {**_chunk(head, {}, _reason(said.get("stop_reason"))), "usage": _usage(usage)}
    raise BackendFailed(f"{name} closed the connection before the end of its answer")


def _chunk(head: Object, delta: Object, reason: str | None = None) -> Object:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _delta(delta: Object, number: int, block: dict[str, object]) -> dict[str, object]:
    """A delta of a block as one of the message; thinking is also kept in the block, which goes on whole."""
    kind = delta.get("type")
    if kind == "text_delta":
        return {"content": delta["text"]}
    if kind == "input_json_delta":
        if block.get("type") != "tool_use":
            block["input"] = str(block.get("input") or "") + delta["partial_json"]
            return {}
        return {"tool_calls": [{"index": number, "function": {"arguments": delta["partial_json"]}}]}
    if kind == "thinking_delta":
        block["thinking"] = str(block.get("thinking") or "") + delta["thinking"]
        return {"reasoning_content": delta["thinking"]}
    if kind == "signature_delta":
        block["signature"] = delta["signature"]
    elif kind == "citations_delta":
        return {"annotations": [delta["citation"]]}
    return {}
