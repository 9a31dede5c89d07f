"""Lists in pages: each answer names the next one by a cursor, so that rows arriving meanwhile shift nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Generic, TypeVar

from django.core.exceptions import ValidationError
from django.db.models import Model, Q, QuerySet
from pydantic import Field
from rest_framework.request import Request

from backend.bodies import INT_TEXT, Query
from backend.rest.errors import RequestRefused

M = TypeVar("M", bound=Model)


PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000


class PageQuery(Query):
    cursor: str = ""
    """Where to go on: from `next` or `previous` of an answer."""
    page_size: Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE), INT_TEXT] = PAGE_SIZE
    """Rows."""


LOOK = 20_000
"""Rows looked through for one page, where what is asked for stands in no index."""


@dataclass(frozen=True)
class KeysetPage(Generic[M]):
    """One page of rows, with the cursors of the pages around it ("" where there is none)."""

    rows: list[M]
    next: str
    previous: str
    looked_to: Any = None
    """Value of the first field at which the looking ended before the page was full; None if it did not."""


def keyset_page(
    rows: QuerySet[M],
    cursor: str,
    size: int,
    order: Sequence[str] = ("-created_at", "-id"),
    among: QuerySet[M] | None = None,
) -> KeysetPage[M]:
    """The page that a cursor leads to; without one, the first.

    order: fields that order the rows and together tell them apart, all in the same direction. DRF's own cursor goes
    by one field and an offset among equals of at most 1,000; an import gives ten thousand rows one time.
    among: where the rows are found by what stands in no index, those that an index narrows down; at most LOOK of them
    are looked through for a page, which may then hold fewer rows than asked for, or none, and still lead on.
    Refuses (400) a cursor that is not one of ours.
    """
    names = [name.removeprefix("-") for name in order]
    descending = order[0].startswith("-")
    backwards, position = _decode(rows.model, names, cursor)
    onward, back = ("lt", "gt") if descending != backwards else ("gt", "lt")
    order_names = [("-" if onward == "lt" else "") + name for name in names]
    if position is not None:
        rows = rows.filter(_position_condition(names, position, onward))
    end: Sequence[object] | None = None
    if among is not None:
        if position is not None:
            among = among.filter(_position_condition(names, position, onward))
        for last in among.order_by(*order_names).values_list(*names)[LOOK - 1 : LOOK]:
            end = list(last)
            rows = rows.filter(**{f"{names[0]}__{back}e": end[0]}).filter(
                _position_condition(names, end, back) | Q(**dict(zip(names, end, strict=True)))
            )
    fetched_rows = list(rows.order_by(*order_names)[: size + 1])
    has_more = len(fetched_rows) > size
    rows_shown = fetched_rows[:size][::-1] if backwards else fetched_rows[:size]

    def place(row: M) -> list[object]:
        return [getattr(row, name) for name in names]

    # where the looking ended before the page was full, it goes on from there
    onwards = place(fetched_rows[size - 1]) if has_more else end
    came_from = (place(fetched_rows[0]) if fetched_rows else end) if position is not None else None
    following, preceding = (came_from, onwards) if backwards else (onwards, came_from)
    looked_to = end[0] if end is not None and not has_more else None
    return KeysetPage(rows_shown, _encode(following, False), _encode(preceding, True), looked_to)


def page_of(
    rows: QuerySet[M],
    request: Request,
    page: PageQuery,
    shown: Callable[[M], Mapping[str, object]],
    among: QuerySet[M] | None = None,
) -> dict[str, object]:
    """The answer of an endpoint that lists rows: {"next", "previous", "results"}, the first two an address or None."""
    found = keyset_page(rows, page.cursor, page.page_size, among=among)

    def link(cursor: str) -> str | None:
        query = request.query_params.copy()
        query["cursor"] = cursor
        return f"{request.build_absolute_uri(request.path)}?{query.urlencode()}" if cursor else None

    return {
        "next": link(found.next),
        "previous": link(found.previous),
        "results": [shown(row) for row in found.rows],
    }


def _encode(values: Sequence[object] | None, back: bool) -> str:
    if values is None:
        return ""
    text = json.dumps([int(back), *map(str, values)], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decode(model: type[Model], names: Sequence[str], text: str) -> tuple[bool, list[object] | None]:
    """True if a cursor leads back, with the values it stands at; (False, None) without one."""
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
        raise RequestRefused(
            "expected a cursor as an answer's next or previous gave it",
            fields={"cursor": "not a cursor of this list; leave it out to start at the first page"},
        ) from None
    return bool(back), position


def _position_condition(names: Sequence[str], values: Sequence[object], sense: str) -> Q:
    """Rows past a position in the order of several fields; the first field's bound is what an index can use."""
    first = Q(**{f"{names[0]}__{sense}": values[0]})
    if len(names) == 1:
        return first
    return Q(**{f"{names[0]}__{sense}e": values[0]}) & (
        first | _position_condition(names[1:], values[1:], sense)
    )
