"""Parsing of requests: strict JSON within limits, known fields and parameters only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import IO, Any, NoReturn

from django.conf import settings
from rest_framework.exceptions import ParseError
from rest_framework.negotiation import BaseContentNegotiation
from rest_framework.parsers import BaseParser
from rest_framework.request import Request

from backend import limits
from backend.rest.errors import BodyTooLarge, RequestRefused


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


def object_in(data: Any, *, required: Collection[str], optional: Collection[str]) -> dict[str, Any]:
    """The fields of a JSON object, null ones left out. Refuses (400) other types, unknown fields, missing ones."""
    if not isinstance(data, dict):
        raise RequestRefused(f"expected a JSON object, found {type(data).__name__}")
    known = {*required, *optional}
    unknown = [name for name in data if name not in known]
    fields = {str(name)[:80]: "unknown field" for name in unknown[: limits.FAULTS_NAMED]}
    if len(unknown) > limits.FAULTS_NAMED:
        fields["..."] = f"and {len(unknown) - limits.FAULTS_NAMED:,} more unknown fields"
    fields |= {name: "required" for name in required if data.get(name) is None}
    if fields:
        raise RequestRefused(f"expected the fields {', '.join([*required, *optional])}", fields=fields)
    return {name: value for name, value in data.items() if value is not None}


def parameters(request: Request, allowed: Collection[str]) -> dict[str, str]:
    """Query parameters. Refuses (400) unknown and repeated ones, which would be filters that silently do nothing."""
    values = {name: str(value) for name, value in request.query_params.items() if value != ""}
    fields = {name[:80]: "unknown parameter" for name in values if name not in allowed}
    fields |= {
        name: "expected text without NUL characters" for name in allowed if "\x00" in values.get(name, "")
    }
    fields |= {
        name[:80]: f"expected one value, found {len(repeated)}"
        for name, repeated in request.query_params.lists()
        if name in allowed and len(repeated) > 1
    }
    if fields:
        raise RequestRefused(f"expected the parameters {', '.join(allowed) or '(none)'}", fields=fields)
    return values
