"""Conversion of chat messages to the steps of a trace: tool calls with results, thoughts, answers as decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ratchet_client.checkpoint_parser import content_text, parse_message, parse_time
from ratchet_client.json_values import to_json

_THOUGHTS = ("thinking", "reasoning", "redacted_thinking")


class ToolCall(NamedTuple):
    """A tool call in a message."""

    id: str
    name: str
    arguments: Any


class ToolResult(NamedTuple):
    """The result of a tool call."""

    call_id: str
    content: Any
    failed: bool


class Transcript:
    """Messages of one checkpoint; those before `start` are known from earlier ones."""

    def __init__(self, messages: list[dict[str, Any]], start: int) -> None:
        self.saved, self.start = messages, start
        self.messages = [parse_message(item) or {"role": "user", "content": ""} for item in messages]
        self._calls = [list(_calls(message)) for message in self.messages]
        self._results = [list(_results(message)) for message in self.messages]
        self._call_of = {call.id: call for calls in self._calls for call in calls if call.id}
        self._result_of = {
            result.call_id: result for results in self._results for result in results if result.call_id
        }
        self._known = {call.id for calls in self._calls[:start] for call in calls if call.id}

    def steps(self) -> Iterator[dict[str, Any]]:
        """The steps of the new messages, in order. A decision step holds its prompt whole, and no id yet."""
        for index in range(self.start, len(self.messages)):
            at = parse_time(self.saved[index])
            for step in self._steps_of(index):
                yield {**step, **({"at": at} if at else {})}

    def _steps_of(self, index: int) -> Iterator[dict[str, Any]]:
        message = self.messages[index]
        text = content_text(message["content"])
        if message["role"] == "assistant":
            for thought in _thoughts(message):
                yield {"kind": "reasoning", "name": "", "text": to_json(thought)}
            if text and self._answers(index):
                prompt = [_prompt_message(earlier) for earlier in self.messages[:index]]
                yield {"kind": "decision", "name": "", "messages": prompt, "response": text}
            elif text:
                yield {"kind": "step", "name": "assistant", "text": to_json(text)}
            for call in self._calls[index]:
                yield _call_step(call, self._result_of.get(call.id))
            return
        for result in self._results[index]:
            source = self._call_of.get(result.call_id)
            if source is None or source.id in self._known:
                # the call stands in an earlier checkpoint, which knew no result yet
                name = str(message.get("name") or "tool")
                yield _call_step(source or ToolCall(result.call_id, name, None), result)
        if text and message["role"] != "tool":
            yield {"kind": "step", "name": message["role"], "text": to_json(text)}

    def _answers(self, index: int) -> bool:
        """True if an assistant's text is the answer to its prompt, and not a remark on the way to a tool."""
        if self._calls[index] or not any(m["role"] != "system" for m in self.messages[:index]):
            return False
        following = self.messages[index + 1 :][:1]
        return not following or (following[0]["role"] == "user" and not self._results[index + 1])


def _prompt_message(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def _blocks(message: Mapping[str, Any], *types: str) -> Iterator[Mapping[str, Any]]:
    content = message["content"]
    for block in content if isinstance(content, list) else []:
        if isinstance(block, Mapping) and block.get("type") in types:
            yield block


def _thoughts(message: Mapping[str, Any]) -> Iterator[str]:
    if isinstance(message.get("reasoning_content"), str):
        yield message["reasoning_content"]
    for block in _blocks(message, *_THOUGHTS):
        thought = block.get("thinking") or block.get("text") or block.get("reasoning")
        if isinstance(thought, str):
            yield thought


def _calls(message: Mapping[str, Any]) -> Iterator[ToolCall]:
    """Tool calls: OpenAI's `tool_calls` and `function_call`, LangChain's, Anthropic's `tool_use` blocks."""
    listed = message.get("tool_calls")
    for item in [*(listed if isinstance(listed, list) else []), {"function": message.get("function_call")}]:
        if not isinstance(item, Mapping):
            continue
        function = item.get("function") if isinstance(item.get("function"), Mapping) else item
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(function, Mapping) and isinstance(name, str):
            arguments = function.get("arguments", function.get("args"))
            yield ToolCall(str(item.get("id") or name), name, _parsed(arguments))
    for block in _blocks(message, "tool_use", "server_tool_use"):
        yield ToolCall(str(block.get("id") or ""), str(block.get("name") or "tool"), block.get("input"))


def _results(message: Mapping[str, Any]) -> Iterator[ToolResult]:
    """Tool results: messages of the role `tool` (or `function`), Anthropic's `tool_result` blocks."""
    if message["role"] == "tool":
        key = message.get("tool_call_id") or message.get("name") or ""
        yield ToolResult(str(key), content_text(message["content"]) or message["content"], False)
    for block in _blocks(message, "tool_result"):
        content = block.get("content")
        yield ToolResult(
            str(block.get("tool_use_id") or ""),
            content_text(content) or content,
            block.get("is_error") is True,
        )


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments  # what a model wrote need not be JSON; shown as it is


def _call_step(call: ToolCall, result: ToolResult | None) -> dict[str, Any]:
    step: dict[str, Any] = {"kind": "tool_call", "name": call.name, "arguments": to_json(call.arguments)}
    if result is None:
        return {**step, "unfinished": True}
    return {**step, ("error" if result.failed else "result"): to_json(result.content)}
