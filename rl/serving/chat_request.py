"""Read an OpenAI chat completion request: everything that is wrong with it is refused before anybody is asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from backend import limits
from backend.bodies import faults_of, value_excerpt
from feedback.storage.factories import check_reserved
from feedback.storage.fields import Json, JsonObject, Messages, Name, Storable, said_checked
from feedback.storage.validation import Check
from rl.agents.template import schema_check
from rl.serving.base import Ask, ServingRefused


@dataclass(frozen=True)
class ChatRequest:
    """A request that can be answered."""

    model: str
    ask: Ask
    stream: bool = False
    include_usage: bool = False
    unit: str = ""
    run_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    body_hash: str = ""
    """SHA-256 of the body: tells a retry from another question."""
    caller: str = ""
    """Whose request it is, such as key:3."""
    has_format: bool = False
    """The client said how the answer is to be formed, or gave tools: the agent's own schema stands back."""


# --- The body ---------------------------------------------------------------------------------------------------


class Shape(BaseModel):
    """Part of a request. Further fields go to the backend as they are."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class Part(Shape):
    type: str
    text: Any = None

    @model_validator(mode="after")
    def is_text(self) -> Self:
        if self.type == "text" and not isinstance(self.text, str):
            raise ValueError('expected a part such as {"type": "text", "text": ...}')
        return self


class Turn(Shape):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[Part], Tag("<parts>")]
        | Annotated[None, Tag("<none>")],
        Discriminator(
            lambda value: {str: "<text>", list: "<parts>", type(None): "<none>"}.get(type(value)),
            custom_error_type="content",
            custom_error_message="expected a text or a list of parts",
        ),
    ] = Field(None, validate_default=True)

    @field_validator("content", mode="before")
    @classmethod
    def says_something(cls, content: object, info: ValidationInfo) -> object:
        # an answer may be a refusal, calls, or nothing; a result may be nothing
        if content in (None, []) and info.data.get("role") not in ("assistant", "tool", "function"):
            raise ValueError("expected a text or a list of parts")
        return content


class Tool(Shape):
    type: Any = None
    function: object = None

    @model_validator(mode="after")
    def has_name(self) -> Self:
        named = isinstance(self.function, Mapping) and isinstance(self.function.get("name"), str)
        if self.type == "function" and not named:
            raise ValueError('expected {"type": "function", "function": {"name": ...}}')
        return self


class StreamOptions(Shape):
    include_usage: bool | None = None


def _stop_read(value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list) or len(texts) > 4 or not all(isinstance(t, str) and t for t in texts):
        raise ValueError("expected a text or a list of up to four")
    if any(len(text) > limits.STOP_CHARACTERS for text in texts):
        raise ValueError(f"expected texts of at most {limits.STOP_CHARACTERS:,} characters")
    return tuple(texts)


Limit = Annotated[int, Field(ge=1, lt=2**31)]


class ChatBody(Shape):
    """The fields that are read here; every other one goes to the backend as it is."""

    model: Annotated[Storable, Field(max_length=1000), AfterValidator(said_checked)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop_read)] = ()
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    n: Literal[1] | None = None

    @field_validator("stream_options")
    @classmethod
    def is_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if not info.data.get("stream"):
            raise ValueError("expected it beside stream: true alone")
        return options


class PassedOn(Shape):
    """Fields of a body that are looked at, and passed on too."""

    user: Name = ""
    safety_identifier: Name = ""
    metadata: JsonObject = {}
    tools: Annotated[list[Tool], Field(max_length=limits.TOOLS)] | None = None


READ = {*ChatBody.model_fields, "messages"}
_conversation = TypeAdapter[list[Turn]](Annotated[list[Turn], Field(min_length=1)])


def chat_request(body: object, *, unit: str = "", run_id: str = "", caller: str = "") -> ChatRequest:
    """Read a body; unit and run_id are what the headers say, and win over the body's `user` and metadata.
    caller: whose request it is, such as key:3: the same words of another caller are another request.

    Raises ServingRefused, naming the parameter.
    """
    if not isinstance(body, Mapping):
        raise ServingRefused(f"expected a JSON object, found {type(body).__name__}")
    messages = read_messages(body.get("messages"))
    sent = {name: value for name, value in body.items() if value is not None} | (
        {"user": unit} if unit else {}
    )
    try:
        read, beside = ChatBody.model_validate(sent), PassedOn.model_validate(sent)
    except ValidationError as error:
        raise _refused(faults_of(error)) from None
    check_metadata(beside.metadata)
    run_id = run_id or beside.metadata.get("run_id") or ""
    # a request that could be answered but never recorded would be lost
    check = Check()
    check.value("messages", Messages, messages)
    check.value("metadata.run_id", Name, run_id)
    check.value("tools", Json, sent.get("tools"))
    if check.fields:
        raise _refused(check.fields)
    has_limit = read.max_completion_tokens is not None
    return ChatRequest(
        model=read.model,
        ask=Ask(
            messages=messages,
            max_tokens=read.max_completion_tokens if has_limit else read.max_tokens,
            temperature=read.temperature,
            top_p=read.top_p,
            stop=read.stop,
            seed=read.seed,
            response_schema=read_format(body.get("response_format")),
            extra={name: value for name, value in body.items() if name not in READ and value is not None},
            limit_field="max_completion_tokens" if has_limit else "max_tokens",
        ),
        stream=read.stream,
        include_usage=bool(read.stream_options and read.stream_options.include_usage),
        unit=beside.user or beside.safety_identifier,
        run_id=run_id,
        metadata=beside.metadata,
        body_hash=hashlib.sha256(json.dumps([caller, unit, body], sort_keys=True).encode()).hexdigest(),
        caller=caller,
        has_format="response_format" in sent or bool(sent.get("tools") or sent.get("functions")),
    )


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Refuse the keys of metadata that only Ratchet writes. Raises ServingRefused."""
    check = Check()
    check_reserved(check, "", metadata, reserved=False)
    if fault := check.fields.get("metadata"):
        raise ServingRefused(f"metadata: {fault}", param="metadata")


def read_messages(value: Any) -> list[dict[str, object]]:
    """Messages as a chat has them. Raises ServingRefused, naming the place."""
    try:
        _conversation.validate_python(list(value) if isinstance(value, tuple) else value)
    except ValidationError as error:
        raise _refused(faults_of(error, "messages")) from None
    return [dict(message) for message in value]


def _refused(faults: Mapping[str, str]) -> ServingRefused:
    """The first of some faults, by the place of its value."""
    place, fault = next(iter(faults.items()))
    return ServingRefused(f"{place}: {fault}", param=place)


def read_format(value: Any) -> Mapping[str, object] | None:
    """The JSON schema a `response_format` asks for: None for text, {} for any object. Raises ServingRefused."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {}
    if kind != "json_schema":
        raise _fault("response_format", "a type of text, json_object or json_schema", value)
    named = value.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping) or not isinstance(named.get("name"), str):
        raise _fault("response_format.json_schema", "{name, schema} with a JSON schema", named)
    try:
        schema_check(schema)
    except (ValueError, RecursionError) as error:
        message = str(error) if isinstance(error, ValueError) else "expected less nesting"
        raise ServingRefused(
            f"response_format.json_schema.schema: {message[:300]}", param="response_format"
        ) from error
    return schema


def _fault(param: str, expected: str, found: object) -> ServingRefused:
    return ServingRefused(f"{param}: expected {expected}; found {value_excerpt(found)}", param=param)
