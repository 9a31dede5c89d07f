"""Parsing of requests: strict JSON within limits, known fields and parameters only."""

from __future__ import annotations

import json
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
    """JSON as RFC 8259 has it: UTF-8, no NaN, no Infinity, at most `most_bytes` of it."""

    media_type = "application/json"
    most_bytes: int | None = None
    """None: DATA_UPLOAD_MAX_MEMORY_SIZE."""

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, object] | None = None,
    ) -> Any:
        limit = self.most_bytes or settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        # one byte more than allowed tells: the rest is never read
        raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise BodyTooLarge(f"expected a body of at most {limit:,} bytes; send it in several requests")
        return self.read(raw)

    def read(self, raw: bytes) -> Any:
        """The value of a body that was read. Raises BodyTooLarge, ParseError."""
        if (count := limits.values_in(raw, limits.BODY_VALUES)) > limits.BODY_VALUES:
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


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")


class AlwaysJSON(BaseContentNegotiation):
    """The first parser that reads the body's type, and the first renderer, whatever the client accepts."""

    def select_parser(self, request: Request, parsers: list[BaseParser]) -> BaseParser | None:  # type: ignore[override]
        kind = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == kind), None)

    def select_renderer(self, request: Request, renderers: Any, format_suffix: str | None = None) -> object:
        return renderers[0], renderers[0].media_type


def fields_in(model: type[Sent], data: object) -> dict[str, Any]:
    """The fields of a request's JSON object, null ones left out, for a service that checks their values itself.

    Refuses (400) other types, unknown fields, missing ones.
    """
    if not isinstance(data, dict):
        raise RequestRefused(f"expected a JSON object, found {type(data).__name__}")
    known = model.model_fields
    faults = _unknown_fields(data, known)
    faults |= {
        name: "required" for name, field in known.items() if data.get(name) is None and field.is_required()
    }
    if faults:
        raise RequestRefused(f"expected the fields {', '.join(known)}", fields=faults)
    return {name: value for name, value in data.items() if value is not None}


def body_read(model: type[S], data: object) -> S:
    """A request's body. Refuses (400) it with every fault of every field."""
    if isinstance(data, dict):
        names = _names(model)
        if len(data) > len(names) + limits.FAULTS_NAMED:  # each would become a fault of pydantic's
            raise _refused(_unknown_fields(data, names))
        data = {name: value for name, value in data.items() if value is not None or name not in names}
    return _validated(model, data)


def _names(model: type[Sent]) -> set[str]:
    """Names of a model's fields as they are sent."""
    return {field.alias or name for name, field in model.model_fields.items()}


def _unknown_fields(data: Mapping[str, object], known: Collection[str]) -> dict[str, str]:
    unknown = [name for name in data if name not in known]
    faults = {str(name)[:80]: "unknown field" for name in unknown[: limits.FAULTS_NAMED]}
    if len(unknown) > limits.FAULTS_NAMED:
        faults["..."] = f"and {len(unknown) - limits.FAULTS_NAMED:,} more unknown fields"
    return faults


def query_read(model: type[Q], request: Request, *, apart: Collection[str] = ()) -> Q:
    """A request's query. Refuses (400) it with every fault of every parameter; one sent twice would do nothing.

    apart: parameters that the endpoint reads itself.
    """
    known, sent = _names(model), request.query_params.items()
    values = {
        name: str(value) for name, value in sent if name not in apart and (value != "" or name not in known)
    }
    repeated = {
        name[:80]: f"expected one value, found {len(found)}"
        for name, found in request.query_params.lists()
        if len(found) > 1
    }
    if repeated:
        raise _refused(repeated)
    return _validated(model, values)


def _validated(model: type[S], values: object) -> S:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _refused(faults_of(error)) from None


def _refused(faults: Mapping[str, str]) -> RequestRefused:
    return RequestRefused("; ".join(f"{name}: {fault}" for name, fault in faults.items()), fields=faults)
