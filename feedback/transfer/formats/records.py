"""Records of a foreign file: plain frozen dataclasses that imports and datasets both read."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeAlias

from feedback.messages import (
    ChatMessage,
    Completion,
    Message,
    MessageError,
    message_read,
    messages_read,
    reasoning_split,
    response_of,
)
from feedback.storage.facts import ComparisonFacts, DecisionFacts, OutcomeFacts, RatingFacts, TraceFacts
from feedback.storage.responses import value_excerpt
from feedback.transfer.formats.cells import (
    Cell,
    JsonObject,
    is_unread_chat,
    json_of,
    listed,
    normal,
    number_in,
)


class FormatRefused(ValueError):
    """A file that cannot be read at all: not there, not JSON, of no known format. The message names file and line."""


class RowError(ValueError):
    """One row that cannot be read; the message says what was expected and what was found."""


class RowLeftOut(ValueError):
    """One row that can be read and says nothing we keep; the message is the reason of its RowSkipped."""


@dataclass(frozen=True, slots=True)
class ImportedRating(RatingFacts):
    """Rating of a decision by one rater. `rater` is "" where the file does not say who it was."""

    withdrawn: bool = False
    created_at: datetime | None = None
    id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class ImportedOutcome(OutcomeFacts):
    """A measured fact about a decision."""

    created_at: datetime | None = None
    id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedDecision(DecisionFacts):
    """A prompt and the response given to it, with what was said of it in the same row."""

    line: int
    """Line of the file it starts on, from 1."""
    key: str
    """Key of the row in its file, or ""."""
    agent: str = ""
    """Empty where the file does not say; the importer's choice then."""
    created_at: datetime | None = None
    id: uuid.UUID | None = None
    """The file's own id where it is a UUID; None: made from the content."""
    source: str = ""
    """Source of the decision; empty: the format's name."""
    trace: uuid.UUID | None = None
    """The trace it was taken in: one of the file's, before it, or one recorded before."""
    ratings: tuple[ImportedRating, ...] = ()
    outcomes: tuple[ImportedOutcome, ...] = ()
    event: str | None = None
    """The line (and place in it) of a log whose events have no ids: part of what the decision's id is made from, so
    that equal events are different ones, and the same ones when the file is read again."""

    def __post_init__(self) -> None:
        """Put the reasoning beside the answer, and what is no part of the answer into the metadata."""
        if self.reasoning:
            return
        metadata: Mapping[str, object] = {}
        response = self.response
        if isinstance(response, str):
            response, reasoning = reasoning_split(response)
        else:
            response, reasoning, metadata = answer_apart(response)
        for name, value in (("response", response), ("reasoning", reasoning)):
            object.__setattr__(self, name, value)
        if metadata:
            object.__setattr__(self, "metadata", {**self.metadata, **metadata})


@dataclass(frozen=True, slots=True)
class ImportedComparison(ComparisonFacts):
    """One rater's preference between two responses to the same prompt."""

    line: int
    key: str
    left: ImportedDecision | uuid.UUID
    """The decision, or the id of one recorded before."""
    right: ImportedDecision | uuid.UUID
    ordered: bool = True
    """True if left and right are as the rater saw them; False where the file only says which one was
    better."""
    withdrawn: bool = False
    created_at: datetime | None = None
    id: uuid.UUID | None = None


def compared(
    left: ImportedDecision, right: ImportedDecision, preference: str, *, simulated: bool = False, **more: Any
) -> ImportedComparison:
    """One rater's preference between two decisions of one row. more: further fields of the comparison."""
    more = {"rater_kind": "simulated" if simulated else "human", **more}
    return ImportedComparison(
        line=left.line, key=left.key, left=left, right=right, preference=preference, **more
    )


@dataclass(frozen=True, slots=True)
class ImportedTrace(TraceFacts):
    """Trace of an agent's run; the decisions taken meanwhile are records of their own that name it."""

    line: int
    key: str
    id: uuid.UUID | None
    created_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class ImportedReference:
    """A rating of a decision that stands elsewhere: in another file, or recorded before."""

    line: int
    key: str
    reference: str
    """A decision's id, the run_id of exactly one decision, or the trace whose last decision is meant (`trace_id`,
    `root_id` or `span_id` in its metadata)."""
    rating: ImportedRating
    also: tuple[str, ...] = ()
    """Further references, tried when nothing has the first one."""
    unknown: str = ""
    """Reason to leave the row out where nothing has a reference; empty: the row is refused."""


@dataclass(frozen=True, slots=True)
class OutcomeReference:
    """A measured number about a decision that stands elsewhere, named as ImportedReference names it."""

    line: int
    key: str
    reference: str
    outcome: ImportedOutcome
    also: tuple[str, ...] = ()
    unknown: str = ""
    """As of ImportedReference."""


@dataclass(frozen=True, slots=True)
class RowRefused:
    """A row that cannot be read, and why."""

    line: int
    key: str
    reason: str
    broken: bool = False
    """Not even JSON: the file is damaged, rather than one of its rows odd."""


