"""OpenAI responses at the gateway: read as a chat request, and written from a chat completion or its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rl.serving.base import BrokenOff, Completion, ServingRefused, StreamItem
from rl.serving.dialects.chat import Call, Object, calls_of, count_of

SAME = {"model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "metadata"}
SAME |= {"service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that go by the same name in both dialects."""
KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need what a provider keeps."""


def request_read(body: Any) -> dict[str, object]:
    """The chat request of a responses request. Raises ServingRefused, naming the field."""
    if not isinstance(body, Mapping):
        raise ServingRefused(f"expected a JSON object, found {type(body).__name__}")
    for name in KEPT_ELSEWHERE:
        if body.get(name):
            raise ServingRefused(
                f"{name}: nothing is kept here; send the whole conversation as input", param=name
            )
    chat: dict[str, object] = {key: body[key] for key in SAME if body.get(key) is not None}
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    sent = body.get("input")
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else _list(sent, "input")
    for item in items:
        _add(messages, item)
    chat["messages"] = messages
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if tools := body.get("tools"):
        chat["tools"] = [_nested(tool) for tool in _list(tools, "tools")]
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = _nested(choice) if isinstance(choice, Mapping) else choice
    text, reasoning = body.get("text"), body.get("reasoning")
    if isinstance(text, Mapping):
        if isinstance(form := text.get("format"), Mapping):
            named = {key: value for key, value in form.items() if key != "type"}
            schema = {"json_schema": named} if form.get("type") == "json_schema" else {}
            chat["response_format"] = {"type": form.get("type"), **schema}
        if text.get("verbosity"):
            chat["verbosity"] = text["verbosity"]
    if isinstance(reasoning, Mapping) and reasoning.get("effort"):
        chat["reasoning_effort"] = reasoning["effort"]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list) or not value or not all(isinstance(one, Mapping) for one in value):
        raise ServingRefused(f"{where}: expected a list of objects", param=where)
    return value


def _add(messages: list[dict[str, Any]], item: Object) -> None:
    """Join an item of the input to the messages: calls belong to the assistant's turn before them."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
    elif kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "type": "function",
            "function": {"name": item.get("name"), "arguments": item.get("arguments") or "{}"},
        }
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = item.get("output")
        content = output if isinstance(output, str) else _content(output)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    elif kind != "reasoning":  # a provider's own thoughts, which only it can read
        raise ServingRefused(f"input: items of type {kind!r} are not taken here", param="input")


def _content(content: object) -> object:
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in _list(content, "input")] if content else []
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(part: Object) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind == "refusal":
        return {"type": "refusal", "refusal": str(part.get("refusal", ""))}
    if kind == "input_image" and part.get("image_url"):
        image = {"url": part["image_url"]} | ({"detail": part["detail"]} if part.get("detail") else {})
        return {"type": "image_url", "image_url": image}
    if kind == "input_file":
        return {"type": "file", "file": {key: value for key, value in part.items() if key != "type"}}
    raise ServingRefused(f"input: parts of type {kind!r} are not taken here", param="input")


def _nested(tool: Object) -> dict[str, object]:
    if tool.get("type") != "function":
        raise ServingRefused(
            f"tools: tools of type {tool.get('type')!r} run at their provider and are not taken here",
            param="tools",
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


# --- What goes back ---------------------------------------------------------------------------------------------


@dataclass
class Item:
    """An item of the output; of a stream it grows until the end."""

    kind: str
    """reasoning, output_text, refusal or function_call."""
    id: str
    text: str = ""
    """Its words, or a call's arguments."""
    name: object = None
    call_id: object = None

    @property
    def part(self) -> dict[str, object]:
        """The part of a message that its words are."""
        if self.kind == "refusal":
            return {"type": "refusal", "refusal": self.text}
        return {"type": "output_text", "text": self.text, "annotations": []}

    def dump(self) -> dict[str, object]:
        if self.kind == "reasoning":
            summary = [{"type": "summary_text", "text": self.text}]
            return {"type": "reasoning", "id": self.id, "summary": summary}
        if self.kind == "function_call":
            called = {"call_id": self.call_id, "name": self.name, "arguments": self.text}
            return {"type": "function_call", "id": self.id, "status": "completed", **called}
        return {
            "type": "message",
            "id": self.id,
            "role": "assistant",
            "status": "completed",
            "content": [self.part],
        }


def _words_item(id: object, kind: str, text: str = "") -> Item:
    return Item(kind, f"{'rs' if kind == 'reasoning' else 'msg'}_{id}", text)


def _call_item(call: Call, arguments: str) -> Item:
    return Item("function_call", f"fc_{call.id}", arguments, call.name, call.id)


def answer_write(made: Completion) -> dict[str, object]:
    """A completion as a response."""
    said, items = made.message, []
    if words := said.get("reasoning_content") or said.get("reasoning"):
        items.append(_words_item(made.id, "reasoning", str(words)))
    calls = calls_of(said)
    if (text := said.get("refusal") or said.get("content")) or not calls:
        kind = "refusal" if said.get("refusal") else "output_text"
        items.append(_words_item(made.id, kind, str(text or "")))
    return _response(made, [*items, *(_call_item(call, call.arguments) for call in calls)])


def _response(made: Completion, items: Iterable[Item]) -> dict[str, object]:
    why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(made.finish_reason or "")
    return {
        "id": str(made.id),
        "object": "response",
        "created_at": made.created,
        "model": made.policy,
        "status": "incomplete" if why else "completed",
        "output": [item.dump() for item in items],
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(made.usage),
        "ratchet": made.routing,
    }


def _usage(usage: Mapping[str, object] | None) -> dict[str, object] | None:
    if not usage:
        return None
    read = count_of(usage, "prompt_tokens", "input_tokens") or 0
    written = count_of(usage, "completion_tokens", "output_tokens") or 0
    prompt, completion = (_details(usage.get(f"{side}_tokens_details")) for side in ("prompt", "completion"))
    return {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0, **prompt},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": 0, **completion},
        "total_tokens": read + written,
    }


