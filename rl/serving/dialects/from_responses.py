"""OpenAI responses at the gateway: read as a chat request, and written from a chat completion or its chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rl.serving.base import ServingRefused
from rl.serving.dialects.chat import Object, calls_of, count_of

SAME = {"model", "stream", "temperature", "top_p", "parallel_tool_calls", "user", "metadata"}
SAME |= {"service_tier", "safety_identifier", "prompt_cache_key"}
"""Fields that go by the same name in both dialects."""
KEPT_ELSEWHERE = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need what a provider keeps."""


def request_read(body: Any) -> dict[str, Any]:
    """The chat request of a responses request. Raises ServingRefused, naming the field."""
    if not isinstance(body, Mapping):
        raise ServingRefused(f"expected a JSON object, found {type(body).__name__}")
    for name in KEPT_ELSEWHERE:
        if body.get(name):
            raise ServingRefused(
                f"{name}: nothing is kept here; send the whole conversation as input", param=name
            )
    chat: dict[str, Any] = {key: body[key] for key in SAME if body.get(key) is not None}
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


def _list(value: Any, where: str) -> list[Any]:
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


def _content(content: Any) -> Any:
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


def _nested(tool: Object) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ServingRefused(
            f"tools: tools of type {tool.get('type')!r} run at their provider and are not taken here",
            param="tools",
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


# --- What goes back ---------------------------------------------------------------------------------------------


def answer_write(completion: Object) -> dict[str, Any]:
    """A chat completion as a response."""
    choice = completion["choices"][0]
    said, output = choice["message"], []
    if words := said.get("reasoning_content") or said.get("reasoning"):
        output.append(_reasoning(completion["id"], str(words)))
    if said.get("content") or said.get("refusal") or not calls_of(said):
        kind = "refusal" if said.get("refusal") else "output_text"
        output.append(_message(completion["id"], kind, said.get("refusal") or said.get("content") or ""))
    output += [_call(call) for call in calls_of(said)]
    return _response(completion, output, choice["finish_reason"], completion.get("usage"))


def _response(head: Object, output: list[Any], reason: str | None, usage: Object | None) -> dict[str, Any]:
    why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(reason or "")
    return {
        "id": head["id"],
        "object": "response",
        "created_at": head["created"],
        "model": head["model"],
        "status": "incomplete" if why else "completed",
        "output": output,
        "error": None,
        "incomplete_details": {"reason": why} if why else None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": [],
        "usage": _usage(usage),
        "ratchet": head["ratchet"],
    }


def _usage(usage: Object | None) -> dict[str, Any] | None:
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


def _details(sent: Any) -> dict[str, Any]:
    return (
        {key: value for key, value in sent.items() if value is not None} if isinstance(sent, Mapping) else {}
    )


def _reasoning(id: str, words: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": f"rs_{id}", "summary": [{"type": "summary_text", "text": words}]}


def _message(id: str, kind: str, text: str) -> dict[str, Any]:
    part = {"type": "refusal", "refusal": text} if kind == "refusal" else _text(text)
    return {
        "type": "message",
        "id": f"msg_{id}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _call(call: Object) -> dict[str, Any]:
    function = call["function"]
    return {
        "type": "function_call",
        "id": f"fc_{call.get('id')}",
        "call_id": call.get("id"),
        "status": "completed",
        "name": function.get("name"),
        "arguments": function.get("arguments") or "",
    }


def events_write(chunks: Iterable[Object]) -> Iterator[dict[str, Any]]:
    """The events of a response from the chunks of a chat completion, each with its number."""
    for number, event in enumerate(_events(chunks)):
        yield {**event, "sequence_number": number}


def _events(chunks: Iterable[Object]) -> Iterator[dict[str, Any]]:
    head: Object = {}
    usage: Object | None = None
    reason: str | None = None
    items: list[dict[str, Any]] = []
    """The items of the output, each growing until the stream ends."""
    at: dict[Any, int] = {}
    for chunk in chunks:
        if "error" in chunk:
            error = chunk["error"]
            yield {"type": "error", "code": error["code"], "message": error["message"], "param": None}
            return
        if not head:
            head = chunk
            yield {
                "type": "response.created",
                "response": {**_response(head, [], None, None), "status": "in_progress"},
            }
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta, reason = choice["delta"], choice.get("finish_reason") or reason
            for kind, text in (
                ("reasoning", delta.get("reasoning_content") or delta.get("reasoning")),
                ("output_text", delta.get("content")),
                ("refusal", delta.get("refusal")),
            ):
                if isinstance(text, str) and text:
                    yield from _grown(items, at, kind, text, str(head["id"]))
            for call in calls_of(delta):
                place = call.get("index", 0)
                if place not in at:
                    at[place] = len(items)
                    items.append(_call({**call, "function": {**call["function"], "arguments": ""}}))
                    begun = {**items[-1], "status": "in_progress"}
                    yield {"type": "response.output_item.added", "output_index": at[place], "item": begun}
                if part := call["function"].get("arguments"):
                    item = items[at[place]]
                    item["arguments"] += part
                    yield {
                        "type": "response.function_call_arguments.delta",
                        "item_id": item["id"],
                        "output_index": at[place],
                        "delta": part,
                    }
    for index, item in enumerate(items):
        yield from _ended(index, item)
    response = _response(head, items, reason, usage)
    yield {"type": f"response.{response['status']}", "response": response}


def _grown(
    items: list[dict[str, Any]], at: dict[Any, int], kind: str, text: str, id: str
) -> Iterator[dict[str, Any]]:
    """More words of the reasoning, or of the answer."""
    if kind not in at:
        at[kind] = len(items)
        items.append(_reasoning(id, "") if kind == "reasoning" else _message(id, kind, ""))
        item, place = items[-1], {"item_id": items[-1]["id"], "output_index": at[kind]}
        empty = {"summary": []} if kind == "reasoning" else {"content": [], "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": at[kind], "item": {**item, **empty}}
        if kind == "reasoning":
            part = {"type": "summary_text", "text": ""}
            yield {"type": "response.reasoning_summary_part.added", "summary_index": 0, "part": part, **place}
        else:
            part = {**item["content"][0]}
            yield {"type": "response.content_part.added", "content_index": 0, "part": part, **place}
    index = at[kind]
    item = items[index]
    place = {"item_id": item["id"], "output_index": index, "delta": text}
    if kind == "reasoning":
        item["summary"][0]["text"] += text
        yield {"type": "response.reasoning_summary_text.delta", "summary_index": 0, **place}
        return
    item["content"][0]["refusal" if kind == "refusal" else "text"] += text
    logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield {"type": f"response.{kind}.delta", "content_index": 0, **logprobs, **place}


def _ended(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **said, **place}
    elif item["type"] == "message":
        part = item["content"][0]
        name = "refusal" if part["type"] == "refusal" else "text"
        done: dict[str, Any] = {name: part[name]} | ({"logprobs": []} if name == "text" else {})
        yield {"type": f"response.{part['type']}.done", "content_index": 0, **done, **place}
        yield {"type": "response.content_part.done", "content_index": 0, "part": part, **place}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
