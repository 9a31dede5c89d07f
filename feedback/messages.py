"""Chat messages (roles, text or parts, tool calls, reasoning, refusals) in any provider's dialect.

`messages_read` accepts OpenAI (chat and Responses), Anthropic, Gemini, Bedrock, LangChain, OpenTelemetry and ShareGPT
messages and returns `ChatMessage` objects. `dump` writes OpenAI's form, with the reasoning in a field of its own.
Needs pydantic alone, so that training can use it without Django.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

Message: TypeAlias = dict[str, Any]
Completion: TypeAlias = str | list[Message]
"""A response: a text, or chat messages where a text cannot say it (tool calls and their results)."""

_ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "customer"),
    "assistant": ("assistant", "ai", "gpt", "model", "bot", "chatbot", "agent", "function_call", "tool_call"),
    "tool": ("tool", "function", "observation", "tool_response", "ipython", "tool_result", "environment"),
}
ROLES = {name: role for role, names in _ROLE_NAMES.items() for name in names}
"""Role name of any program -> system, user, assistant or tool."""

REASONING_KEYS = ("reasoning", "reasoning_content", "thinking", "thought", "thoughts", "reasoning_text")
"""Keys of a message that hold the model's reasoning, most common first."""

TEXT_PARTS = ("text", "input_text", "output_text", "summary_text")
REASONING_PARTS = ("thinking", "reasoning", "redacted_thinking", "reasoning_text", "summary", "think")

OBJECT = (dict, Mapping)
"""For isinstance, which recognises a dict far sooner than a Mapping."""

BESIDE = ("reasoning", "function_call", "custom_tool_call")
"""Items of OpenAI's Responses API that belong to the neighbouring assistant message."""


class MessageError(ValueError):
    """The message is invalid. The text names the place, the expected and the found value."""


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = ""
    """JSON text, as in OpenAI's API; objects are converted."""

    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, value: object) -> object:
        if value is None:
            return ""
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    @property
    def parsed(self) -> object:
        """The arguments as a JSON value, or the text if it is not JSON."""
        try:
            return json.loads(self.arguments) if self.arguments.strip() else {}
        except (ValueError, RecursionError):
            return self.arguments


class ToolCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One turn of a chat. Keys unknown to every dialect become extra fields."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] = ""
    """The text, or a list of parts if one is not text (image, audio, file)."""
    reasoning: str = ""
    """The model's reasoning before its answer; not part of the answer."""
    refusal: str = ""
    tool_calls: list[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    @property
    def is_text(self) -> bool:
        return isinstance(self.content, str)

    @property
    def text(self) -> str:
        """Text of the content, or else of the refusal, without other parts."""
        if isinstance(self.content, str):
            return self.content or self.refusal
        return "".join(part["text"] for part in self.content if _is_text_part(part))

    @property
    def bare(self) -> ChatMessage:
        return ChatMessage.model_construct(**{name: getattr(self, name) for name in ChatMessage.model_fields})

    def dump(self) -> Message:
        """The message in OpenAI's form: `role`, `content` and every other field that is not empty."""
        found: Message = {"role": self.role, "content": self.content}
        found |= {key: value for key in ("reasoning", "refusal") if (value := getattr(self, key))}
        if self.tool_calls:
            found["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        found |= {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key)) is not None}
        return found | (self.model_extra or {})


@dataclass(frozen=True)
class AssistantResponse:
    """The answer to a prompt, and its reasoning."""

    messages: tuple[ChatMessage, ...]
    reasoning: str = ""

    @property
    def is_refusal(self) -> bool:
        last = self.messages[-1]
        return bool(last.refusal) and not last.content

    @property
    def value(self) -> str | list[Message]:
        """The answer as a decision stores it: its text, or its messages if there is more than one text."""
        last = self.messages[-1]
        if len(self.messages) == 1 and last.role == "assistant" and last.is_text and not last.tool_calls:
            return last.text
        return [message.dump() for message in self.messages]


def response_of(messages: Sequence[ChatMessage]) -> AssistantResponse:
    """A response of these turns; their reasoning is joined into one field."""
    reasoning = "\n\n".join(message.reasoning for message in messages if message.reasoning)
    return AssistantResponse(tuple(m.model_copy(update={"reasoning": ""}) for m in messages), reasoning)


# --- Reasoning within a text ---------------------------------------------------------------------------------

_THINK = re.compile(r"\s*<(think|thinking|thought|reasoning)>(.*?)</\1>\s*", re.DOTALL)
_FENCE = re.compile(r"\s*:::thinking\n(.*?)\n:::\s*", re.DOTALL)
_THINK_END = re.compile(r"</(?:think|thinking)>\s*")
_DETAILS = re.compile(r'\s*<details\b(?=[^>]*\btype="reasoning")[^>]*>(.*?)</details>\s*', re.DOTALL)
_SUMMARY = re.compile(r"<summary>.*?</summary>|(<summary>.*)", re.DOTALL)
"""The second alternative keeps a summary without an end, and stops the search."""


def reasoning_split(text: str) -> tuple[str, str]:
    """(text without leading reasoning, that reasoning or "").

    Recognises `<think>...</think>` (also without the opening tag, which some chat templates put into the prompt),
    Open WebUI's `<details type="reasoning">` and LibreChat's `:::thinking`. Tags further inside belong to the text.
    """
    thoughts: list[str] = []
    at = 0
    while True:
        if found := _THINK.match(text, at):
            thoughts.append(found[2].strip())
        elif found := _FENCE.match(text, at):
            thoughts.append(found[1].strip())
        elif found := _DETAILS.match(text, at):
            lines = html.unescape(_SUMMARY.sub(r"\1", found[1])).strip().splitlines()
            thoughts.append("\n".join(re.sub(r"^\s*> ?", "", line) for line in lines).strip())
        else:
            break
        at = found.end()
    text = text[at:]
    if not thoughts and "<think" not in text and (found := _THINK_END.search(text)):
        thoughts.append(text[: found.start()].strip())
        text = text[found.end() :]
    return text, "\n\n".join(filter(None, thoughts))


# --- Reading -------------------------------------------------------------------------------------------------


def messages_read(value: object, where: str = "messages") -> list[ChatMessage]:
    """Read a chat in any dialect; a text is one user message. Raises MessageError.

    One item may become several messages (Anthropic's tool results are parts of a user message) or join the previous
    one (OpenAI's Responses API sends calls and reasoning as items of their own).
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
    return isinstance(item, OBJECT) and "role" not in item and item.get("type") in BESIDE


def _joined(one: ChatMessage, other: ChatMessage) -> ChatMessage:
    return one.model_copy(
        update={
            "content": one.content or other.content,
            "reasoning": "\n\n".join(filter(None, (one.reasoning, other.reasoning))),
            "refusal": one.refusal or other.refusal,
            "tool_calls": [*one.tool_calls, *other.tool_calls],
            **(other.model_extra or {}),
        }
    )


def message_read(value: object, where: str = "message", *, role: str = "") -> ChatMessage:
    """Read one message; `role` is the default. Raises MessageError."""
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
    if not isinstance(value, OBJECT):
        raise MessageError(f"{where}: expected a message {{role, content}}, found {_excerpt(value)}")
    given = _responses_item(_undo_wrapping(dict(value)), value)
    said_role = given.pop("role", None) or default_role
    role = ROLES.get(_role_name(said_role)) if isinstance(said_role, str) else None
    if role is None:
        raise MessageError(
            f"{where}.role: expected system, user, assistant or tool, found {_excerpt(said_role)}"
        )
    parts = _Parts(where)
    for key in ("content", "parts", "text", "value"):
        if key in given and (key in ("content", "parts") or "content" not in value):
            parts.add(given.pop(key))
    if given:
        _take_reasoning(given, parts)
    calls = _take_calls(given, parts, where)
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


def _responses_item(given: dict[str, object], original: Mapping[str, object]) -> dict[str, Any]:
    """An item of OpenAI's Responses API as a chat message; any other message unchanged."""
    kind = given.get("type")
    if kind == "message":
        given.pop("type")
    if "role" in given:
        return given
    if kind in ("function_call", "custom_tool_call") and "name" in given:
        call_id = given.get("call_id") or given.get("id")
        arguments = given.get("arguments", given.get("input", ""))
        return {
            "role": "assistant",
            "tool_calls": [{"id": call_id, "name": given["name"], "arguments": arguments}],
        }
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "tool_call_id": given.get("call_id"), "content": given.get("output")}
    if kind == "reasoning":
        return {"role": "assistant", "content": [dict(original)]}
    return given


def _take_reasoning(given: dict[str, Any], parts: _Parts) -> None:
    for key in REASONING_KEYS:
        if key not in given:
            continue
        if isinstance(given[key], str):
            if thought := given.pop(key).strip():
                parts.reasoning.append(thought)
        elif isinstance(given[key], list):
            parts.add([{"type": "reasoning", "content": given.pop(key)}])
        elif given[key] is None:
            given.pop(key)
    if isinstance(details := given.get("reasoning_details"), list) and not parts.reasoning:
        parts.add([{"type": "reasoning", "content": details}])


def _take_calls(given: dict[str, object], parts: _Parts, where: str) -> list[object]:
    stated = given.pop("tool_calls", None) or []
    if not isinstance(stated, list):
        raise MessageError(f"{where}.tool_calls: expected a list of calls, found {_excerpt(stated)}")
    legacy = given.pop("function_call", None)
    return [*parts.calls, *stated, *([legacy] if legacy else [])]


def _undo_wrapping(message: dict[str, Any]) -> dict[str, object]:
    """Unwrap LangChain's constructor, {type, data} and {type, content}; take ShareGPT's `from` as the role."""
    if "kwargs" in message and isinstance(message["kwargs"], Mapping):
        path = message.get("id")
        name = str(path[-1]) if isinstance(path, list) and path else ""
        kind = name.removesuffix("Chunk").removesuffix("Message").lower()
        message = {**message["kwargs"]}
        message["role"] = message.pop("type", None) or kind
    elif "data" in message and isinstance(message["data"], Mapping) and isinstance(message.get("type"), str):
        message = {**message["data"], "role": message["type"]}
    elif "role" not in message and "content" in message and _role_name(message.get("type")) in ROLES:
        message = {"role": message.pop("type"), **message}
    for key in ("from", "sender"):
        if "role" not in message and key in message:
            message["role"] = message.pop(key)
    if "additional_kwargs" in message and isinstance(more := message["additional_kwargs"], Mapping):
        message.pop("additional_kwargs")
        message = {**more, **{key: item for key, item in message.items() if item not in (None, [], {})}}
    return message


def is_pair(value: Any) -> bool:
    """True for LangChain's (role, text) form of a message."""
    is_list = isinstance(value, (list, tuple)) and len(value) == 2
    return is_list and all(isinstance(item, str) for item in value) and _role_name(value[0]) in ROLES


def _role_name(value: object) -> str:
    """A role in lower case, also of LangChain's class names such as AIMessageChunk."""
    return str(value).strip().lower().removesuffix("chunk").removesuffix("message")


class _Parts:
    """Sorts the parts of a content into text, reasoning, refusals, calls, results and others."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.content: list[Any] = []
        self.reasoning: list[str] = []
        self.refusals: list[str] = []
        self.calls: list[object] = []
        self.results: list[ChatMessage] = []

    @property
    def text(self) -> str:
        return "".join(part["text"] for part in self.content if _is_text_part(part))

    @property
    def value(self) -> str | list[object]:
        texts = [part["text"] for part in self.content if _is_text_part(part)]
        return "".join(texts) if len(texts) == len(self.content) else self.content

    def add(self, content: object) -> None:
        if content is None:
            return
        if isinstance(content, str):
            self.content.append({"type": "text", "text": content})
            return
        if isinstance(content, OBJECT):
            content = [content]
        if isinstance(content, Sequence):
            for index, part in enumerate(content):
                self._part(part, f"{self.where}.content[{index}]")
        else:
            raise MessageError(f"{self.where}.content: expected a text, found {_excerpt(content)}")

    def _part(self, part: object, where: str) -> None:
        if isinstance(part, str):
            self.content.append({"type": "text", "text": part})
            return
        if not isinstance(part, OBJECT):
            raise MessageError(
                f'{where}: expected a part such as {{"type": "text", "text": ...}}, found {_excerpt(part)}'
            )
        kind = part.get("type") or _kind(part)
        if kind in REASONING_PARTS or part.get("thought") is True or kind == "reasoningContent":
            if thought := _words(part.get(kind) or part).strip():
                self.reasoning.append(thought)
        elif kind == "cachePoint":
            return  # Bedrock's mark for prompt caching.
        elif kind in TEXT_PARTS:
            words = next((part[key] for key in ("text", "content", "value") if key in part), None)
            if isinstance(words, Mapping):  # Nested by the Assistants API and LibreChat.
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


def _kind(part: Mapping[str, object]) -> str:
    """Type of a part without `type`: Gemini and Bedrock use it as the key."""
    kinds = (
        "text",
        "functionCall",
        "functionResponse",
        "toolUse",
        "toolResult",
        "reasoningContent",
        "thinking",
    )
    for key in kinds:
        if key in part:
            return key
    return next(iter(part), "")


def _is_text_part(part: object) -> bool:
    return isinstance(part, OBJECT) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _words(value: object) -> str:
    """Text in a reasoning part, at any depth."""
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
    """The tool message of a part with a result."""
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


def _call(value: object, where: str) -> ToolCall:
    """Read a tool call of OpenAI, Anthropic (name, input), LangChain or Gemini (name, args)."""
    if isinstance(value, ToolCall):
        return value
    if not isinstance(value, Mapping):
        raise MessageError(f"{where}: expected a tool call {{id, function}}, found {_excerpt(value)}")
    call = {key: item for key, item in value.items() if item is not None}
    function = call.get("function")
    if isinstance(custom := call.get("custom"), Mapping) and not isinstance(function, Mapping):
        # OpenAI's custom tools take a text.
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


def _json_calls(text: str, where: str) -> list[object]:
    """Calls in a ShareGPT turn of `function_call`: JSON of one call or a list."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"{where}: expected a tool call as JSON, found {_excerpt(text)}") from error
    return found if isinstance(found, list) else [found]


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
