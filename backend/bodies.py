"""Bodies of requests and answers as pydantic models, and our words for what pydantic finds wrong."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar

from pydantic import AliasGenerator, BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from backend import limits

SLUG_PATTERN = r"^[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?$"


class Described(BaseModel):
    """A body whose fields are described by their docstrings, or by those of the class that declares them."""

    described_by: ClassVar[type | None] = None


class Sent(Described):
    """Body or query of a request: no other fields, no conversion of types. Null is as good as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)


class Query(Sent):
    """Query of a request. Its values are texts; an empty one is as good as nothing."""


def _int_of_text(text: object) -> object:
    return (
        int(text) if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 20 else text
    )


def _float_of_text(text: Any) -> object:
    try:
        return float(text)
    except ValueError:
        return text


INT_TEXT, FLOAT_TEXT = BeforeValidator(_int_of_text), BeforeValidator(_float_of_text)
"""Last in the annotation of a number in a query."""


class Answer(Described):
    """Body of an answer. Its values come from the attributes of a row or from a mapping."""

    model_config = ConfigDict(
        from_attributes=True,
        validate_by_name=True,
        validate_by_alias=True,
        defer_build=True,
        json_schema_extra={"additionalProperties": False},
    )

    @classmethod
    def of(cls, source: object, **more: Any) -> dict[str, Any]:
        """The answer as JSON types. more: fields that `source` does not have."""
        if more:
            rest = {name: field for name, field in cls.model_fields.items() if name not in more}
            read = source.__getitem__ if isinstance(source, Mapping) else lambda name: getattr(source, name)
            source = {name: read(field.validation_alias or name) for name, field in rest.items()} | more
        return cls.model_validate(source).model_dump(mode="json", by_alias=True, warnings=False)


class CamelAnswer(Answer):
    """An answer whose keys are written in camelCase."""

    model_config = ConfigDict(alias_generator=AliasGenerator(serialization_alias=to_camel))


class CamelSent(Sent):
    """A request whose keys are written in camelCase."""

    model_config = ConfigDict(alias_generator=to_camel)


Time = Annotated[datetime, PlainSerializer(datetime.isoformat, return_type=datetime)]
"""A time in an answer, in ISO 8601."""


# bounded in length and depth: what is shown may be a megabyte, or a thousand lists deep
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def value_excerpt(value: object) -> str:
    """A value as an error shows it: at most a line."""
    text = _short.repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


_KINDS = {
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
"""Faults of a value's type -> the expected type. The found type is named, not the value: it may be long."""

_WORDS = {
    "missing": "required",
    "extra_forbidden": "unknown field",
    "string_too_short": "expected text, found nothing",
    "string_too_long": "expected at most {max_length:,} characters, found {length:,}",
    "too_long": "expected at most {max_length:,} items, found {length:,}",
    "too_short": "expected at least {min_length:,} items, found {length:,}",
    "float_type": "expected a number, found {found}",
    "finite_number": "expected a number, found {found}",
    "int_type": "expected a whole number, found {found}",
    "bool_type": "expected true or false, found {found}",
    "greater_than": "expected a number above {gt:g}, found {found}",
    "greater_than_equal": "expected a number of at least {ge:g}, found {found}",
    "less_than": "expected a number below {lt:g}, found {found}",
    "less_than_equal": "expected a number of at most {le:,g}, found {found}",
    "value_error": "{error}",
}
"""pydantic's kinds of fault -> our words."""


def faults_of(error: ValidationError, *within: str) -> dict[str, str]:
    """Every fault by the place of its value: `stars`, `steps[3].kind`. At most FAULTS_NAMED are named."""
    found = error.errors(include_url=False)
    faults = {_place((*within, *fault["loc"])): _words(fault) for fault in found[: limits.FAULTS_NAMED]}
    if len(found) > limits.FAULTS_NAMED:
        faults["..."] = f"and {len(found) - limits.FAULTS_NAMED:,} more faults"
    return faults


def _place(path: tuple[int | str, ...]) -> str:
    """A path as it is written: ("steps", 3, "kind") is steps[3].kind. <Tags> of a union are left out."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not part.startswith("<"):
            text += f".{part[:80]}" if text else part[:80]
    return text or "body"


def _words(fault: ErrorDetails) -> str:
    value = fault["input"]
    if kind := _KINDS.get(fault["type"]):
        return f"expected {kind}, found {type(value).__name__}"
    if fault["type"] == "literal_error":
        words = [word for word in re.findall("'([^']*)'", fault["ctx"]["expected"]) if word]
        return f"expected one of {', '.join(words)}; found {value_excerpt(value)}"
    # a limit that stands behind a validator does not know that it is a text's
    is_text = isinstance(value, str) and fault["type"] in ("too_long", "too_short")
    if sentence := _WORDS.get(f"string_{fault['type']}" if is_text else fault["type"]):
        length = len(value) if isinstance(value, (str, list, tuple, dict)) else 0
        return sentence.format(**fault.get("ctx", {}), found=value_excerpt(value), length=length)
    return f"{fault['msg'].replace('Input should be', 'expected')}, found {value_excerpt(value)}"
