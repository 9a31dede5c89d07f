"""The chat message: roles, text or parts, tool calls, reasoning and refusals, in whatever dialect they arrive.

Imports, recording, datasets, training and the gateway read messages through this module. It needs pydantic alone, so
training can use it without Django.

`messages_read` accepts the messages of OpenAI (chat and Responses), Anthropic, Gemini, Bedrock, LangChain,
OpenTelemetry and ShareGPT and returns `ChatMessage` objects. `dump` writes a message as OpenAI has it, with the
reasoning in one field of its own.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

ROLES: dict[str, str] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "customer": "user",
    "assistant": "assistant", "ai": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatbot": "assistant", "agent": "assistant", "function_call": "assistant", "tool_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "ipython": "tool",
    "tool_result": "tool", "environment": "tool",
}  # fmt: skip
"""A role as some program writes it -> system, user, assistant or tool."""

REASONING_KEYS = ("reasoning", "reasoning_content", "thinking", "thought", "thoughts", "reasoning_text")
"""Keys of a message under which providers put the model's reasoning, likeliest first."""

TEXT_PARTS = ("text", "input_text", "output_text", "summary_text")
REASONING_PARTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary", "think")

BESIDE = ("reasoning", "function_call", "custom_tool_call")
"""Items of OpenAI's Responses API that belong to the assistant's message beside them."""


class MessageError(ValueError):
    """A message cannot be read. The text names the place, the expected value and the value found."""


