"""Body of a write: its fields, read off a dataclass, and what follows from them.

Validation, the OpenAPI description, answers, our own file format, forms and the admin all read the same `Body`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Annotated, Any, get_origin, get_type_hints

from feedback.storage.field_types import Choice, FieldType, Schema, Text, Time
from feedback.storage.validation import Check

EMPTY: tuple[Any, ...] = (None, "", [], {}, ())


@dataclasses.dataclass(frozen=True)
class PageInput:
    """Makes the rating page ask for a field: its label there, and the key that leads to it."""

    label: str
    key: str = ""


@dataclasses.dataclass(frozen=True)
class Internal:
    """Marks a field that no request may carry."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One field of a body."""

    name: str
    type: FieldType
    default: Any
    """Default for a field that is not sent; MISSING where something must be."""
    description: str = ""
    page_input: PageInput | None = None
    is_sent: bool = True
    """True if a request may carry it."""

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def is_nullable(self) -> bool:
        """True if null is stored or answered where nothing was sent."""
        if isinstance(self.type, Time) and self.type.or_now:
            return False
        return self.default is None or _is_unmade(self.type)

    def request_schema(self) -> Schema:
        """JSON schema of the field in a request; null is as good as nothing there."""
        schema = self.type.request_schema()
        if self.description:
            schema["description"] = self.description
        if self.is_required:
            return schema
        if self.default and isinstance(self.default, str):
            schema["default"] = self.default
        return nullable(schema)

    def answer_schema(self) -> Schema:
        """JSON schema of the field in an answer."""
        schema = self.type.answer_schema()
        return nullable(schema) if schema and self.is_nullable else schema


class Body:
    """Fields of one kind of write, read off the dataclass that declares them.

    Each is annotated with its FieldType, its description, and PageInput where the rating page asks for it. first: the
    fields there were when bodies were first hashed.
    """

    def __init__(self, declaration: type, first: Collection[str]) -> None:
        hints = get_type_hints(declaration, include_extras=True)
        self.fields = tuple(_field(one, hints[one.name]) for one in dataclasses.fields(declaration))
        self.names = tuple(field.name for field in self.fields)
        self._by_name = dict(zip(self.names, self.fields, strict=True))
        self._converted = tuple(
            field for field in self.fields if isinstance(field.type, Time) or _is_unmade(field.type)
        )
        self.encoded = tuple(
            field for field in self.fields if field.type.is_json or isinstance(field.type, Time)
        )
        """Fields that a row of texts holds encoded: JSON and times."""
        self._later = tuple(field for field in self.fields if field.name not in first)

    def __getitem__(self, name: str) -> Field:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Field]:
        return iter(self.fields)

    def validate(self, check: Check, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of every field as they are stored; each fault goes into `check`. Raises TypeError for a field that
        is not declared, and for a required one that is not there."""
        if unknown := given.keys() - self._by_name.keys():
            raise TypeError(f"unexpected fields: {', '.join(sorted(unknown))}")
        values: dict[str, Any] = {}
        for field in self.fields:
            name = field.name
            if name in given:
                value = given[name]
                nothing = value is None and field.default is None
                values[name] = None if nothing else field.type.check(check, name, value)
            elif field.is_required:
                raise TypeError(f"missing field: {name}")
            else:
                values[name] = field.type.empty(field.default)
        return values

    def hash_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that tell a retry from another write under the same id.

        A field that was added later counts only where it says something: a client that sends the same write again after
        an upgrade must find its first one.
        """
        silent = {field.name for field in self._later if says_nothing(field, values[field.name])}
        return {name: value for name, value in values.items() if name not in silent}

    def later_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Later fields that hold something."""
        return {
            field.name: values[field.name]
            for field in self._later
            if not says_nothing(field, values[field.name])
        }

    def read(self, record: Any) -> dict[str, Any]:
        """The fields of an object that has them as attributes."""
        return {name: getattr(record, name) for name in self.names}

    def represent(self, row: Any) -> dict[str, Any]:
        """The fields of a row as they are answered: times in ISO 8601, null for a choice that was not made."""
        values = self.read(row)
        for field in self._converted:
            if (value := values[field.name]) is not None:
                values[field.name] = value.isoformat() if isinstance(field.type, Time) else value or None
        return values

    @property
    def texts(self) -> tuple[str, ...]:
        """Fields that hold somebody's words."""
        return tuple(field.name for field in self.fields if type(field.type) is Text)


def says_nothing(field: Field, value: Any) -> bool:
    return value in EMPTY or value == field.default


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    if "type" not in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    return {
        **schema,
        "type": [schema["type"], "null"],
        **({"enum": [*schema["enum"], None]} if "enum" in schema else {}),
    }


def _is_unmade(kind: FieldType) -> bool:
    """True if a choice may be left open."""
    return isinstance(kind, Choice) and kind.optional


def _field(one: dataclasses.Field[Any], hint: Any) -> Field:
    assert get_origin(hint) is Annotated, f"{one.name}: expected Annotated[type, field type, ...]"
    kind, *extras = hint.__metadata__
    default = one.default
    if one.default_factory is not dataclasses.MISSING:
        make: Callable[[], Any] = one.default_factory
        default = make()
    return Field(
        name=one.name,
        type=kind,
        default=default,
        description=next((item for item in extras if isinstance(item, str)), ""),
        page_input=next((item for item in extras if isinstance(item, PageInput)), None),
        is_sent=not any(isinstance(item, Internal) for item in extras),
    )
