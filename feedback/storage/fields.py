"""Types of the fields that can be recorded: what a value may be, and how it is stored."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PlainValidator,
    Tag,
    TypeAdapter,
)
from pydantic_core import CoreSchema, core_schema

from backend import limits
from backend.bodies import SLUG_PATTERN, value_excerpt
from feedback.messages import ROLES, Completion, Message, MessageError, messages_read

MAX_TEXT = limits.TEXT_CHARACTERS
"""Longest response, correction or prompt accepted, in characters."""
MAX_NOTES = 20_000
"""Longest notes, in characters."""
MAX_MS = 1e12
"""Longest duration, in milliseconds: 31 years."""
MAX_TOKENS = 2**31 - 1
"""Most tokens of a prompt or a response: what the column holds."""
STEP_KINDS = ("step", "reasoning", "tool_call", "decision", "task")
TIMES = (datetime(1970, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC))
"""Earliest and latest time accepted: a time outside is mostly one in the wrong unit."""

# an escaped NUL, after an even number of backslashes: \\u0000 is six characters somebody typed
_ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


# --- What a value may be: each returns the value as it is stored, or raises ValueError ----------------------


def text_checked(text: str) -> str:
    """A text that every database stores: PostgreSQL has no NUL, and SQLite would cut the text there."""
    if "\x00" in text:
        raise ValueError("expected text without NUL characters")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected valid Unicode, found a lone surrogate at character {error.start}"
            ) from None
    return text


def said_checked(text: str) -> str:
    """A text that is not blank."""
    if not text.strip():
        raise ValueError("expected text, found nothing")
    return text


def slug_checked(text: str) -> str:
    if not re.fullmatch(SLUG_PATTERN, text):
        raise ValueError(
            "expected a slug such as support-bot: 1 to 64 lower-case letters, digits, - and _; "
            f"found {value_excerpt(text)}"
        )
    return text


def json_checked(value: object) -> object:
    """JSON within the limits of length and depth."""
    try:
        text = _encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected JSON, found {error}") from None
    if len(text) > MAX_TEXT:
        raise ValueError(f"expected at most {MAX_TEXT:,} characters of JSON, found {len(text):,}")
    if text.count("[") + text.count("{") > limits.JSON_DEPTH and _depth(value) > limits.JSON_DEPTH:
        raise ValueError(f"expected JSON at most {limits.JSON_DEPTH} levels deep")
    if "\\u0000" in text and _ESCAPED_NUL.search(text):
        raise ValueError("expected text without NUL characters")
    text_checked(text)
    return value


def _depth(value: Any) -> int:
    """Levels of lists and objects, level by level, so that no nesting can exhaust the stack; stops past the limit."""
    level, depth = [value], 0
    while depth <= limits.JSON_DEPTH:
        level = [v for v in level if isinstance(v, (dict, list, tuple))]
        if not level:
            break
        depth += 1
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v)]
    return depth


def time_read(value: object) -> datetime:
    """A time: ISO 8601, UTC where no zone is given."""
    moment = value if isinstance(value, datetime) else None
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            moment = None
    if moment is not None and moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    if moment is None or not TIMES[0] <= moment < TIMES[1]:
        raise ValueError(
            f"expected a time such as 2026-03-02T10:30:00Z, from {TIMES[0].year} on and before "
            f"{TIMES[1].year}, found {value_excerpt(value)}"
        )
    return moment.astimezone(UTC)


def tags_read(value: object) -> list[str]:
    """Texts without surrounding space, each once."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"expected a list of texts, found {value_excerpt(value)}")
    if len(value) > limits.TAGS or any(len(v) > limits.TAG_CHARACTERS for v in value):
        raise ValueError(f"expected at most {limits.TAGS} tags of at most {limits.TAG_CHARACTERS} characters")
    return list(dict.fromkeys(text_checked(v).strip() for v in value if v.strip()))