@dataclass(frozen=True, slots=True)
class RowSkipped:
    """A row that can be read and says nothing we keep: a prompt alone, a cancelled annotation."""

    line: int
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One value of a file (JSON, or the cells of a table by their columns) and the line it starts on, from 1."""

    line: int
    value: object


Record: TypeAlias = (
    ImportedDecision
    | ImportedComparison
    | ImportedTrace
    | ImportedReference
    | OutcomeReference
    | RowRefused
    | RowSkipped
)


# --- Reading values that others wrote ----------------------------------------------------------------------


def mapping_of(value: object, what: str) -> JsonObject:
    """An object, in a cell as JSON. Raises RowError."""
    value = json_of(value) if isinstance(value, Cell) else value
    if not isinstance(value, Mapping):
        raise RowError(f"{what}: expected an object, found {value_excerpt(value)}")
    return value


def list_of(value: object, what: str) -> Sequence[Any]:
    """A list, in a cell as JSON. Raises RowError."""
    value = json_of(value) if isinstance(value, Cell) else value
    if not isinstance(value, list):
        raise RowError(f"{what}: expected a list, found {value_excerpt(value)}")
    return value


def objects_of(value: object, what: str) -> list[JsonObject]:
    """A list of objects. Raises RowError."""
    return [mapping_of(item, f"{what}[{index}]") for index, item in enumerate(list_of(value, what))]


def text_of(value: object, what: str, *, required: bool = False) -> str:
    """A text that can be stored: no NUL, no half of a surrogate pair. Raises RowError."""
    if not isinstance(value, str):
        raise RowError(f"{what}: expected a text, found {value_excerpt(value)}")
    if "\x00" in value:
        raise RowError(f"{what}: holds a NUL character")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(f"{what}: holds a lone surrogate at character {error.start}") from None
    if required and not value.strip():
        raise RowError(f"{what}: is empty")
    return str(value)


def text_or_json(value: object, what: str) -> str:
    """A text as it is, anything else as JSON. Raises RowError."""
    if isinstance(value, str):
        return text_of(value, what)
    return json.dumps(check_json(value, what), ensure_ascii=False)


def content_of(value: object, what: str) -> str:
    """The text of a message's content: a text, nothing, or a list of parts. Raises RowError for other parts."""
    return str(message_of({"role": "user", "content": value}, what)["content"])


def messages_of(value: object, what: str) -> list[Message]:
    """A prompt as chat messages, of any dialect that feedback.messages reads. Raises RowError.

    A bare text is one user turn; an object is one message, or a request that holds `messages` (or Gemini's `contents`)
    beside its system prompt. Keys of a message that no dialect knows stay in it.
    """
    if isinstance(value, str):
        if is_unread_chat(value):
            raise RowError(
                f"{what}: expected chat messages as JSON, found a text of messages that cannot be read: "
                f"{value_excerpt(str(value))}"
            )
        return [{"role": "user", "content": text_of(value, what, required=True)}]
    if isinstance(value, Mapping):
        for key in ("messages", "contents"):
            if value.get(key):
                return with_system(system_in(value), messages_of(value[key], f"{what}.{key}"), what)
        value = [value]
    try:
        read = messages_read(list_of(value, what), what)
    except MessageError as error:
        raise RowError(str(error)) from None
    messages = [_plain(message, f"{what}[{index}]") for index, message in enumerate(read)]
    if not messages:
        raise RowError(f"{what}: expected at least one message, found none")
    return messages


SYSTEM_COLUMNS = listed(
    """system system_prompt system_message system_instruction system_instructions system_text systemprompt
    systemmessage systeminstruction systemInstruction sys_prompt instructions"""
)
"""Names of a system prompt beside the messages, as `normal` writes them."""


def system_in(row: JsonObject) -> object:
    """The system prompt that stands beside the messages of a row or a request; None where there is none."""
    named = {normal(str(name)): name for name, value in row.items() if value not in (None, "", [], {})}
    return next((row[named[name]] for name in SYSTEM_COLUMNS if name in named), None)


def with_system(system: object, turns: list[Message], what: str) -> list[Message]:
    """Turns after the system prompt that stands beside them: a text, parts, or an object of parts. Raises RowError."""
    if system in (None, "", [], {}):
        return turns
    parts = system.get("parts", system.get("content")) if isinstance(system, Mapping) else system
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        parts = "\n".join(parts)
    content = message_of({"role": "system", "content": parts}, f"{what}.system")["content"]
    if not content.strip() or (turns and turns[0] == {"role": "system", "content": content}):
        return turns
    return [{"role": "system", "content": content}, *turns]


def message_of(value: object, what: str) -> Message:
    """One chat message. Raises RowError."""
    try:
        return _plain(message_read(mapping_of(value, what), what), what)
    except MessageError as error:
        raise RowError(str(error)) from None


def _plain(message: ChatMessage, what: str) -> Message:
    """A message as it is stored: all of it is text that a database keeps. Raises RowError."""
    if not message.is_text:
        other = next(
            part for part in message.content if not isinstance(part, str) and part.get("type") != "text"
        )
        kind = other.get("type") or next(iter(other), None)
        raise RowError(
            f"{what}: not_text: only text parts can be read, found one of type {value_excerpt(kind)}"
        )
    found: Message = check_json(message.dump(), what)
    return found


