"""Imports over REST: bring a file, list what was brought, take an import back."""

from __future__ import annotations

import base64
import binascii
import re
from pathlib import Path, PurePath
from typing import Any

from django.conf import settings
from django.core.files.uploadedfile import SimpleUploadedFile
from rest_framework.request import Request
from rest_framework.response import Response

from backend.installation import PROGRAM
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import MAX_PAGE_SIZE, PAGE_SIZE, page_of
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.reading import object_in, parameters
from backend.rest.schema import Schema, describe, list_schema, page_schema, parameter
from backend.rest.views import ApiView
from feedback.api.schemas import JSON_OBJECT, SLUG, TIME, answer_schema, request_schema, text
from feedback.models import SLUG_PATTERN
from feedback.storage.bodies import nullable
from feedback.storage.validation import Check
from feedback.transfer import formats
from feedback.transfer.formats.columns import ColumnMap
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import MAX_LICENCE, ImportOrder, ImportRefused, order_import
from feedback.transfer.import_report import COUNTS, ROWS, batch_get, batches, import_summary, next_steps
from feedback.transfer.import_undo import import_undo
from feedback.transfer.uploads import upload_store, uploads_sweep

MAX_CONTENT = 14_000_000
"""Longest content of a file, in characters; the body has a limit of its own."""
MAX_MAP = 2000
REFUSED_SHOWN = 100
"""Refused rows named in the answer to a refused file."""

COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "integer", "minimum": 1}
REFUSED_ROW: Schema = answer_schema({"line": COUNT, "key": {"type": "string"}, "reason": {"type": "string"}})
REPORT: Schema = answer_schema(
    {
        "file": {"type": "string"},
        "format": {"type": "string"},
        "batch": {
            **nullable(NUMBER),
            "description": "The import's number; null where nothing new was stored",
        },
        **dict.fromkeys((*COUNTS, *ROWS), COUNT),
        "skipped_because": {"type": "object", "additionalProperties": COUNT},
        "refused": list_schema(REFUSED_ROW, description="The first 1,000"),
        "refused_count": COUNT,
        "problem": {"type": "string", "description": "Warning about the import, or empty"},
        "notes": list_schema({"type": "string"}),
        "left_out_columns": {
            "type": "object",
            "additionalProperties": COUNT,
            "description": "Columns that hold something and that nobody read: {column: rows}",
        },
        "earlier_import": nullable(NUMBER),
        "agents": list_schema(SLUG),
        "dry_run": {"type": "boolean"},
        "next": list_schema({"type": "string"}),
    }
)
BATCH: Schema = answer_schema(
    {
        "batch": NUMBER,
        "file": {"type": "string"},
        "ratings_file": {"type": "string"},
        "sha256": {"type": "string"},
        "bytes": COUNT,
        "format": {"type": "string"},
        "agent": {"type": "string", "description": "Empty: several"},
        "licence": {"type": "string"},
        "options": JSON_OBJECT,
        "counts": {"type": "object", "additionalProperties": COUNT},
        "actor": {"type": "string"},
        "created_at": TIME,
        "undone_at": nullable(TIME),
        "undone_by": {"type": "string"},
    }
)
BATCH_DETAIL: Schema = answer_schema(
    {
        **BATCH["properties"],
        "skipped_because": {"type": "object", "additionalProperties": COUNT},
        "refused": list_schema(REFUSED_ROW),
        "notes": list_schema({"type": "string"}),
        "undone": JSON_OBJECT,
    }
)
UNDONE: Schema = answer_schema(
    {
        "batch": NUMBER,
        "file": {"type": "string"},
        "dry_run": {"type": "boolean"},
        "forced": {"type": "boolean"},
        **dict.fromkeys(("decisions", "ratings", "comparisons", "outcomes", "traces", "withdrawals"), COUNT),
        "decisions_kept": {**COUNT, "description": "People rated them here, or another import added to them"},
        "traces_kept": COUNT,
        "trained_on": {**JSON_OBJECT, "description": "{runs, policies, labels, snapshots, evaluations}"},
        "imports_since": list_schema(NUMBER),
    }
)
OPTIONAL: dict[str, Schema] = {
    "content": text(MAX_CONTENT, "The file's text; or `base64`"),
    "base64": text(MAX_CONTENT, "The file's bytes in base64: Parquet, or what is compressed"),
    "format": text(40, "A format's name; left out: recognised by the rows"),
    "agent": {**SLUG, "description": "Whose decisions they become"},
    "map": text(MAX_MAP, "Which column holds what: prompt=question,response=answer,rating=stars"),
    "rater": text(200, "The column that names the rater"),
    "licence": text(MAX_LICENCE, "Licence of the data"),
    "simulated": {"type": "boolean", "description": "The ratings were given by a model or a script"},
    "skip_bad": {
        "type": "boolean",
        "description": "Leave out rows that cannot be read, instead of refusing the file",
    },
    "dry_run": {"type": "boolean", "description": "Report what would be imported; store nothing"},
}
REQUIRED_PARAMETERS: dict[str, Schema] = {"name": text(255, "The file's name, such as ratings.csv")}


