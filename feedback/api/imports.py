"""Imports and exports over REST."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime
from pathlib import Path, PurePath
from typing import Annotated, Any

from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from django.http import StreamingHttpResponse
from pydantic import AfterValidator, Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Sent
from backend.installation import PROGRAM
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import PageQuery, page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from feedback.storage.fields import Name, OneOf, SaidText, Slug, Storable
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_start, filename, media_type
from feedback.transfer.export_views import Selection
from feedback.transfer.formats import SHAPES
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import MAX_LICENCE, ImportOrder, ImportRefused, order_import
from feedback.transfer.import_report import batch_get, batches, next_steps
from feedback.transfer.import_undo import Undone, import_undo
from feedback.transfer.uploads import upload_store, uploads_sweep

MAX_CONTENT = 14_000_000
"""Longest content of a file, in characters; the body has a limit of its own."""
REFUSED_SHOWN = 100
"""Refused rows named in the answer to a refused file."""


def bytes_read(text: str) -> str:
    try:
        base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise ValueError(f"expected base64: {error}") from None
    return text


class ImportSent(Sent):
    name: Annotated[SaidText, Field(max_length=255)]
    """The file's name, such as ratings.csv."""
    content: Annotated[str, Field(max_length=MAX_CONTENT)] | None = None
    """The file's text; or `base64`."""
    base64: Annotated[str, Field(max_length=MAX_CONTENT), AfterValidator(bytes_read)] | None = None
    """The file's bytes in base64: Parquet, or what is compressed."""
    format: Annotated[str, OneOf(["auto", *formats.FORMATS, *formats.SHAPES])] = "auto"
    """A format's name; left out: recognised by the rows."""
    agent: Slug | None = None
    """Whose decisions they become."""
    map: Annotated[Storable, Field(max_length=2000)] = ""
    """Which column holds what: prompt=question,response=answer,rating=stars."""
    rater: Name = ""
    """The column that names the rater."""
    licence: Annotated[Storable, Field(max_length=MAX_LICENCE)] = ""
    """Licence of the data."""
    simulated: bool = False
    """The ratings were given by a model or a script."""
    skip_bad: bool = False
    """Leave out rows that cannot be read, instead of refusing the file."""
    dry_run: bool = False
    """Report what would be imported; store nothing."""

    @property
    def filename(self) -> str:
        return PurePath(self.name.replace("\\", "/")).name or "file"

    @property
    def file(self) -> bytes:
        """The file's bytes, from the one of `content` and `base64` that was sent."""
        if (self.content is None) == (self.base64 is None):
            fault = "expected either content (text) or base64 (bytes)"
            raise RequestRefused(f"content: {fault}", fields={"content": fault})
        if self.content is not None:
            return self.content.encode("utf-8", "surrogatepass")
        return base64.b64decode(self.base64 or "")

    @property
    def columns(self) -> ColumnMap | None:
        try:
            return ColumnMap.parse(self.map, self.rater or None) or None
        except FormatRefused as refusal:
            raise RequestRefused(
                str(refusal).replace("--map", "map"), fields={"map": str(refusal)}
            ) from refusal


class RefusedRow(Answer):
    line: int
    key: str
    reason: str


class ImportReport(Answer):
    file: str
    format: str
    batch: int | None
    """The import's number; null where nothing new was stored."""
    decisions: int
    ratings: int
    comparisons: int
    corrections: int
    outcomes: int
    traces: int
    rows: int
    rows_stored: int
    already_here: int
    duplicates: int
    skipped: int
    skipped_because: dict[str, int]
    refused: list[RefusedRow]
    """The first 1,000."""
    refused_count: int
    problem: str
    """Warning about the import, or empty."""
    notes: list[str]
    left_out_columns: dict[str, int]
    """Columns that hold something and that nobody read: {column: rows}."""
    earlier_import: int | None
    agents: list[str]
    dry_run: bool
    next: list[str]