def check_json(value: object, what: str) -> Any:
    """A JSON value all of whose texts can be stored."""
    if isinstance(value, str):
        text_of(value, what)
    elif isinstance(value, (dict, Mapping)):
        for key, item in value.items():
            text_of(key, f"{what} key")
            check_json(item, f"{what}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_json(item, f"{what}[{index}]")
    return value


def completion_of(value: object, what: str, *, required: bool = False) -> Completion:
    """A response: a text; or messages, of which one plain assistant turn is its text. Raises RowError.

    Reasoning, refusals and unknown keys stay in the messages: ImportedDecision puts them beside the answer.
    """
    if isinstance(value, str):
        return text_of(value, what, required=required)
    if isinstance(value, Mapping):
        value = (
            value
            if value.get("role") or not ASSISTANT_KEYS & value.keys()
            else {"role": "assistant", **value}
        )
    messages = messages_of([value] if isinstance(value, Mapping) else value, what)
    if len(messages) == 1 and messages[0]["role"] == "assistant" and set(messages[0]) == {"role", "content"}:
        return text_of(messages[0]["content"], what, required=required)
    if required and not any(
        m["content"].strip() or m.get("tool_calls") or m.get("refusal") for m in messages
    ):
        raise RowError(f"{what}: is empty")
    return messages


ASSISTANT_KEYS = {"content", "tool_calls", "function_call", "refusal", "parts"}


def answer_apart(response: list[Message]) -> tuple[Completion, str, dict[str, object]]:
    """Split an answer into the stored response, its reasoning, and metadata for all other fields."""
    match response:
        case [{"role": "assistant", "content": str(text), **rest}] if not rest:
            return *reasoning_split(text), {}
    read = messages_read(response)
    answer = response_of([message.bare for message in read])
    refusal = read[-1].refusal
    metadata: dict[str, Any] = {"refusal": answer.is_refusal or refusal} if refusal else {}
    if fields := {str(n): message.model_extra for n, message in enumerate(read) if message.model_extra}:
        metadata["response_fields"] = fields
    return answer.value, answer.reasoning, metadata


def reasoning_text(value: object) -> str:
    """Reasoning that a column of its own holds: a text, or JSON of whatever else it is."""
    if value in (None, "", [], {}):
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text_of(text, "reasoning").strip()


def with_reasoning(decision: ImportedDecision, stated: str) -> ImportedDecision:
    """The decision with the reasoning that stands beside its response, before what the response itself began with."""
    if not stated or stated == decision.reasoning:
        return decision
    return replace(decision, reasoning="\n\n".join(filter(None, (stated, decision.reasoning))))


def prompt_apart(messages: list[Message]) -> tuple[list[Message], dict[str, object]]:
    """A prompt without the keys that are no part of what was said (ids, times), and these keys by message.

    Equal prompts stay equal, whatever a program noted beside them.
    """
    fields = {
        str(number): extra
        for number, message in enumerate(messages)
        if (extra := {key: value for key, value in message.items() if key not in ChatMessage.model_fields})
    }
    if not fields:
        return messages, {}
    kept = [{key: value for key, value in m.items() if key in ChatMessage.model_fields} for m in messages]
    return kept, {"message_fields": fields}


def number_of(value: object, what: str) -> float:
    """A finite number. Raises RowError."""
    if isinstance(value, Cell):
        value = number_in(value) if number_in(value) is not None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RowError(f"{what}: expected a number, found {value_excerpt(value)}")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if not math.isfinite(number):
        raise RowError(
            f"{what}: expected a number within the range of a double, found {value_excerpt(value)}"
        )
    return number


def time_of(value: object, what: str) -> datetime | None:
    """A time: ISO 8601 (UTC where no zone is given), or seconds or milliseconds since 1970; None stays None."""
    if value is None or value == "":
        return None
    try:
        if isinstance(value, bool):
            raise ValueError(value)
        if isinstance(value, Cell) and (number := number_in(value)) is not None and abs(number) >= 1e8:
            value = number  # seconds or milliseconds: 1e8 s is in 1973, and what is less may be a date without dashes
        if isinstance(value, (int, float)):
            # 1e11 seconds is the year 5138: whatever is above it counts milliseconds
            return datetime.fromtimestamp(value / 1000 if abs(value) > 1e11 else value, tz=UTC)
        parsed = datetime.fromisoformat(str(value))
    except (TypeError, ValueError, OverflowError, OSError):
        raise RowError(
            f"{what}: expected a time such as 2025-01-02T03:04:05Z, found {value_excerpt(value)}"
        ) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def uuid_of(value: object) -> uuid.UUID | None:
    """A UUID where the value is one, else None."""
    try:
        return uuid.UUID(value) if isinstance(value, str) else None
    except ValueError:
        return None


def tags_of(value: object, what: str) -> tuple[str, ...]:
    """Texts; nothing is none."""
    return tuple(
        text_of(item, f"{what}[{index}]")
        for index, item in enumerate(list_of(value if value is not None else [], what))
    )