class FunctionCall(BaseModel):
    """Name and arguments of a called function."""

    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = ""
    """JSON text, as OpenAI has it; other dialects send the object itself."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def parsed(self) -> Any:
        """The arguments as JSON; the text itself where it is no JSON."""
        try:
            return json.loads(self.arguments) if self.arguments.strip() else {}
        except (ValueError, RecursionError):
            return self.arguments


class ToolCall(BaseModel):
    """One call of a tool in an assistant's turn."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn of a chat. Keys that no dialect gives a meaning stay as extra fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] = ""
    """The text; a list of parts only where a part is no text (a picture, a sound, a file)."""
    reasoning: str = ""
    """What the model thought before it answered; no part of the answer."""
    refusal: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def is_text(self) -> bool:
        """False where the content holds a part that is no text."""
        return isinstance(self.content, str)

    @property
    def text(self) -> str:
        """The words of the turn: its content, or its refusal. Parts that are no text are left out."""
        if isinstance(self.content, str):
            return self.content or self.refusal
        return "".join(part["text"] for part in self.content if _is_text_part(part))

    @property
    def says_something(self) -> bool:
        return bool(self.text.strip() or self.tool_calls or not self.is_text)

    @property
    def bare(self) -> ChatMessage:
        """The message without its extra fields."""
        return ChatMessage.model_construct(**{name: getattr(self, name) for name in ChatMessage.model_fields})

    def dump(self) -> dict[str, Any]:
        """The message as OpenAI writes it, without fields that say nothing. `role` and `content` are always there."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        found |= {key: value for key in ("reasoning", "refusal") if (value := getattr(self, key))}
        if self.tool_calls:
            found["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        found |= {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key)) is not None}
        return found | (self.model_extra or {})


@dataclass(frozen=True)
class AssistantResponse:
    """The answer to a prompt, with its reasoning beside it."""

    messages: tuple[ChatMessage, ...]
    reasoning: str = ""

    @property
    def is_refusal(self) -> bool:
        last = self.messages[-1]
        return bool(last.refusal) and not last.content

    @property
    def value(self) -> str | list[dict[str, Any]]:
        """The answer as a decision stores it: a text where a text says it all, else messages."""
        last = self.messages[-1]
        if len(self.messages) == 1 and last.role == "assistant" and last.is_text and not last.tool_calls:
            return last.text
        return [message.dump() for message in self.messages]


def response_of(messages: Sequence[ChatMessage]) -> AssistantResponse:
    """The response made of these turns; the reasoning of all of them is joined and taken out."""
    reasoning = "\n\n".join(message.reasoning for message in messages if message.reasoning)
    return AssistantResponse(tuple(m.model_copy(update={"reasoning": ""}) for m in messages), reasoning)


# --- Reasoning within a text ---------------------------------------------------------------------------------

_THINK = re.compile(r"\s*<(think|thinking|thought|reasoning)>(.*?)</\1>\s*", re.DOTALL)
_FENCE = re.compile(r"\s*:::thinking\n(.*?)\n:::\s*", re.DOTALL)
_THINK_END = re.compile(r"</(?:think|thinking)>\s*")
_DETAILS = re.compile(r'\s*<details\b[^>]*\btype="reasoning"[^>]*>(.*?)</details>\s*', re.DOTALL)
_SUMMARY = re.compile(r"<summary>.*?</summary>", re.DOTALL)


def reasoning_split(text: str) -> tuple[str, str]:
    """A text without the reasoning it begins with, and that reasoning ("" where it has none).

    Read are `<think>...</think>` (also without its opening tag, which some chat templates put into the prompt),
    `<details type="reasoning">` as Open WebUI stores it and `:::thinking` as LibreChat does. Tags further inside a text
    belong to the text.
    """
    thoughts: list[str] = []
    while True:
        if found := _THINK.match(text):
            thoughts.append(found[2].strip())
        elif found := _FENCE.match(text):
            thoughts.append(found[1].strip())
        elif found := _DETAILS.match(text):
            lines = html.unescape(_SUMMARY.sub("", found[1])).strip().splitlines()
            thoughts.append("\n".join(re.sub(r"^\s*> ?", "", line) for line in lines).strip())
        else:
            break
        text = text[found.end() :]
    if not thoughts and "<think" not in text and (found := _THINK_END.search(text)):
        thoughts.append(text[: found.start()].strip())
        text = text[found.end() :]
    return text, "\n\n".join(filter(None, thoughts))


# --- Reading -------------------------------------------------------------------------------------------------


def messages_read(value: Any, where: str = "messages") -> list[ChatMessage]:
    """Messages of a chat, of whatever dialect; a text is one turn of the user.

    An item may become several messages (Anthropic's tool results stand inside a user's turn) or join the one before
    (calls and reasoning of OpenAI's Responses API stand beside the message). Raises MessageError.
    """
    if isinstance(value, str):
        return [ChatMessage(role="user", content=value)]
    if not isinstance(value, Sequence):
        raise MessageError(f"{where}: expected a list of messages, found {_excerpt(value)}")
    found: list[ChatMessage] = []
    beside = False
    for index, item in enumerate(value):
        before, beside = beside, _is_beside(item)
        for message in _message(item, f"{where}[{index}]"):
            joins = (before or beside) and found and found[-1].role == message.role == "assistant"
            if joins and not (found[-1].content and message.content):
                found[-1] = _joined(found[-1], message)
            else:
                found.append(message)
    return found


def _is_beside(item: Any) -> bool:
    """True of an item of the Responses API that belongs to the assistant's message next to it."""
    return isinstance(item, Mapping) and "role" not in item and item.get("type") in BESIDE


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    """One turn of two items of it."""
    return one.model_copy(
        update={
            "content": one.content or other.content,
            "reasoning": "\n\n".join(filter(None, (one.reasoning, other.reasoning))),
            "refusal": one.refusal or other.refusal,
            "tool_calls": [*one.tool_calls, *other.tool_calls],
            **(other.model_extra or {}),
        }
    )


def message_read(value: Any, where: str = "message", *, role: str = "") -> ChatMessage:
    """One message. role: used where the message does not say who speaks. Raises MessageError."""
    found = list(_message(value, where, role))
    if len(found) != 1:
        raise MessageError(f"{where}: expected one message, found {len(found)}")
    return found[0]


def _message(value: Any, where: str, default_role: str = "") -> Iterator[ChatMessage]:
    if isinstance(value, str):
        yield ChatMessage(role=default_role or "user", content=value)
        return
    if isinstance(value, ChatMessage):
        yield value
        return
    if is_pair(value):
        value = {"role": value[0], "content": value[1]}
    if not isinstance(value, Mapping):
        raise MessageError(f"{where}: expected a message {{role, content}}, found {_excerpt(value)}")
    given = _undo_wrapping(dict(value))
    item_type = given.get("type")
    if item_type in ("function_call", "custom_tool_call") and "name" in given and "role" not in given:
        call = {"id": given.pop("call_id", None) or given.pop("id", None),
                "name": given.pop("name"), "arguments": given.pop("arguments", given.pop("input", ""))}  # fmt: skip
        given = {"role": "assistant", "tool_calls": [call]}
    elif item_type in ("function_call_output", "custom_tool_call_output") and "role" not in given:
        given = {"role": "tool", "tool_call_id": given.get("call_id"), "content": given.get("output")}
    elif item_type == "reasoning" and "role" not in given:
        given = {"role": "assistant", "content": [dict(value)]}
    elif item_type == "message":
        given.pop("type")
    said_role = given.pop("role", None) or default_role
    if not isinstance(said_role, str) or not said_role.strip():
        raise MessageError(
            f"{where}.role: expected system, user, assistant or tool, found {_excerpt(said_role)}"
        )
    role = ROLES.get(_role_name(said_role))
    if role is None:
        raise MessageError(
            f"{where}.role: expected system, user, assistant or tool, found {_excerpt(said_role)}"
        )
    parts = _Parts(where)
    for key in ("content", "parts", "text", "value"):
        if key in given and (key in ("content", "parts") or "content" not in value):
            parts.add(given.pop(key))
    for key in REASONING_KEYS:
        if isinstance(given.get(key), str):
            if thought := given.pop(key).strip():
                parts.reasoning.append(thought)
        elif isinstance(given.get(key), list):
            parts.add([{"type": "reasoning", "content": given.pop(key)}])
        elif given.get(key) is None:
            given.pop(key, None)
    if isinstance(details := given.get("reasoning_details"), list) and not parts.reasoning:
        parts.add([{"type": "reasoning", "content": details}])
    stated = given.pop("tool_calls", None) or []
    if not isinstance(stated, list):
        raise MessageError(f"{where}.tool_calls: expected a list of calls, found {_excerpt(stated)}")
    calls = [*parts.calls, *stated]
    if legacy := given.pop("function_call", None):
        calls.append(legacy)
    if said_role in ("function_call", "tool_call"):
        calls += _json_calls(parts.text, where)
        parts.content = []
    given = {key: item for key, item in given.items() if item not in (None, [], {}, "")}
    if not isinstance(given.get("refusal", ""), str):
        raise MessageError(f"{where}.refusal: expected a text, found {_excerpt(given['refusal'])}")
    content = parts.value
    if role == "assistant" and isinstance(content, str):
        content, thought = reasoning_split(content)
        parts.reasoning += [thought] if thought else []
    yield from parts.results
    if parts.results and not content and not calls and not parts.reasoning:
        return
    refusal = given.pop("refusal", "") or "".join(parts.refusals)
    try:
        yield ChatMessage(
            role=role,
            content=content,
            reasoning="\n\n".join(parts.reasoning),
            refusal=refusal,
            tool_calls=[_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)],
            **given,
        )
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in fault["loc"])
        raise MessageError(f"{where}.{place}: {fault['msg']}, found {_excerpt(fault['input'])}") from None


