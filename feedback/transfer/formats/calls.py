"""Model calls as gateways and tracing tools log them: the chat request is the prompt, the first choice the response.

Requests and answers come in the dialect of any provider, as lists of messages, single texts, or the JSON text of any of
these; `feedback.messages` reads their turns. What stands beside the turns is kept in the decision's metadata: `tools`,
`request` (parameters) and `answer` (usage, finish reasons). Images, audio and files are refused (`not_text`): a
decision is text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feedback.messages import REASONING_KEYS, ROLES, ChatMessage, Completion, Message, is_pair
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.base import EMPTY, tools_of
from feedback.transfer.formats.cells import JsonObject, listed
from feedback.transfer.formats.records import (
    SYSTEM_COLUMNS,
    ImportedDecision,
    RowError,
    RowLeftOut,
    answer_apart,
    check_json,
    mapping_of,
    messages_of,
    system_in,
    text_of,
    with_system,
)

QUESTIONS = listed("question query prompt input user_input instruction text message")
"""Keys of a request that hold the prompt as one text, likeliest first."""

ANSWERS = listed(
    "answer output response completion text content result generated_text output_text generation"
)
"""Keys of an answer that hold the response, likeliest first."""

PARAMETERS = frozenset(
    listed("""model temperature top_p max_tokens max_completion_tokens stream user seed n stop tools tool_choice
    response_format metadata stream_options functions function_call""")
)
"""Keys of a request that say how to answer, and hold no question."""


def json_value(value: object) -> Any:
    """The value of a JSON text; anything else, and a text that is no JSON object, list or text, as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "[", '"'):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def chat_of(value: object, what: str) -> list[Message]:
    """Messages of any dialect; a batch of one (`[[...]]`, as LangChain has it) is that one. Raises RowError."""
    items = json_value(value)
    if (
        isinstance(items, list)
        and items
        and all(isinstance(item, list) for item in items)
        and not is_pair(items[0])
    ):
        if len(items) > 1:
            raise RowError(f"{what}: expected one conversation, found a batch of {len(items)}")
        items = items[0]
    return messages_of(items, what)


# --- Requests ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelRequest:
    """What a model was asked, and how it was to answer."""

    messages: list[Message]
    """None where nothing was asked."""
    tools: list[Any] = field(default_factory=list)
    """As OpenAI writes them."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """All other keys of the request that say something."""


def request_read(value: object, what: str, turns: Sequence[Message] = ()) -> ModelRequest:
    """A request of any provider: its messages, or the one text it asks. Raises RowError.

    turns: its messages, where they stand apart from it and were read already.
    """
    request = json_value(value)
    if request in EMPTY:
        return ModelRequest([*turns])
    if not turns and (isinstance(request, list) or _is_message(request)):
        return ModelRequest(chat_of(request, what))
    if not isinstance(request, Mapping):
        return ModelRequest([{"role": "user", "content": text_of(request, what, required=True)}])
    rest = {key: item for key, item in request.items() if item not in EMPTY}
    if "contents" in rest and isinstance(rest.get("config"), Mapping):  # Google's own client
        rest |= rest.pop("config")
    tools = _tools(rest, what)
    system = system_in(rest)
    rest = {key: item for key, item in rest.items() if key not in SYSTEM_COLUMNS}
    messages = [*turns]
    for name in () if messages else ("messages", "contents", "input", "prompt", "prompts"):
        asked = json_value(rest.get(name))
        if name == "input" and isinstance(asked, Mapping) and not _is_message(asked):
            inner = request_read(asked, f"{what}.input")
            del rest[name]
            messages, tools, rest = inner.messages, tools or inner.tools, inner.parameters | rest
        elif isinstance(asked, (list, Mapping)) or (name in ("messages", "contents") and asked is not None):
            items, reports = _without_reports(asked)
            messages, rest[name] = chat_of(items, f"{what}.{name}"), reports
        if messages:
            break
    if not messages and (asked := {key: item for key, item in rest.items() if key not in PARAMETERS}):
        name, words = _one_text(asked, QUESTIONS, what)
        messages = [{"role": "user", "content": words}]
        taken = {name} if name else set(asked)
        rest = {key: item for key, item in rest.items() if key not in taken}
    rest = {key: item for key, item in rest.items() if item not in EMPTY}
    return ModelRequest(with_system(system, messages, what) if messages else [], tools, rest)


def _tools(rest: dict[str, Any], what: str) -> list[object]:
    """The tools of a request, taken out of it, as OpenAI writes them."""
    config = rest.get("toolConfig")
    if "tools" not in rest and isinstance(config, Mapping) and "tools" in config:  # Bedrock
        rest["tools"] = config["tools"]
        rest["toolConfig"] = {key: item for key, item in config.items() if key != "tools"}
    if "tools" not in rest and isinstance(rest.get("functions"), list):
        rest["tools"] = [{"type": "function", "function": item} for item in rest["functions"]]
        del rest["functions"]
    listed = tools_of(rest, f"{what}.tools").get("tools", [])
    rest.pop("tools", None)
    return [tool for item in listed for tool in _tool(item)]


def _tool(tool: object) -> Iterator[object]:
    """A tool of OpenAI's Responses, Anthropic, Gemini (a list of functions) or Bedrock as OpenAI's chat has it."""
    if not isinstance(tool, Mapping):
        yield tool
        return
    declared = tool.get("functionDeclarations", tool.get("function_declarations"))
    if isinstance(declared, list):
        yield from ({"type": "function", "function": item} for item in declared)
        return
    function = tool.get("toolSpec", tool)
    if "function" in tool or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        yield tool
        return
    names = ("parameters", "input_schema", "inputSchema")
    schema = next((function[name] for name in names if name in function), None)
    if schema is None:  # a provider's own tool, such as a search
        yield tool
        return
    if isinstance(schema, Mapping) and set(schema) == {"json"}:
        schema = schema["json"]
    said = {key: item for key, item in function.items() if key not in ("type", *names)}
    yield {"type": "function", "function": said | {"parameters": schema}}


def _without_reports(items: object) -> tuple[Any, list[object]]:
    """Items without those that report a provider's own tools (a search, a file), and these."""
    if not isinstance(items, list):
        return items, []
    return [item for item in items if not _is_report(item)], [item for item in items if _is_report(item)]


