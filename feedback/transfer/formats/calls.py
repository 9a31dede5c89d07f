"""Model calls as gateways and tracing tools log them: the chat request is the prompt, the first choice the response.

Requests and answers come as OpenAI chat objects, lists of messages, LangChain messages, single texts, or as the JSON
text of any of these. Images, audio and files are refused (`not_text`): a decision is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from feedback.storage.responses import Completion, Message, value_excerpt
from feedback.transfer.formats.base import tools_of
from feedback.transfer.formats.records import (
    SYSTEM_COLUMNS,
    ImportedDecision,
    Record,
    RowError,
    RowSkipped,
    check_json,
    completion_of,
    mapping_of,
    message_of,
    messages_of,
    system_in,
    text_of,
    with_system,
)

QUESTIONS = ("question", "query", "prompt", "input", "user_input", "instruction", "text", "message")
"""Keys of a request that hold the prompt as one text, likeliest first."""

ANSWERS = (
    "answer",
    "output",
    "response",
    "completion",
    "text",
    "content",
    "result",
    "generated_text",
    "output_text",
)
"""Keys of an answer that hold the response, likeliest first."""


def json_value(value: Any) -> Any:
    """The value of a JSON text; anything else, and a text that is no JSON object, list or text, as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", '"'):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


# --- Prompts -----------------------------------------------------------------------------------------------


def prompt_of(value: Any, what: str) -> list[Message]:
    """The prompt of a request: its messages, or the one text it asks. Raises RowError."""
    request = json_value(value)
    if isinstance(request, Mapping):
        for key in ("messages", "contents", "input"):
            if isinstance(request.get(key), (list, Mapping)) and request[key]:
                inner = prompt_of(request[key], f"{what}.{key}")
                return with_system(system_in(request), inner, what)
            if key != "input" and isinstance(request.get(key), str) and request[key].strip():
                return with_system(system_in(request), chat_of(request[key], f"{what}.{key}"), what)
        question = [{"role": "user", "content": _one_text(without_system(request), QUESTIONS, what)}]
        return with_system(system_in(request), question, what)
    if isinstance(request, list):
        return chat_of(request, what)
    return [{"role": "user", "content": text_of(request, what, required=True)}]


def without_system(request: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in request.items() if key not in SYSTEM_COLUMNS}


def chat_of(value: Any, what: str) -> list[Message]:
    """Messages of any of the usual spellings; a batch of one (`[[...]]`, as LangChain has it) is that one."""
    items = json_value(value)
    if isinstance(items, list) and items and all(isinstance(item, list) for item in items):
        if len(items) > 1:
            raise RowError(f"{what}: expected one conversation, found a batch of {len(items)}")
        items = items[0]
    return messages_of(items, what)


def turn_of(value: Any, what: str) -> Message:
    """One message, of any dialect. Raises RowError."""
    return message_of({"role": "user", "content": value} if isinstance(value, str) else value, what)


# --- Responses ---------------------------------------------------------------------------------------------


def answer_of(value: Any, what: str) -> Completion:
    """The response in an answer; "" where there is none. Raises RowError."""
    found = [answer for answer in answers_of(value, what) if answer]
    return found[0] if found else ""