def _undo_wrapping(message: dict[str, Any]) -> dict[str, Any]:
    """The message inside LangChain's constructor, {type, data} or {type, content}; ShareGPT's `from` as role."""
    if isinstance(message.get("kwargs"), Mapping):
        path = message.get("id")
        name = str(path[-1]) if isinstance(path, list) and path else ""
        kind = name.removesuffix("Chunk").removesuffix("Message").lower()
        message = {**message["kwargs"]}
        message["role"] = message.pop("type", None) or kind
    elif isinstance(message.get("data"), Mapping) and isinstance(message.get("type"), str):
        message = {**message["data"], "role": message["type"]}
    elif "role" not in message and "content" in message and _role_name(message.get("type")) in ROLES:
        message = {"role": message.pop("type"), **message}
    for key in ("from", "sender"):
        if "role" not in message and key in message:
            message["role"] = message.pop(key)
    more = message.get("additional_kwargs")
    if isinstance(more, Mapping):
        message.pop("additional_kwargs")
        message = {**more, **{key: item for key, item in message.items() if item not in (None, [], {})}}
    return message


def is_pair(value: Any) -> bool:
    """True of a message as a role and its text, which LangChain accepts."""
    is_list = isinstance(value, (list, tuple)) and len(value) == 2
    return is_list and all(isinstance(item, str) for item in value) and _role_name(value[0]) in ROLES


def _role_name(value: Any) -> str:
    """A role in lower case; LangChain names it by a class: AIMessageChunk."""
    return str(value).strip().lower().removesuffix("chunk").removesuffix("message")