def _is_report(item: object) -> bool:
    kind = str(item.get("type")) if isinstance(item, Mapping) and "role" not in item else ""
    is_own = kind.endswith(("_call", "_call_output"))
    return is_own and not kind.startswith(("function_", "custom_tool_", "tool_call"))


def prompt_of(value: object, what: str) -> list[Message]:
    """The prompt of a request. Raises RowError."""
    messages = request_read(value, what).messages
    if not messages:
        raise RowError(f"{what}: is empty")
    return messages


# --- Answers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelAnswer:
    """What a model answered."""

    responses: list[list[Message]]
    """Of each choice (they are alternatives, no further turns), the first one first; with their reasoning."""
    more: dict[str, object] = field(default_factory=dict)
    """All other keys of the answer that say something."""


def answer_read(value: object, what: str) -> ModelAnswer:
    """An answer of any provider. Raises RowError."""
    answer = json_value(value)
    if answer in EMPTY:
        return ModelAnswer([])
    if isinstance(answer, list):
        return _of_list(answer, what, value)
    if not isinstance(answer, Mapping):
        return _of_message({"content": text_of(answer, what)}, what)
    for key in ("choices", "generations", "candidates"):
        if isinstance(answer.get(key), list):
            return _beside(answer, key, _of_choices(answer[key], f"{what}.{key}"))
    if _is_message(answer) or any(
        answer.get(key) not in EMPTY for key in ("tool_calls", "function_call", "refusal")
    ):
        return _of_message(answer, what)
    for key in ("message", "messages", "content", "output"):
        inner = answer.get(key)
        if key == "message" and isinstance(inner, Mapping):
            return _beside(answer, key, _of_message(inner, f"{what}.message"))
        if isinstance(inner, list) or (key == "output" and isinstance(inner, Mapping)):
            return _beside(answer, key, answer_read(inner, f"{what}.{key}"))
    if isinstance(value, str) and not any(isinstance(answer.get(key), str) for key in ANSWERS):
        # a model that was asked for JSON: its words are the response
        return _of_message({"content": text_of(value, what)}, what)
    thoughts = {key: item for key, item in answer.items() if key in REASONING_KEYS}
    said = {key: item for key, item in answer.items() if key not in thoughts}
    name, words = _one_text(said or answer, ANSWERS, what)
    if not name:
        return _of_message({"content": words}, what)
    return _beside(said, name, _of_message({"content": words, **thoughts}, what))