def answers_of(value: Any, what: str) -> list[Completion]:
    """The responses in an answer: of each choice (they are alternatives, no further turns), the first one first."""
    answer = json_value(value)
    if answer is None or answer in ({}, []):
        return []
    if isinstance(answer, Mapping):
        for key, read in (("choices", _choices), ("generations", _generations), ("candidates", _candidates)):
            if isinstance(answer.get(key), list):
                return read(answer[key], f"{what}.{key}")
        if "role" in answer or answer.get("tool_calls") or isinstance(answer.get("kwargs"), Mapping):
            return [completion_of([turn_of(_by_assistant(answer), what)], what)]
        if isinstance(answer.get("message"), Mapping):
            return answers_of(answer["message"], f"{what}.message")
        if isinstance(answer.get("messages"), list):
            return answers_of(answer["messages"], f"{what}.messages")
        for key in ("content", "output"):
            if isinstance(answer.get(key), list):
                return answers_of(answer[key], f"{what}.{key}")
        if isinstance(answer.get("output"), Mapping):
            return answers_of(answer["output"], f"{what}.output")
        if isinstance(value, str) and not any(isinstance(answer.get(key), str) for key in ANSWERS):
            # a model that was asked for JSON: its words are the response
            return [text_of(value, what)]
        return [_one_text(answer, ANSWERS, what)]
    if isinstance(answer, list):
        return _last_turn(answer, what, value)
    return [text_of(answer, what)]


def _choices(choices: Sequence[Any], what: str) -> list[Completion]:
    ordered = sorted(
        enumerate(choices),
        key=lambda item: _index(item[1], item[0]),
    )
    found: list[Completion] = []
    for index, item in ordered:
        choice, where = mapping_of(item, f"{what}[{index}]"), f"{what}[{index}]"
        if isinstance(choice.get("message"), Mapping):
            turn = turn_of(_by_assistant(choice["message"]), f"{where}.message")
            found.append(completion_of([turn], f"{where}.message"))
        elif isinstance(choice.get("text"), str):
            found.append(text_of(choice["text"], f"{where}.text"))
    return found


