"""Types of declared fields: how a sent value is checked and stored, and its JSON schema in the OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from feedback.models import SLUG_PATTERN
from feedback.storage.validation import MAX_TAG, MAX_TAGS, MAX_TEXT, Check

Schema = dict[str, Any]

STEP_KINDS = ("step", "reasoning", "tool_call", "decision", "task")
MAX_STEP_NAME = 1000
"""Longest name of a step, in characters."""
MAX_MS = 1e12
"""Longest duration, in milliseconds: 31 years."""


@dataclass(frozen=True)
class FieldType:
    """Type of a field. Schemas are those of a value that is there; whether null may stand for it is the field's."""

    is_json: ClassVar[bool] = False
    """True if its column holds JSON."""

    def empty(self, default: Any) -> Any:
        """Default for a field that is not sent: the field's own, or of lists and objects a new one."""
        return default

    def check(self, check: Check, name: str, value: Any) -> Any:
        """The value as it is stored; what is wrong with it goes into `check`."""
        raise NotImplementedError

    def request_schema(self) -> Schema:
        """JSON schema of the value in a request."""
        raise NotImplementedError

    def answer_schema(self) -> Schema:
        """JSON schema of the value in an answer."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(FieldType):
    """Words of somebody: responses, corrections, notes. Erasing a person looks for them elsewhere, too."""

    limit: int = MAX_TEXT
    required: bool = False
    """True if an empty one is refused."""

    def check(self, check: Check, name: str, value: Any) -> str:
        return check.text(name, value, limit=self.limit, required=self.required)

    def request_schema(self) -> Schema:
        return {
            "type": "string",
            "maxLength": self.limit,
            **({"minLength": 1} if self.required else {}),
        }

    def answer_schema(self) -> Schema:
        return {"type": "string"}


@dataclass(frozen=True)
class ResponseText(Text):
    """A response: a text, or one message or several where it calls tools. Messages are stored as JSON."""

    def request_schema(self) -> Schema:
        message = {"$ref": "#/components/schemas/Message"}
        return {
            "anyOf": [super().request_schema(), message, {"type": "array", "items": message, "minItems": 1}]
        }


@dataclass(frozen=True)
class Name(Text):
    """An identifier of somebody or something: a policy, a unit, a rater."""

    limit: int = 200


@dataclass(frozen=True)
class Number(FieldType):
    """A number in [low, high]; open_low: in (low, high]."""

    low: float
    high: float
    open_low: bool = False

    def check(self, check: Check, name: str, value: Any) -> float | None:
        return check.number(name, value, self.low, self.high, open_low=self.open_low)

    def request_schema(self) -> Schema:
        low = "exclusiveMinimum" if self.open_low else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}

    def answer_schema(self) -> Schema:
        return {"type": "number"}


@dataclass(frozen=True)
class Integer(FieldType):
    """A whole number from low to high."""

    low: int
    high: int

    def check(self, check: Check, name: str, value: Any) -> int | None:
        return check.integer(name, value, self.low, self.high)

    def request_schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def answer_schema(self) -> Schema:
        return {"type": "integer"}


@dataclass(frozen=True)
class Measure(FieldType):
    """A finite number, or a truth, stored as 1 or 0."""

    def check(self, check: Check, name: str, value: Any) -> float | None:
        number = check.number(name, float(value) if isinstance(value, bool) else value, -1e308, 1e308)
        if number is None:
            check.fields.setdefault(name, "expected a number, found nothing")
        return number

    def request_schema(self) -> Schema:
        return {"anyOf": [{"type": "number"}, {"type": "boolean"}]}

    def answer_schema(self) -> Schema:
        return {"type": "number"}


@dataclass(frozen=True)
class Choice(FieldType):
    """One of some words; optional: or none of them, stored as an empty text and answered as null."""

    words: Sequence[str]
    optional: bool = False

    def check(self, check: Check, name: str, value: Any) -> str:
        return check.choice(name, value, ["", *self.words] if self.optional else self.words)

    def request_schema(self) -> Schema:
        return {"type": "string", "enum": [*self.words, *([""] if self.optional else [])]}

    def answer_schema(self) -> Schema:
        return {"type": "string", "enum": [*self.words]}


@dataclass(frozen=True)
class Slug(FieldType):
    """A name of lower-case letters, digits, - and _."""

    example: str

    def check(self, check: Check, name: str, value: Any) -> str:
        return check.slug(name, value, self.example)

    def request_schema(self) -> Schema:
        return {"type": "string", "pattern": SLUG_PATTERN}

    def answer_schema(self) -> Schema:
        return self.request_schema()


@dataclass(frozen=True)
class Time(FieldType):
    """A time, UTC where no zone is given; or_now: that of the write where none is sent."""

    or_now: bool = False

    def check(self, check: Check, name: str, value: Any) -> Any:
        return check.time(name, value)

    def request_schema(self) -> Schema:
        return {
            "type": "string",
            "format": "date-time",
            "description": "ISO 8601, from 1970 to 2199; UTC where no zone is given",
        }

    def answer_schema(self) -> Schema:
        return {"type": "string", "format": "date-time"}


@dataclass(frozen=True)
class Tags(FieldType):
    """Texts without surrounding space, each once."""

    is_json = True

    def empty(self, default: Any) -> list[str]:
        return []

    def check(self, check: Check, name: str, value: Any) -> list[str]:
        return check.names(name, value)

    def request_schema(self) -> Schema:
        return {
            "type": "array",
            "items": {"type": "string", "maxLength": MAX_TAG},
            "maxItems": MAX_TAGS,
        }

    def answer_schema(self) -> Schema:
        return self.request_schema()


@dataclass(frozen=True)
class Json(FieldType):
    """Any JSON."""

    is_json = True

    def check(self, check: Check, name: str, value: Any) -> Any:
        return check.json(name, value)

    def request_schema(self) -> Schema:
        return {}

    def answer_schema(self) -> Schema:
        return {}


@dataclass(frozen=True)
class JsonObject(FieldType):
    """A JSON object."""

    is_json = True

    def empty(self, default: Any) -> dict[str, Any]:
        return {}

    def check(self, check: Check, name: str, value: Any) -> dict[str, Any]:
        return check.mapping(name, value)

    def request_schema(self) -> Schema:
        return {"type": "object", "additionalProperties": True}

    def answer_schema(self) -> Schema:
        return self.request_schema()


@dataclass(frozen=True)
class Messages(FieldType):
    """A prompt: chat messages, or one text, stored as one message of the user."""

    is_json = True

    def check(self, check: Check, name: str, value: Any) -> list[dict[str, Any]]:
        return check.messages(value)

    def request_schema(self) -> Schema:
        return {
            "anyOf": [
                {"type": "string", "maxLength": MAX_TEXT, "description": "One turn of the user"},
                {**self.answer_schema(), "minItems": 1},
            ]
        }

    def answer_schema(self) -> Schema:
        return {"type": "array", "items": {"$ref": "#/components/schemas/Message"}}


@dataclass(frozen=True)
class Candidates(FieldType):
    """Listed responses: texts, or objects with a response and more."""

    is_json = True

    def check(self, check: Check, name: str, value: Any) -> Any:
        return check.candidates(value)

    def request_schema(self) -> Schema:
        listed = {
            "type": "object",
            "required": ["response"],
            "properties": {
                "response": {"type": "string"},
                "score": {"type": ["number", "null"], "minimum": 0, "maximum": 1},
            },
            "additionalProperties": True,
        }
        return {"type": "array", "items": {"anyOf": [{"type": "string", "maxLength": MAX_TEXT}, listed]}}

    def answer_schema(self) -> Schema:
        return {"type": "array", "items": {}}


@dataclass(frozen=True)
class Steps(FieldType):
    """Steps of a trace: objects with a kind, and whatever else was recorded."""

    is_json = True

    def check(self, check: Check, name: str, value: Any) -> list[dict[str, Any]]:
        if not isinstance(value, (list, tuple)):
            check.fields[name] = f"expected a list of steps, found {type(value).__name__}"
            return []
        for index, step in enumerate(value):
            where = f"{name}[{index}]"
            if not isinstance(step, Mapping):
                check.fields[where] = f"expected an object, found {type(step).__name__}"
                continue
            check.choice(f"{where}.kind", step.get("kind"), STEP_KINDS)
            if step.get("name") is not None:
                check.text(f"{where}.name", step["name"], limit=MAX_STEP_NAME)
            check.time(f"{where}.at", step.get("at"))
            check.number(f"{where}.duration_ms", step.get("duration_ms"), 0.0, MAX_MS)
        check.json(name, list(value))
        return list(value)

    def request_schema(self) -> Schema:
        at = Time().request_schema()
        step = {
            "type": "object",
            "required": ["kind"],
            "properties": {
                "kind": {"type": "string", "enum": list(STEP_KINDS)},
                "name": {"type": ["string", "null"], "maxLength": MAX_STEP_NAME},
                "at": {**at, "type": ["string", "null"]},
                "duration_ms": {"type": ["number", "null"], "minimum": 0, "maximum": MAX_MS},
            },
            "additionalProperties": True,
            "description": "A step of kind decision has messages and response and becomes a decision; "
            "without an id of its own it gets UUIDv5(trace, index).",
        }
        return {"type": "array", "items": step}

    def answer_schema(self) -> Schema:
        return {"type": "array", "items": {}}