def _details(sent: object) -> dict[str, object]:
    return (
        {key: value for key, value in sent.items() if value is not None} if isinstance(sent, Mapping) else {}
    )


def events_write(
    begun: Completion, items: Iterable[StreamItem], include_usage: bool = True
) -> Iterator[dict[str, object]]:
    """The events of a response from the pieces of an answer, each with its number."""
    for number, event in enumerate(_events(begun, items)):
        yield {**event, "sequence_number": number}


def _events(begun: Completion, items: Iterable[StreamItem]) -> Iterator[dict[str, object]]:
    output: dict[object, Item] = {}
    """Kind of words, or a call's index -> its item, in the order of the output."""
    yield {"type": "response.created", "response": {**_response(begun, ()), "status": "in_progress"}}
    for item in items:
        if isinstance(item, BrokenOff):
            yield {"type": "error", "code": item.code, "message": item.message, "param": None}
            return
        if isinstance(item, Completion):
            for index, one in enumerate(output.values()):
                yield from _ended(index, one)
            response = _response(item, output.values())
            yield {"type": f"response.{response['status']}", "response": response}
            return
        delta = item.delta
        for kind, text in (
            ("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
            ("output_text", delta.get("content")),
            ("refusal", delta.get("refusal")),
        ):
            if isinstance(text, str) and text:
                yield from _grown(output, kind, _words_item(begun.id, kind), text)
        for call in calls_of(delta):
            yield from _grown(output, call.index, _call_item(call, ""), call.arguments)


def _grown(output: dict[object, Item], key: object, new: Item, text: str) -> Iterator[dict[str, object]]:
    """More words of an item, which begins where it is not there yet."""
    is_new = key not in output
    item = output.setdefault(key, new)
    index = list(output).index(key)
    place = {"item_id": item.id, "output_index": index}
    if item.kind == "reasoning":
        name, at = "reasoning_summary_text", {"summary_index": 0}
        begun: dict[str, object] = {"summary": []}
        part = {"type": "response.reasoning_summary_part.added", "part": {"type": "summary_text", "text": ""}}
    elif item.kind == "function_call":
        name, at, begun, part = "function_call_arguments", {}, {"status": "in_progress"}, {}
    else:
        name, at, begun = item.kind, {"content_index": 0}, {"content": [], "status": "in_progress"}
        part = {"type": "response.content_part.added", "part": item.part}
    if is_new:
        added = {**item.dump(), **begun}
        yield {"type": "response.output_item.added", "output_index": index, "item": added}
        if part:
            yield {**part, **at, **place}
    item.text += text
    if text:
        more: dict[str, object] = {"logprobs": []} if item.kind == "output_text" else {}
        yield {"type": f"response.{name}.delta", "delta": text, **at, **more, **place}


def _ended(index: int, item: Item) -> Iterator[dict[str, object]]:
    place = {"item_id": item.id, "output_index": index}
    if item.kind == "function_call":
        said = {"name": item.name, "arguments": item.text}
        yield {"type": "response.function_call_arguments.done", **said, **place}
    elif item.kind != "reasoning":
        done = {"refusal": item.text} if item.kind == "refusal" else {"text": item.text, "logprobs": []}
        yield {"type": f"response.{item.kind}.done", "content_index": 0, **done, **place}
        yield {"type": "response.content_part.done", "content_index": 0, "part": item.part, **place}
    yield {"type": "response.output_item.done", "output_index": index, "item": item.dump()}