def _by_assistant(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message of an answer, whose role need not be said; LangChain says it in its own way."""
    return message if message.get("role") or "kwargs" in message else {**message, "role": "assistant"}


def _index(choice: Any, place: int) -> int:
    """The number a choice gives itself, else its place in the list."""
    index = choice.get("index") if isinstance(choice, Mapping) else None
    return index if isinstance(index, int) and not isinstance(index, bool) else place


def _generations(generations: Sequence[Any], what: str) -> list[Completion]:
    """LangChain's LLMResult: a list of alternatives per prompt, and here there was one prompt."""
    items = generations[0] if generations and isinstance(generations[0], list) else generations
    found: list[Completion] = []
    for index, item in enumerate(items):
        generation, where = mapping_of(item, f"{what}[{index}]"), f"{what}[{index}]"
        if isinstance(generation.get("message"), Mapping):
            found.append(completion_of([turn_of(generation["message"], where)], where))
        else:
            found.append(text_of(generation.get("text"), f"{where}.text"))
    return found


def _candidates(candidates: Sequence[Any], what: str) -> list[Completion]:
    """Gemini's alternatives, each a content of parts."""
    found: list[Completion] = []
    for index, item in enumerate(candidates):
        content, where = mapping_of(item, f"{what}[{index}]").get("content"), f"{what}[{index}].content"
        if isinstance(content, Mapping):
            found.append(completion_of([turn_of({"role": "assistant", **content}, where)], where))
    return found


def _last_turn(items: Sequence[Any], what: str, raw: Any) -> list[Completion]:
    """Of a list: text parts are one response; of messages the last one by the assistant is."""
    if all(isinstance(item, Mapping) and item.get("type") in ("text", "output_text") for item in items):
        return [completion_of([message_of({"role": "assistant", "content": list(items)}, what)], what)]
    if all(isinstance(item, str) for item in items):
        if len(items) != 1:
            return [text_of(raw, what) if isinstance(raw, str) else json.dumps(items, ensure_ascii=False)]
        return [text_of(items[0], f"{what}[0]")]
    turns = messages_of(list(items), what)
    # of a Responses answer, reasoning and calls are items beside the message
    if any(isinstance(item, Mapping) and item.get("type") in ITEM_TYPES for item in items):
        own = [turn for turn in turns if turn["role"] == "assistant"]
        return [completion_of([_joined(own)], what)]
    for turn in reversed(turns):
        if turn["role"] == "assistant":
            return [completion_of([turn], what)]
    raise RowError(f"{what}: expected a message of the assistant, found {value_excerpt(items)}")


ITEM_TYPES = ("function_call", "reasoning", "custom_tool_call")


def _joined(turns: Sequence[Message]) -> Message:
    """Several turns of the assistant as one: texts and reasoning after each other, all calls."""
    joined: Message = {"role": "assistant", "content": "".join(turn["content"] for turn in turns)}
    if reasoning := "\n\n".join(turn["reasoning"] for turn in turns if turn.get("reasoning")):
        joined["reasoning"] = reasoning
    if calls := [call for turn in turns for call in turn.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    rest = {
        key: value for turn in turns for key, value in turn.items() if key not in joined and key != "role"
    }
    return joined | rest


def _one_text(value: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    """The text under the likeliest name, the only text there is, or the whole object as JSON."""
    for name in names:
        if isinstance(value.get(name), str) and value[name].strip():
            return text_of(value[name], f"{what}.{name}")
    texts = [key for key, item in value.items() if isinstance(item, str) and item.strip()]
    if len(texts) == 1:
        return text_of(value[texts[0]], f"{what}.{texts[0]}")
    if not value:
        raise RowError(f"{what}: is empty")
    check_json(value, what)
    return json.dumps(value, ensure_ascii=False)


def plain_text(value: Completion) -> str:
    """A response as a candidate is listed: its text, or its messages as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Decisions ---------------------------------------------------------------------------------------------


def call_decision(
    line: int, key: str, request: Any, answer: Any, *, metadata: dict[str, Any] | None = None, **facts: Any
) -> Iterator[Record]:
    """The decision a logged call is, with further choices as candidates; a row without a response is skipped.

    facts: further fields of ImportedDecision. Raises RowError.
    """
    responses = [response for response in answers_of(answer, "response") if response]
    if not responses:
        yield RowSkipped(line, key, NO_RESPONSE)
        return
    request_value = json_value(request)
    messages = [] if _asks_nothing(request_value) else prompt_of(request_value, "request")
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        yield RowSkipped(line, key, NO_PROMPT)
        return
    tools = tools_of(request_value) if isinstance(request_value, Mapping) else {}
    yield ImportedDecision(
        line=line,
        key=key,
        messages=messages,
        response=responses[0],
        candidates=[plain_text(response) for response in responses] if len(responses) > 1 else None,
        metadata={**(metadata or {}), **tools},
        **facts,
    )


NO_RESPONSE = "no response"
NO_PROMPT = "what was asked was not recorded"

PARAMETERS = frozenset(
    (
        "model", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stream", "user", "seed", "n", "stop",
        "tools", "tool_choice", "response_format", "metadata", "stream_options", "messages", "contents", "input",
        "prompt",
    )
)  # fmt: skip
"""Keys of a request that say how to answer; in one that holds no others no question stands under another name."""


def _asks_nothing(request: Any) -> bool:
    if isinstance(request, Mapping):
        return all(
            value in (None, "", [], {}) or key in PARAMETERS for key, value in request.items()
        ) and not any(request.get(key) for key in ("messages", "contents", "input", "prompt"))
    return request in (None, "", [])


def whole_of(value: Any) -> int | None:
    """A number of tokens, where it is one; also as a text, as some databases export 64-bit numbers."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text_or_empty(value: Any) -> str:
    """A text of at most 200 characters for a column of names; "" for anything else, and for what cannot be stored."""
    if not isinstance(value, str) or "\x00" in value or any("\ud800" <= mark <= "\udfff" for mark in value):
        return ""
    return value[:200]


def metadata_retained(**values: Any) -> dict[str, Any]:
    """Metadata of the values that say something."""
    return {
        name: check_json(value, name) for name, value in values.items() if value not in (None, "", [], {})
    }


def object_or_empty(value: Any) -> Mapping[str, Any]:
    """An object as it is; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}
