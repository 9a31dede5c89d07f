"""Parsing of requests: strict JSON within limits, known fields and parameters only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import IO, Any, NoReturn, TypeVar

from django.conf import settings
from pydantic import ValidationError
from rest_framework.exceptions import ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from backend import limits
from backend.bodies import Query, Sent, faults_of
from backend.rest.errors import BodyTooLarge, RequestRefused

S = TypeVar("S", bound=Sent)
Q = TypeVar("Q", bound=Query)


class StrictJSONParser(BaseParser):
    """JSON as RFC 8259 has it: UTF-8, no NaN, no Infinity, at most DATA_UPLOAD_MAX_MEMORY_SIZE bytes."""

    media_type = "application/json"

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        # one byte more than allowed tells: the rest is never read
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise BodyTooLarge(f"expected a body of at most {limit:,} bytes; send it in several requests")
        if (count := values_in(raw)) > limits.BODY_VALUES:
            raise BodyTooLarge(
                f"expected at most {limits.BODY_VALUES:,} values in a body, found {count:,}; send it in several "
                "requests"
            )
        try:
            return json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            raise ParseError(f"expected UTF-8, found byte {raw[error.start]:#04x} at {error.start}") from None
        except RecursionError:
            raise ParseError("expected JSON that is not nested a thousand levels deep") from None
        except ValueError as error:
            raise ParseError(f"expected JSON, found: {error}") from None


_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; possessive, and one without an end reaches to the end of the text, so that matching is linear."""


def values_in(raw: bytes) -> int:
    """Members and elements of a JSON text, counted without parsing it: commas and opening brackets outside strings.

    A parsed value takes up to a hundred bytes of memory however short its text is, so the bytes of a body alone bound
    little. Below the limit the count may be that of commas and brackets within strings, too.
    """
    count = _separators(raw)
    return count if count <= limits.BODY_VALUES else _separators(_STRING.sub(b"", raw))


def _separators(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")


class AlwaysJSON(BaseContentNegotiation):
    """The first parser that reads the body's type, and the first renderer, whatever the client accepts."""

    def select_parser(self, request: Request, parsers: list[BaseParser]) -> BaseParser | None:  # type: ignore[override]
        kind = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == kind), None)

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> Any:
        return renderers[0], renderers[0].media_type


def fields_in(model: type[Sent], data: Any) -> dict[str, Any]:
    """The fields of a request's JSON object, null ones left out, for a service that checks their values itself.

    Refuses (400) other types, unknown fields, missing ones.
    """
    if not isinstance(data, dict):
        raise RequestRefused(f"expected a JSON object, found {type(data).__name__}")
    known = model.model_fields
    faults = _unknown_fields(data, known)
    faults |= {
        name: "required" for name, field in known.items() if field.is_required() and data.get(name) is None
    }
    if faults:
        raise RequestRefused(f"expected the fields {', '.join(known)}", fields=faults)
    return {name: value for name, value in data.items() if value is not None}


def body_read(model: type[S], data: Any) -> S:
    """A request's body. Refuses (400) it with every fault of every field."""
    if isinstance(data, dict):
        if (
            len(data) > len(model.model_fields) + limits.FAULTS_NAMED
        ):  # each would become a fault of pydantic's
            names = [field.alias or name for name, field in model.model_fields.items()]
            raise _refused(_unknown_fields(data, names))
        data = {name: value for name, value in data.items() if value is not None}
    return _validated(model, data)


def _unknown_fields(data: dict[str, Any], known: Collection[str]) -> dict[str, str]:
    unknown = [name for name in data if name not in known]
    faults = {str(name)[:80]: "unknown field" for name in unknown[: limits.FAULTS_NAMED]}
    if len(unknown) > limits.FAULTS_NAMED:
        faults["..."] = f"and {len(unknown) - limits.FAULTS_NAMED:,} more unknown fields"
    return faults


def query_read(model: type[Q], request: Request) -> Q:
    """A request's query. Refuses (400) it with every fault of every parameter; one sent twice would do nothing."""
    values = {name: str(value) for name, value in request.query_params.items() if value != ""}
    repeated = {
        name[:80]: f"expected one value, found {len(found)}"
        for name, found in request.query_params.lists()
        if len(found) > 1
    }
    if repeated:
        raise _refused(repeated)
    return _validated(model, values)


def _validated(model: type[S], values: Any) -> S:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _refused(faults_of(error)) from None


def _refused(faults: Mapping[str, str]) -> RequestRefused:
    return RequestRefused("; ".join(f"{name}: {fault}" for name, fault in faults.items()), fields=faults)
