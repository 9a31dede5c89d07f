"""OpenAI responses, written from a chat request and read as a chat completion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rl.serving.base import BackendFailed, BackendUnable
from rl.serving.dialects.chat import DONE, MALFORMED, Object, Sent, count_of

SAME = {"model", "stream", "temperature", "top_p", "top_logprobs", "parallel_tool_calls", "user", "metadata"}
SAME |= {"service_tier", "store", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Fields that go by the same name in both dialects."""
TRANSLATED = {"messages", "max_tokens", "max_completion_tokens", "tools", "tool_choice", "response_format"}
TRANSLATED |= {"reasoning_effort", "verbosity", "stream_options"}


def request_write(chat: Object) -> Sent:
    """The responses request of a chat request. Raises BackendUnable for what the dialect has no words for."""
    # the endpoint would keep every prompt for a month where nobody says otherwise
    body: dict[str, object] = {"store": False, **{key: chat[key] for key in SAME & chat.keys()}}
    body["input"] = _items(chat["messages"])
    if limit := chat.get("max_completion_tokens") or chat.get("max_tokens"):
        body["max_output_tokens"] = limit
    if tools := chat.get("tools"):
        body["tools"] = [_flat(tool, tool.get("type")) for tool in tools]
    if choice := chat.get("tool_choice"):
        body["tool_choice"] = _flat(choice, choice.get("type")) if isinstance(choice, Mapping) else choice
    text: dict[str, Any] = {}
    if isinstance(format := chat.get("response_format"), Mapping):
        named = format.get("json_schema") or {}
        text["format"] = {"type": format["type"], **named}
    if verbosity := chat.get("verbosity"):
        text["verbosity"] = verbosity
    if text:
        body["text"] = text
    if effort := chat.get("reasoning_effort"):
        body["reasoning"] = {"effort": effort}
    return Sent(body, tuple(sorted(chat.keys() - SAME - TRANSLATED)))


def _flat(tool: Object, kind: Any) -> dict[str, object]:
    """A tool, or the choice of one: its fields stand beside its type."""
    named = tool.get(kind) if isinstance(kind, str) else None
    if not isinstance(named, Mapping):
        return dict(tool)
    # a function without `strict` is strict here, and not in chat completions
    strict = {"strict": False} if kind == "function" and "parameters" in named else {}
    return {"type": kind, **strict, **named}


def _items(messages: Sequence[Object]) -> list[dict[str, object]]:
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            output = _parts(content, "input_text") if isinstance(content, list) else str(content or "")
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}
            )
            continue
        if role == "function":
            raise BackendUnable("messages: OpenAI's responses know no role 'function'", param="messages")
        said = content or (message.get("refusal") if role == "assistant" else "") or ""
        if said:
            kind = "output_text" if role == "assistant" else "input_text"
            items.append({"role": role, "content": said if isinstance(said, str) else _parts(said, kind)})
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            items.append(
                {
                    "type": "function_call",
                    "call_id": call.get("id"),
                    "name": function.get("name"),
                    "arguments": function.get("arguments") or "{}",
                }
            )
    return items


def _parts(content: Sequence[Object], text_kind: str) -> list[dict[str, Any]]:
    return [_part(part, text_kind) for part in content]


def _part(part: Object, text_kind: str) -> dict[str, object]:
    kind = part.get("type")
    if kind == "text":
        return {"type": text_kind, "text": part.get("text", "")}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part.get("refusal", "")}
    if kind == "image_url":
        image = part.get("image_url")
        named = dict(image) if isinstance(image, Mapping) else {"url": image}
        return {"type": "input_image", "image_url": named.pop("url", None), "detail": "auto", **named}
    if kind == "file" and isinstance(part.get("file"), Mapping):
        return {"type": "input_file", **part["file"]}
    raise BackendUnable(f"messages: OpenAI's responses take no part of type {kind!r}", param="messages")


# --- What comes back ------------------------------------------------------------------------------------------


