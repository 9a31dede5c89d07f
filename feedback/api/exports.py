"""REST endpoint that streams all feedback in one of the formats."""

from __future__ import annotations

from typing import Annotated

from django.http import StreamingHttpResponse
from rest_framework.request import Request

from backend.bodies import Query
from backend.rest.reading import query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.storage.fields import OneOf, Slug
from feedback.transfer.export import ExportReport, export_start, filename, media_type
from feedback.transfer.export_views import Selection
from feedback.transfer.formats import SHAPES


class ExportQuery(Query):
    format: Annotated[str, OneOf(list(SHAPES))] = "ratchet"
    agent: Slug | None = None
    """Of this agent alone."""


class RatingsExport(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Export decisions with their ratings and comparisons",
        {200: ("A file, as it is read", {"type": "string"})},
        query=ExportQuery,
        tag="ratings",
        operation="ratings_export",
        media_type="application/x-ndjson",
        also={"application/json": {"type": "array", "items": {"type": "object"}}},
        description="JSON lines, or an array if the format is one. A complete stream ends with an empty "
        "chunk; without it the stream was cut off.",
    )
    def get(self, request: Request) -> StreamingHttpResponse:
        sent = query_read(ExportQuery, request)
        name = filename(sent.format, sent.agent)
        return StreamingHttpResponse(
            export_start(sent.format, Selection(sent.agent), ExportReport(sent.format)),
            content_type=media_type(sent.format),
            headers={"Content-Disposition": f'attachment; filename="{name}"'},
        )