class Import(Answer):
    batch: int = Field(validation_alias="pk")
    file: str
    ratings_file: str
    sha256: str
    bytes: int
    format: str
    agent: str
    """Empty: several."""
    licence: str
    options: dict[str, Any]
    counts: dict[str, int]
    actor: str
    created_at: datetime
    undone_at: datetime | None
    undone_by: str


class ImportWhole(Import):
    skipped_because: dict[str, int]
    refused: list[RefusedRow]
    notes: list[str]
    undone: dict[str, object]


class UndoSent(Sent):
    dry_run: bool = False
    force: bool = False


class ImportsQuery(PageQuery):
    agent: Slug | None = None
    """Of this agent."""


class Imports(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List the imports, newest first",
        {200: ("A page of them", Page[Import])},
        query=ImportsQuery,
        tag="imports",
        operation="imports_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(ImportsQuery, request)
        return Response(page_of(batches(sent.agent or ""), request, sent, Import.of))

    @describe(
        "Import a file of any known format",
        {
            201: ("Imported", ImportReport),
            200: ("Nothing new (everything was imported before), or a dry run", ImportReport),
        },
        body=ImportSent,
        tag="imports",
        operation="imports_make",
        description="The file is imported whole or not at all, as one import that can be undone. Refused "
        "if nothing could be stored. Files of more than 10 MiB: the page /import/, or "
        f"`{PROGRAM} import_feedback`.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(ImportSent, request.data)
        columns = sent.columns
        upload = upload_store(SimpleUploadedFile(sent.filename, sent.file), None)
        try:
            order = ImportOrder(
                path=Path(upload.path),
                name=sent.filename,
                format=sent.format,
                agent=sent.agent,
                columns=columns,
                licence=sent.licence,
                simulated=sent.simulated,
                skip_bad=sent.skip_bad,
                actor=grant_of(request).holder,
                max_rows=settings.FEEDBACK_UPLOAD_MAX_ROWS,
            )
            report = order_import(order, dry_run=sent.dry_run)
        except ImportRefused as refusal:
            rows = refusal.report.refused[:REFUSED_SHOWN]
            faults = {f"line {row.line}{f' ({row.key})' if row.key else ''}": row.reason for row in rows}
            raise RequestRefused(str(refusal).replace("--skip-bad", "skip_bad"), fields=faults) from refusal
        except FormatRefused as refusal:
            raise RequestRefused(upload.without_paths(str(refusal))) from refusal
        finally:
            uploads_sweep(upload.token)
        if report.problem and not report.stored_rows:
            raise RequestRefused(f"{report.file}: {report.headline}", fields=_reasons(report.skipped_because))
        body = ImportReport.of({**report.as_dict(), "dry_run": sent.dry_run, "next": next_steps(report)})
        return Response(body, status=200 if report.batch is None else 201)


class ImportOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read one import with its report",
        {200: ("The import", ImportWhole)},
        refusals=(404,),
        tag="imports",
        operation="imports_read",
    )
    def get(self, request: Request, pk: int) -> Response:
        query_read(Query, request)
        row = batch_get(pk)
        if row is None:
            raise RequestRefused(f"there is no import {pk}", code="not_found", status=404)
        return Response(ImportWhole.of(row))


class ImportUndo(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Undo an import",
        {200: ("What was removed, or with dry_run would be", Undone)},
        body=UndoSent,
        refusals=(404, 409),
        tag="imports",
        operation="imports_undo",
        description="409 if it is undone already, or if something was trained on it and `force` is not given.",
    )
    def post(self, request: Request, pk: int) -> Response:
        sent = body_read(UndoSent, request.data)
        done = import_undo(pk, actor=grant_of(request).holder, dry_run=sent.dry_run, force=sent.force)
        return Response(Undone.of(done))


def _reasons(skipped: dict[str, int]) -> dict[str, str]:
    return {f"{count} rows": reason for reason, count in skipped.items()}


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