def whole(body: Object, name: str) -> Object:
    """A whole response as a chat completion. Raises BackendFailed where it is none."""
    output = body.get("output")
    if not isinstance(output, list) or body.get("status") not in ("completed", "incomplete"):
        raise BackendFailed(f"{name} sent no finished response: {str(body)[:200]}", kind=MALFORMED)
    message: dict[str, object] = {"role": "assistant", "content": None}
    for number, item in enumerate(output):
        kind = item.get("type")
        if kind == "message":
            for part in item.get("content") or ():
                _add(message, _said(part))
        elif kind == "reasoning":
            words = [str(part.get("text", "")) for part in item.get("summary") or item.get("content") or ()]
            _add(message, {"reasoning_content": "\n\n".join(words)} if words else {})
        elif kind == "function_call":
            _add(message, {"tool_calls": [_call(item, number, str(item.get("arguments") or ""))]})
        else:
            _add(message, {"items": [dict(item)]})
    reason = _reason(body, "tool_calls" in message)
    return {
        **_head(body),
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": _usage(body.get("usage")),
    }


def _add(message: dict[str, object], delta: Object) -> None:
    for key, value in delta.items():
        before = message.get(key)
        message[key] = value if before is None else before + value


def _said(part: Object) -> dict[str, object]:
    if part.get("type") == "refusal":
        return {"refusal": str(part.get("refusal", ""))}
    annotations = {"annotations": list(part["annotations"])} if part.get("annotations") else {}
    return {"content": str(part.get("text", "")), **annotations}


def _call(item: Object, number: int, arguments: str) -> dict[str, object]:
    function = {"name": item.get("name"), "arguments": arguments}
    return {"index": number, "id": item.get("call_id"), "type": "function", "function": function}


def _head(body: Object) -> dict[str, object]:
    return {key: body[key] for key in ("id", "model", "service_tier") if body.get(key) is not None}


def _reason(body: Object, has_calls: bool) -> str:
    if body.get("status") == "incomplete":
        why = (body.get("incomplete_details") or {}).get("reason")
        return "content_filter" if why == "content_filter" else "length"
    return "tool_calls" if has_calls else "stop"


def _usage(sent: object) -> dict[str, object] | None:
    if not isinstance(sent, Mapping):
        return None
    read, written = count_of(sent, "input_tokens"), count_of(sent, "output_tokens")
    if read is None or written is None:
        return None
    usage: dict[str, object] = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
    for ours, theirs in (("prompt", "input"), ("completion", "output")):
        if isinstance(details := sent.get(f"{theirs}_tokens_details"), Mapping):
            usage[f"{ours}_tokens_details"] = dict(details)
    return usage


def chunks(events: Iterable[Object], name: str) -> Iterator[Object]:
    """The events of a stream as chunks of a chat completion. Raises BackendFailed where it breaks off."""
    head: dict[str, object] = {}
    called: set[int] = set()
    for event in events:
        kind = str(event.get("type", ""))
        if event is DONE:
            break
        if kind == "response.created":
            head = _head(event["response"])
            yield _chunk(head, {"content": ""})
        elif kind in ("response.completed", "response.incomplete"):
            body = event["response"]
            last = _chunk({**head, **_head(body)}, {}, _reason(body, bool(called)))
            yield {**last, "usage": _usage(body.get("usage"))}
            return
        elif kind in ("response.failed", "error"):
            fault = (event.get("response") or {}).get("error") or event
            raise BackendFailed(
                f"{name} failed within its answer: {fault.get('message') or kind}", kind=MALFORMED
            )
        elif delta := _delta(kind, event, called):
            yield _chunk(head, delta)
    raise BackendFailed(f"{name} closed the connection before the end of its answer")


def _chunk(head: Object, delta: Object, reason: str | None = None) -> Object:
    return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def _delta(kind: str, event: Object, called: set[int]) -> dict[str, object]:
    if kind == "response.output_text.delta":
        return {"content": event["delta"]}
    if kind == "response.refusal.delta":
        return {"refusal": event["delta"]}
    if kind in ("response.reasoning_summary_text.delta", "response.reasoning_text.delta"):
        return {"reasoning_content": event["delta"]}
    if kind == "response.output_text.annotation.added":
        return {"annotations": [event["annotation"]]}
    number = event.get("output_index", 0)
    if kind == "response.output_item.added" and event["item"].get("type") == "function_call":
        called.add(number)
        return {"tool_calls": [_call(event["item"], number, "")]}
    if kind == "response.function_call_arguments.delta":
        return {"tool_calls": [{"index": number, "function": {"arguments": event["delta"]}}]}
    read = ("message", "reasoning", "function_call")
    if kind == "response.output_item.done" and event["item"].get("type") not in read:
        return {"items": [dict(event["item"])]}
    return {}