def messages_checked(value: object) -> list[Message]:
    """A prompt: chat messages, or one text, which is one turn of the user."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of at least one {role, content}")
    for index, message in enumerate(value):
        if (
            not isinstance(message, Mapping)
            or not isinstance(message.get("role"), str)
            or not isinstance(message.get("content"), (str, list, type(None)))
        ):
            raise ValueError(f"message {index}: expected {{role, content}}, found {value_excerpt(message)}")
    json_checked(value)
    for index, message in enumerate(value):
        is_plain = isinstance(message.get("content"), str) and message.keys() <= {"role", "content", "name"}
        if is_plain or message["role"].lower() not in ROLES:  # a role of the app's own is its own affair
            continue
        try:
            messages_read([message])
        except MessageError as error:
            raise ValueError(f"message {index}: {str(error).removeprefix('messages[0].')}") from None
    return [dict(message) for message in value]


def uuid_read(value: Any) -> uuid.UUID:
    try:
        return value if isinstance(value, uuid.UUID) else uuid.UUID(value)
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"expected a UUID, found {value_excerpt(value)}") from None


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _truth_as_number(value: object) -> object:
    return float(value) if isinstance(value, bool) else value


# --- Types ------------------------------------------------------------------------------------------------

Storable: TypeAlias = Annotated[str, AfterValidator(text_checked)]
Text: TypeAlias = Annotated[Storable, Field(max_length=MAX_TEXT)]
"""Words of somebody: responses, corrections, notes."""
SaidText: TypeAlias = Annotated[Text, Field(min_length=1), AfterValidator(said_checked)]
Notes: TypeAlias = Annotated[Storable, Field(max_length=MAX_NOTES)]
Name: TypeAlias = Annotated[Storable, Field(max_length=200)]
"""An identifier of somebody or something: a policy, a unit, a rater."""
SaidName: TypeAlias = Annotated[
    Name, Field(min_length=1), AfterValidator(said_checked), AfterValidator(str.strip)
]
Source: TypeAlias = Annotated[Storable, Field(max_length=40)]
Slug: TypeAlias = Annotated[
    str, AfterValidator(slug_checked), Field(json_schema_extra={"pattern": SLUG_PATTERN})
]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Propensity: TypeAlias = Annotated[float, Field(gt=0, le=1)]
Duration: TypeAlias = Annotated[float, Field(ge=0, le=MAX_MS)]
WHOLE = BeforeValidator(_whole)
"""Lets a whole number be written as 3.0."""
Tokens: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE]
Stars: TypeAlias = Annotated[int, Field(ge=1, le=5), WHOLE]
Measure: TypeAlias = Annotated[float, BeforeValidator(_truth_as_number, json_schema_input_type=float | bool)]
"""A finite number, or a truth, stored as 1 or 0."""
TimeSent: TypeAlias = Annotated[
    datetime,
    PlainValidator(time_read, json_schema_input_type=datetime),
    Field(description="ISO 8601, from 1970 to 2199; UTC where no zone is given"),
]
MaybeTime: TypeAlias = TimeSent | None
RowNumber: TypeAlias = Annotated[int, Field(ge=1, le=2**63 - 1)]
Uuid: TypeAlias = Annotated[uuid.UUID, PlainValidator(uuid_read, json_schema_input_type=uuid.UUID)]
SentId: TypeAlias = Annotated[
    Uuid,
    Field(
        description="Your own UUID, which makes retries safe: the same id again returns the first result (200), a "
        "different body under it is 409. Generated if left out."
    ),
]
_Tag: TypeAlias = Annotated[str, Field(max_length=limits.TAG_CHARACTERS)]
Tags: TypeAlias = Annotated[
    tuple[str, ...],
    PlainValidator(tags_read, json_schema_input_type=Annotated[list[_Tag], Field(max_length=limits.TAGS)]),
]


class OneOf:
    """One of some words."""

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(words)

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.literal_schema(list(self.words))


class Kept:
    """JSON that is stored as it was sent. Its limits are checked, and its shape."""

    def __init__(self, shape: object) -> None:
        self.shape = shape

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shape = handler.generate_schema(self.shape)

        def check(value: Any, shaped: Callable[[object], Any]) -> Any:
            value = list(value) if isinstance(value, tuple) else value
            shaped(json_checked(value))
            return value

        return core_schema.no_info_wrap_validator_function(check, shape, json_schema_input_schema=shape)


class ShapedAs:
    """A value that is checked elsewhere, with its shape in the OpenAPI description."""

    def __init__(self, shape: object) -> None:
        self.shape = shape

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        shape = handler.generate_schema(self.shape)
        return core_schema.no_info_before_validator_function(
            lambda value: value, handler(source), json_schema_input_schema=shape
        )


class Shape(BaseModel):
    """Part of a sent value that may say more than its fields."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class MessageSent(Shape):
    role: str = Field(description="system, user, assistant, tool, ...")
    content: str | list[object] | None = None


class CandidateSent(Shape):
    response: Text
    score: Share | None = None


class StepSent(Shape):
    kind: Literal["step", "reasoning", "tool_call", "decision", "task"] = Field(
        description="A step of kind decision has messages and response and becomes a decision; without an id "
        "of its own it gets UUIDv5(trace, index)."
    )
    name: Annotated[Storable, Field(max_length=1000)] | None = None
    at: TimeSent | None = None
    duration_ms: Duration | None = None


def _kind_of_candidate(value: object) -> str | None:
    return "<text>" if isinstance(value, str) else "<object>" if isinstance(value, Mapping) else None


_Candidate: TypeAlias = Annotated[
    Annotated[Text, Tag("<text>")] | Annotated[CandidateSent, Tag("<object>")],
    Discriminator(
        _kind_of_candidate,
        custom_error_type="candidate",
        custom_error_message="expected a text or {response, score}",
    ),
]
Candidates: TypeAlias = Annotated[
    list[Any], Kept(Annotated[list[_Candidate], Field(max_length=limits.CANDIDATES)])
]
"""Listed responses: texts, or objects with a response and more."""
Steps: TypeAlias = Annotated[list[Any], Kept(list[StepSent])]
Json: TypeAlias = Annotated[Any, Kept(Any)]
JsonObject: TypeAlias = Annotated[dict[str, Any], Kept(dict[str, Any])]
Messages: TypeAlias = Annotated[
    list[Message],
    PlainValidator(
        messages_checked, json_schema_input_type=Text | Annotated[list[MessageSent], Field(min_length=1)]
    ),
]
_text = TypeAdapter[str](Text)


def response_checked(value: object) -> str:
    """A response as it is stored: messages are JSON by then."""
    return _text.validate_python(value, strict=True)


Response: TypeAlias = Annotated[
    Completion,
    PlainValidator(
        response_checked,
        json_schema_input_type=Text | MessageSent | Annotated[list[MessageSent], Field(min_length=1)],
    ),
]