class _Parts:
    """Sorts the parts of a content into text, reasoning, calls, results and whatever else there is."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.content: list[Any] = []
        self.reasoning: list[str] = []
        self.refusals: list[str] = []
        self.calls: list[Any] = []
        self.results: list[ChatMessage] = []

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self.content if _is_text_part(part))

    @property
    def value(self) -> str | list[Any]:
        return self.text if all(map(_is_text_part, self.content)) else self.content

    def add(self, content: Any) -> None:
        if content is None:
            return
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, str):
            self.content.append({"type": "text", "text": content})
        elif isinstance(content, Sequence):
            for index, part in enumerate(content):
                self._part(part, f"{self.where}.content[{index}]")
        else:
            raise MessageError(f"{self.where}.content: expected a text, found {_excerpt(content)}")

    def _part(self, part: Any, where: str) -> None:
        if isinstance(part, str):
            self.content.append({"type": "text", "text": part})
            return
        if not isinstance(part, Mapping):
            raise MessageError(
                f'{where}: expected a part such as {{"type": "text", "text": ...}}, found {_excerpt(part)}'
            )
        kind = part.get("type") or _kind(part)
        if kind in REASONING_PARTS or part.get("thought") is True or kind == "reasoningContent":
            if thought := _words(part.get(kind) or part).strip():
                self.reasoning.append(thought)
        elif kind == "cachePoint":
            return  # where Bedrock is to cache the prompt: nothing is said
        elif kind in TEXT_PARTS:
            words = next((part[key] for key in ("text", "content", "value") if key in part), None)
            if isinstance(words, Mapping):  # the Assistants API and LibreChat nest it
                words = words.get("value")
            if not isinstance(words, str):
                raise MessageError(f"{where}.text: expected a text, found {_excerpt(words)}")
            self.content.append({"type": "text", "text": words})
        elif kind == "refusal":
            self.refusals.append(str(part.get("refusal", "")))
        elif kind in ("tool_use", "toolUse", "tool_call", "functionCall", "function_call"):
            inner = part.get(kind)
            if isinstance(part.get("value"), str):  # LLaMA-Factory puts the JSON of a call there
                self.calls += _json_calls(part["value"], where)
            else:
                self.calls.append(inner if isinstance(inner, Mapping) else part)
        elif kind in ("tool_result", "toolResult", "tool_call_response", "functionResponse"):
            inner = part.get(kind)
            self.results.append(_result(inner if isinstance(inner, Mapping) else part, where))
        else:
            self.content.append(dict(part))


def _kind(part: Mapping[str, Any]) -> str:
    """The type of a part that does not state it: Gemini and Bedrock name it by its key."""
    for key in (
        "text",
        "functionCall",
        "functionResponse",
        "toolUse",
        "toolResult",
        "reasoningContent",
        "thinking",
    ):
        if key in part:
            return key
    return next(iter(part), "")


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _words(value: Any) -> str:
    """The words in a part of reasoning, however deep its provider puts them."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        keys = (
            "thinking",
            "think",
            "reasoningText",
            "text",
            "value",
            "content",
            "reasoning",
            "summary",
            "data",
        )
        return next((words for key in keys if key in value and (words := _words(value[key]))), "")
    if isinstance(value, Sequence):
        return "".join(map(_words, value))
    return ""


def _result(part: Mapping[str, Any], where: str) -> ChatMessage:
    """The tool's message in a part that holds a result."""
    key = next((key for key in ("content", "response", "result", "output") if key in part), "")
    content = part.get(key)
    if isinstance(content, list):
        inner = _Parts(where)
        inner.add(content)
        content = inner.value
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    known = ("tool_use_id", "toolUseId", "tool_call_id", "id", "name", "type", key)
    more = {name: item for name, item in part.items() if name not in known and item is not None}
    found = next((part[name] for name in known[:4] if isinstance(part.get(name), str)), None)
    return ChatMessage(role="tool", content=content, tool_call_id=found, name=part.get("name"), **more)


def _call(value: Any, where: str) -> ToolCall:
    """A tool call of any dialect: OpenAI's, Anthropic's (name, input), LangChain's and Gemini's (name, args)."""
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, Mapping):
        raise MessageError(f"{where}: expected a tool call {{id, function}}, found {_excerpt(value)}")
    call = {key: item for key, item in value.items() if item is not None}
    function = call.get("function")
    if isinstance(custom := call.get("custom"), Mapping) and not isinstance(function, Mapping):
        # OpenAI's custom tools take a text
        function = {"name": custom.get("name"), "arguments": custom.get("input")}
        call.pop("custom")
    if not isinstance(function, Mapping):
        name = call.pop("name", function)
        key = next((key for key in ("arguments", "input", "args", "parameters") if key in call), "")
        function = {"name": name, "arguments": call.pop(key, "")}
    call_id = next(
        (call.pop(key) for key in ("id", "call_id", "toolUseId") if isinstance(call.get(key), str)), None
    )
    more = {key: item for key, item in call.items() if key not in ("function", "type", "id", "index")}
    try:
        return ToolCall(id=call_id or None, function=FunctionCall(**{"arguments": "", **function}), **more)
    except (ValidationError, TypeError):
        raise MessageError(
            f"{where}: expected a function's name and its arguments, found {_excerpt(value)}"
        ) from None


def _json_calls(text: str, where: str) -> list[Any]:
    """The calls in a ShareGPT turn of `function_call`: JSON of one call, or a list of them."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{where}: expected a tool call as JSON, found {_excerpt(text)}") from error
    return found if isinstance(found, list) else [found]


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