def answers_of(value: object, what: str) -> list[Completion]:
    """The responses in an answer, without their reasoning."""
    return [answer_apart(response)[0] for response in answer_read(value, what).responses]


def answer_of(value: object, what: str) -> Completion:
    """The first response in an answer that says something; "" where there is none. Raises RowError."""
    return next((said for said in answers_of(value, what) if said), "")


def _beside(outer: JsonObject, key: str, inner: ModelAnswer) -> ModelAnswer:
    """The answer found under a key, with what stands beside it."""
    more = {name: item for name, item in outer.items() if name != key} | inner.more
    return ModelAnswer(inner.responses, {name: item for name, item in more.items() if item not in EMPTY})


def _of_message(message: JsonObject, what: str) -> ModelAnswer:
    """One response, whose role need not be said; LangChain says it in its own way."""
    given = message if _is_message(message) else {**message, "role": "assistant"}
    return ModelAnswer([messages_of([given], what)])


def _of_choices(choices: Sequence[object], what: str) -> ModelAnswer:
    """Alternatives: OpenAI's choices, LangChain's generations (a list per prompt, and here there was one), Gemini's."""
    items = choices[0] if choices and isinstance(choices[0], list) else choices
    responses: list[list[Message]] = []
    more: list[JsonObject] = []
    for index, item in sorted(enumerate(items), key=lambda entry: _index(entry[1], entry[0])):
        where = f"{what}[{index}]"
        choice = mapping_of(item, where)
        key = next((key for key in ("message", "content") if isinstance(choice.get(key), Mapping)), "text")
        if choice.get(key) is None:
            continue
        said = choice[key] if key != "text" else {"content": text_of(choice["text"], f"{where}.text")}
        responses += _of_message(said, f"{where}.{key}").responses
        rest = {name: value for name, value in choice.items() if name not in (key, "text", "index")}
        more.append({name: value for name, value in rest.items() if value not in EMPTY})
    return ModelAnswer(responses, {"choices": more} if any(more) else {})


def _index(choice: object, place: int) -> int:
    """The number a choice gives itself, else its place in the list."""
    index = choice.get("index") if isinstance(choice, Mapping) else None
    return index if isinstance(index, int) and not isinstance(index, bool) else place


def _of_list(items: Sequence[object], what: str, raw: object) -> ModelAnswer:
    """Parts are one response; of messages the last one by the assistant is, and those before it stand beside it."""
    if all(isinstance(item, str) for item in items):
        several = raw if isinstance(raw, str) else json.dumps(items, ensure_ascii=False)
        return _of_message({"content": text_of(items[0] if len(items) == 1 else several, what)}, what)
    if all(isinstance(item, Mapping) and "function" in item for item in items):
        return _of_message({"tool_calls": items}, what)
    if len(items) == 1 and isinstance(items[0], Mapping) and items[0].get("object") == "response":
        return answer_read(items[0], what)  # a streamed answer of the OpenAI Agents SDK
    if not any(_is_message(item) for item in items):
        return _of_message({"content": items}, what)
    items, reports = _without_reports(items)
    turns = messages_of(items, what) if items else []
    spoken = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not spoken:
        raise RowError(f"{what}: expected a message of the assistant, found {value_excerpt(items)}")
    last = spoken[-1]
    asked = [place for place, turn in enumerate(turns[:last]) if turn["role"] in ("user", "system")]
    more = {"steps": turns[asked[-1] + 1 if asked else 0 : last], "reports": reports}
    return ModelAnswer([[turns[last]]], {name: item for name, item in more.items() if item})


def _is_message(item: object) -> bool:
    """True of a message, and of the items of OpenAI's Responses beside one; false of a part of a content."""
    return isinstance(item, Mapping) and (
        bool(item.get("role") or item.get("from"))
        or any(isinstance(item.get(key), Mapping) for key in ("kwargs", "data"))
        or item.get("type") == "function_call"
        or ("content" in item and item.get("type") in ("message", *ROLES))
    )