class Imports(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List the imports, newest first",
        {200: ("A page of them", page_schema(BATCH))},
        parameters=(
            parameter("agent", SLUG, "Of this agent"),
            parameter("cursor", {"type": "string"}, "Where to go on: from next or previous of an answer"),
            parameter(
                "page_size",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": PAGE_SIZE},
                "Rows",
            ),
        ),
        tag="imports",
        operation="imports_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", *PAGE_PARAMETERS))
        agent = given.get("agent", "")
        if agent and not re.fullmatch(SLUG_PATTERN, agent):
            raise RequestRefused(
                "agent: expected a slug", fields={"agent": "expected a slug such as support-bot"}
            )
        return Response(page_of(batches(agent), request, import_summary))

    @describe(
        "Import a file of any known format",
        {
            201: ("Imported", REPORT),
            200: ("Nothing new (everything was imported before), or a dry run", REPORT),
        },
        body=request_schema(REQUIRED_PARAMETERS, OPTIONAL),
        tag="imports",
        operation="imports_make",
        description="The file is imported whole or not at all, as one import that can be undone. Refused "
        "if nothing could be stored. Files of more than 10 MB: the page /import/, or "
        f"`{PROGRAM} import_feedback`.",
    )
    def post(self, request: Request) -> Response:
        facts = _import_fields(
            object_in(request.data, required=tuple(REQUIRED_PARAMETERS), optional=tuple(OPTIONAL))
        )
        upload = upload_store(SimpleUploadedFile(facts["name"], facts["file"]), None)
        try:
            order = ImportOrder(
                **{
                    name: facts[name]
                    for name in ("format", "agent", "columns", "licence", "simulated", "skip_bad")
                },
                path=Path(upload.path),
                name=facts["name"],
                actor=grant_of(request).holder,
                max_rows=settings.FEEDBACK_UPLOAD_MAX_ROWS,
            )
            report = order_import(order, dry_run=facts["dry_run"])
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
        steps = next_steps(report)
        body = {**report.as_dict(), "dry_run": facts["dry_run"], "next": steps}
        return Response(body, status=200 if report.batch is None else 201)


class ImportOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read one import with its report",
        {200: ("The import", BATCH_DETAIL)},
        refusals=(404,),
        tag="imports",
        operation="imports_read",
    )
    def get(self, request: Request, pk: int) -> Response:
        parameters(request, ())
        row = batch_get(pk)
        if row is None:
            raise RequestRefused(f"there is no import {pk}", code="not_found", status=404)
        return Response(import_summary(row, whole=True))


class ImportUndo(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Undo an import",
        {200: ("What was removed, or with dry_run would be", UNDONE)},
        body=request_schema({}, {"dry_run": {"type": "boolean"}, "force": {"type": "boolean"}}),
        refusals=(404, 409),
        tag="imports",
        operation="imports_undo",
        description="409 if it is undone already, or if something was trained on it and `force` is not given.",
    )
    def post(self, request: Request, pk: int) -> Response:
        given = object_in(request.data, required=(), optional=("dry_run", "force"))
        flags = {name: _flag(given, name) for name in ("dry_run", "force")}
        return Response(import_undo(pk, actor=grant_of(request).holder, **flags).as_dict())


def _import_fields(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request to import. Raises RequestRefused and FeedbackRefused, naming the fields."""
    check = Check()
    facts: dict[str, Any] = {
        "name": check.text("name", given["name"], limit=255, required=True),
        "format": check.text("format", given.get("format", "auto"), limit=40) or "auto",
        "agent": check.agent(given["agent"]) if "agent" in given else None,
        "licence": check.text("licence", given.get("licence", ""), limit=MAX_LICENCE),
        **{name: _flag(given, name) for name in ("simulated", "skip_bad", "dry_run")},
    }
    mapped = check.text("map", given.get("map", ""), limit=MAX_MAP)
    rater = check.text("rater", given.get("rater", ""), limit=200)
    facts["file"] = _content(check, given)
    check.raise_faults("import")
    facts["name"] = PurePath(facts["name"].replace("\\", "/")).name or "file"
    if facts["format"] != "auto" and facts["format"] not in (*formats.FORMATS, *formats.SHAPES):
        known = f"expected one of auto, {', '.join(formats.FORMATS)}"
        raise RequestRefused("format: no such format", fields={"format": known})
    try:
        facts["columns"] = ColumnMap.parse(mapped, rater or None) or None
    except FormatRefused as refusal:
        raise RequestRefused(str(refusal).replace("--map", "map"), fields={"map": str(refusal)}) from refusal
    return facts


def _content(check: Check, given: dict[str, Any]) -> bytes:
    """The file's bytes, from the one of `content` and `base64` that was sent."""
    if ("content" in given) == ("base64" in given):
        check.fields["content"] = "expected either content (text) or base64 (bytes)"
        return b""
    if "content" in given:
        content = check.text("content", given["content"], limit=MAX_CONTENT)
        return content.encode("utf-8", "surrogatepass")
    encoded = check.text("base64", given["base64"], limit=MAX_CONTENT)
    try:
        return base64.b64decode(encoded.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        check.fields["base64"] = f"expected base64: {error}"
        return b""


def _flag(given: dict[str, Any], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise RequestRefused(f"{name}: expected true or false", fields={name: "expected true or false"})
    return value


def _reasons(skipped: dict[str, int]) -> dict[str, str]:
    return {f"{count} rows": reason for reason, count in skipped.items()}
