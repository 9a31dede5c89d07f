"""Lists in pages: each answer names the next one by a cursor, so that rows arriving meanwhile shift nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from rest_framework.request import Request

from backend.rest.errors import Refused

M = TypeVar("M", bound=Model)

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000
PARAMETERS = ("cursor", "page_size")


def page_of(
    rows: QuerySet[M],
    request: Request,
    shown: Callable[[M], dict[str, Any]],
    order: Sequence[str] = ("-created_at", "-id"),
) -> dict[str, Any]:
    """One page: {"next", "previous", "results"}, the first two an address or None.

    order: fields that order the rows and together tell them apart, all in the same direction. DRF's own cursor goes
    by one field and an offset among equals of at most 1,000; an import gives ten thousand rows one time.
    Refuses (400) a cursor that is not one of ours and a page size outside 1 to MAX_PAGE_SIZE.
    """
    size = _size(request.query_params.get("page_size", ""))
    names = [name.removeprefix("-") for name in order]
    descending = order[0].startswith("-")
    backwards, position = _decode(rows.model, names, request.query_params.get("cursor", ""))
    if position is not None:
        rows = rows.filter(_beyond(names, position, "lt" if descending != backwards else "gt"))
    sign = "-" if descending != backwards else ""
    found = list(rows.order_by(*(sign + name for name in names))[: size + 1])
    more = len(found) > size
    page = found[:size][::-1] if backwards else found[:size]

    def link(row: M, back: bool) -> str:
        values = [str(getattr(row, name)) for name in names]
        text = json.dumps([int(back), *values], separators=(",", ":"))
        address = request.build_absolute_uri(request.path)
        query = request.query_params.copy()
        query["cursor"] = base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")
        return f"{address}?{query.urlencode()}"

    follows = more if not backwards else position is not None
    precedes = position is not None if not backwards else more
    return {
        "next": link(page[-1], False) if page and follows else None,
        "previous": link(page[0], True) if page and precedes else None,
        "results": [shown(row) for row in page],
    }


def _size(text: str) -> int:
    if not text:
        return PAGE_SIZE
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MAX_PAGE_SIZE):
        raise Refused(
            f"expected page_size from 1 to {MAX_PAGE_SIZE}",
            fields={"page_size": f"expected a whole number from 1 to {MAX_PAGE_SIZE}"},
        )
    return int(text)


def _decode(model: type[Model], names: Sequence[str], text: str) -> tuple[bool, list[Any] | None]:
    """Whether a cursor leads back, and the values it stands at; (False, None) without one."""
    if not text:
        return False, None
    try:
        back, *values = json.loads(base64.urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)))
        if back not in (0, 1) or len(values) != len(names) or not all(isinstance(v, str) for v in values):
            raise ValueError(text)
        position = [
            model._meta.get_field(name).to_python(value)  # type: ignore[union-attr]
            for name, value in zip(names, values, strict=True)
        ]
        for value in position:
            # a date at the edge of the calendar cannot be moved to another time zone
            if value is None or (
                isinstance(value, datetime) and not (value.tzinfo and 1900 < value.year < 2300)
            ):
                raise ValueError(text)
    except (ValueError, TypeError, RecursionError, OverflowError, ValidationError):
        raise Refused(
            "expected a cursor as an answer's next or previous gave it",
            fields={"cursor": "not a cursor of this list; leave it out to start at the first page"},
        ) from None
    return bool(back), position


def _beyond(names: Sequence[str], values: Sequence[Any], sense: str) -> Q:
    """Rows past a position in the order of several fields; the first field's bound is what an index can use."""
    first = Q(**{f"{names[0]}__{sense}": values[0]})
    if len(names) == 1:
        return first
    return Q(**{f"{names[0]}__{sense}e": values[0]}) & (first | _beyond(names[1:], values[1:], sense))
