"""REST endpoint that streams all feedback in one of the formats."""

from __future__ import annotations

import re

from django.http import StreamingHttpResponse
from rest_framework.request import Request

from backend.rest.errors import RequestRefused
from backend.rest.reading import parameters
from backend.rest.schema import describe, list_schema, parameter
from backend.rest.views import ApiView
from feedback.api.schemas import SLUG
from feedback.models import SLUG_PATTERN
from feedback.transfer.export import ExportReport, export_start, filename, media_type
from feedback.transfer.export_views import Selection
from feedback.transfer.formats import SHAPES


class RatingsExport(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Export decisions with their ratings and comparisons",
        {200: ("A file, as it is read", {"type": "string"})},
        parameters=(
            parameter("format", {"type": "string", "enum": list(SHAPES), "default": "ratchet"}, "The format"),
            parameter("agent", SLUG, "Of this agent alone"),
        ),
        tag="ratings",
        operation="ratings_export",
        media_type="application/x-ndjson",
        also={"application/json": list_schema({"type": "object"})},
        description="JSON lines, or an array if the format is one. A complete stream ends with an empty "
        "chunk; without it the stream was cut off.",
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        given = parameters(request, ("format", "agent"))
        name, agent = given.get("format", "ratchet"), given.get("agent")
        faults = {}
        if name not in SHAPES:
            faults["format"] = f"expected one of {', '.join(SHAPES)}"
        if agent is not None and not re.fullmatch(SLUG_PATTERN, agent):
            faults["agent"] = "expected a slug of 1 to 64 lower-case letters, digits, - and _"
        if faults:
            raise RequestRefused(
                "; ".join(f"{field}: {fault}" for field, fault in faults.items()), fields=faults
            )
        return StreamingHttpResponse(
            export_start(name, Selection(agent), ExportReport(name)),
            content_type=media_type(name),
            headers={"Content-Disposition": f'attachment; filename="{filename(name, agent)}"'},
        )
