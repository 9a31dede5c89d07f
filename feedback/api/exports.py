"""Everything that was said, as a stream in one of the formats."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from django.http import StreamingHttpResponse
from rest_framework.request import Request

from backend.rest.errors import Refused
from backend.rest.reading import parameters
from backend.rest.schema import described, parameter
from backend.rest.views import ApiView
from feedback.api.schemas import SLUG
from feedback.formats import ratchet
from feedback.models import SLUG_PATTERN
from feedback.selectors import comparisons_history, decisions_history

ROWS_AT_ONCE = 200
"""Rows written to one piece of the stream."""


def _ratchet(agent: str | None) -> Iterator[str]:
    """JSON lines: decisions with their ratings and outcomes, then comparisons."""
    yield from _pieces(decisions_history(agent), lambda file, rows: ratchet.write(file, rows, ()))
    yield from _pieces(comparisons_history(agent), lambda file, rows: ratchet.write(file, (), rows))


WRITERS: dict[str, Callable[[str | None], Iterator[str]]] = {"ratchet": _ratchet}
"""Format -> what writes it, for one agent or for all."""


def _pieces(rows: Iterable[Any], write: Callable[[io.StringIO, list[Any]], object]) -> Iterator[str]:
    found = iter(rows)
    while some := list(islice(found, ROWS_AT_ONCE)):
        piece = io.StringIO()
        write(piece, some)
        yield piece.getvalue()


class RatingsExport(ApiView):
    scopes = {"GET": "read"}

    @described(
        "Export decisions with their ratings and comparisons",
        {200: ("JSON lines, as they are read", {"type": "string"})},
        parameters=(
            parameter(
                "format", {"type": "string", "enum": list(WRITERS), "default": "ratchet"}, "The format"
            ),
            parameter("agent", SLUG, "Of this agent alone"),
        ),
        tag="ratings",
        operation="ratings_export",
        media_type="application/x-ndjson",
        description="A stream that breaks off before its end was not whole: it ends with an empty chunk.",
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        given = parameters(request, ("format", "agent"))
        name, agent = given.get("format", "ratchet"), given.get("agent")
        faults = {}
        if name not in WRITERS:
            faults["format"] = f"expected one of {', '.join(WRITERS)}"
        if agent is not None and not re.fullmatch(SLUG_PATTERN, agent):
            faults["agent"] = "expected a slug of 1 to 64 lower-case letters, digits, - and _"
        if faults:
            raise Refused("; ".join(f"{field}: {fault}" for field, fault in faults.items()), fields=faults)
        filename = f"{agent or 'feedback'}.{name}.jsonl"
        return StreamingHttpResponse(
            WRITERS[name](agent),
            content_type="application/x-ndjson",
            headers={"Content-Disposition": f'attachment; filename="{filename}"'},
        )