def _one_text(value: JsonObject, names: Sequence[str], what: str) -> tuple[str, str]:
    """(its key, the text): under the likeliest name, the only text there is, or ("", the whole object as JSON)."""
    for name in names:
        if isinstance(value.get(name), str) and value[name].strip():
            return name, text_of(value[name], f"{what}.{name}")
    texts = [key for key, item in value.items() if isinstance(item, str) and item.strip()]
    if len(texts) == 1:
        return texts[0], text_of(value[texts[0]], f"{what}.{texts[0]}")
    check_json(value, what)
    return "", json.dumps(value, ensure_ascii=False)


def plain_text(value: Completion) -> str:
    """A response as a candidate is listed: its text, or its messages as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- Decisions ---------------------------------------------------------------------------------------------

NO_RESPONSE = "no response"
NO_PROMPT = "what was asked was not recorded"


def call_decision(
    line: int,
    key: str,
    request: object,
    answer: object,
    *,
    turns: Sequence[Message] = (),
    metadata: Mapping[str, object] | None = None,
    **facts: Any,
) -> ImportedDecision:
    """The decision a logged call is, with further choices as candidates; a call without a response is left out.

    turns: messages of the request that were read already. facts: further fields of ImportedDecision; a policy and
    tokens that are not among them are those that the request or the answer states. Raises RowError, RowLeftOut.
    """
    answered = answer if isinstance(answer, ModelAnswer) else answer_read(answer, "response")
    responses = [(turns, apart) for turns in answered.responses if (apart := answer_apart(turns))[0]]
    if not responses:
        raise RowLeftOut(NO_RESPONSE)
    asked = request_read(request, "request", turns)
    if not any(turn["content"].strip() or turn.get("tool_calls") for turn in asked.messages):
        raise RowLeftOut(NO_PROMPT)
    told = {"model": asked.parameters.get("model"), **answered.more, **_message_extras(responses[0][0])}
    usage = object_or_empty(told.get("usage"))
    facts["policy"] = facts.get("policy") or text_or_empty(told["model"])
    for name, keys in TOKENS.items():
        if facts.get(name) is None:
            facts[name] = next(
                (count for key in keys if (count := whole_of(usage.get(key))) is not None), None
            )
    alternatives = [apart for _, apart in responses] if len(responses) > 1 else []
    return ImportedDecision(
        line=line,
        key=key,
        messages=asked.messages,
        response=responses[0][0],
        candidates=[plain_text(said) for said, _, _ in alternatives] or None,
        metadata={
            **(metadata or {}),
            **metadata_retained(
                tools=asked.tools,
                request=asked.parameters,
                answer=answered.more,
                candidates_reasoning=[thought for _, thought, _ in alternatives]
                if any(thought for _, thought, _ in alternatives[1:])
                else None,
            ),
        },
        **facts,
    )


TOKENS = {
    "tokens_in": ("prompt_tokens", "input_tokens", "inputTokens", "input"),
    "tokens_out": ("completion_tokens", "output_tokens", "outputTokens", "output"),
}
"""Field of a decision -> its keys in the usage that an answer states."""


def _message_extras(turns: Sequence[Message]) -> dict[str, object]:
    """Keys of an answer's message that carry no content, such as Anthropic's usage and model."""
    return {key: item for turn in turns for key, item in turn.items() if key not in ChatMessage.model_fields}


def whole_of(value: object) -> int | None:
    """A number of tokens, where it is one; also as a text, as some databases export 64-bit numbers."""
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def text_or_empty(value: object) -> str:
    """A text of at most 200 characters for a column of names; "" for anything else, and for what cannot be stored."""
    if not isinstance(value, str) or "\x00" in value:
        return ""
    if not value.isascii() and any("\ud800" <= mark <= "\udfff" for mark in value):
        return ""
    return value[:200]


def metadata_retained(**values: object) -> dict[str, object]:
    """Metadata of the values that say something."""
    return {name: check_json(value, name) for name, value in values.items() if value not in EMPTY}


def object_or_empty(value: object) -> JsonObject:
    """An object as it is; an empty one for anything else."""
    return value if isinstance(value, Mapping) else {}
