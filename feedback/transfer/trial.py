"""Trial of an upload: what it would bring, without storing anything; read by every page that takes files or text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse

from backend.installation import PROGRAM
from feedback.transfer import formats
from feedback.transfer.formats.columns import FIELDS, columns_guessed
from feedback.transfer.formats.previews import ColumnSeen, FilePreview
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import order_import
from feedback.transfer.import_report import COUNTS, ImportReport
from feedback.transfer.uploads import Upload, columns_chosen, columns_read, offered_columns

IN_A_SHELL = re.compile(r" Say which (with --format|column holds what|it is, as in --map).*", re.S)
"""End of a refusal that says which option of the command would help."""
MAX_ROWS = 100
"""Refused rows that a page lists."""


@dataclass(frozen=True)
class Trial:
    """Result of a trial run over an upload."""

    fault: str
    """Reason why it cannot be read as it is; empty where it can."""
    readable: bool
    """False where no choice of columns would help either: the page asks for another file."""
    context: dict[str, Any]
    """Context of `feedback/_import_trial.html`."""


def too_large(request: HttpRequest) -> HttpResponse | None:
    """The refusal of a body above the limit, by its stated length, before anything of it is read; else None."""
    limit = settings.FEEDBACK_UPLOAD_MAX_BYTES
    if int(request.META.get("CONTENT_LENGTH") or 0) <= limit:
        return None
    fault = (
        f"The upload is larger than {limit >> 20} MB. Split the file, zip it, or read it with "
        f"`{PROGRAM} import_feedback FILE`, which takes any size."
    )
    # what was not read of the body cannot be answered over: the connection ends with this
    return HttpResponse(fault, status=413, content_type="text/plain", headers={"Connection": "close"})


def upload_mapped(upload: Upload, given: Mapping[str, str]) -> Upload:
    """The upload with the columns and the scale that a form chose. Raises FormatRefused."""
    plain = replace(upload, columns={}, scale="")
    previews = plain.previews()
    chosen = columns_chosen(previews, given)
    scale = given.get("scale", "").strip()
    unchanged = chosen == columns_read(previews) and not scale
    return plain if unchanged else replace(plain, columns=chosen, scale=scale)


def upload_try(upload: Upload, *, actor: str, fault: str = "") -> Trial:
    """Read a file without storing anything: what it would bring, or why it cannot be read, with its columns where a
    map may cure it. fault: known before, so that only the columns are read."""
    report: ImportReport | None = None
    previews: tuple[FilePreview, ...] = ()
    try:
        previews = replace(upload, columns={}, scale="").previews()
        if not fault:
            report = order_import(upload.order(actor=actor, skip_bad=True), dry_run=True)
    except FormatRefused as refusal:
        fault = upload.without_paths(str(refusal))
    columns = offered_columns(previews)
    fault = IN_A_SHELL.split(fault)[0]  # the page asks for it itself
    context = {
        "upload": upload,
        "name": upload.name,
        "fault": fault,
        "notes": list(dict.fromkeys(note for preview in previews for note in preview.notes)),
        "members": [preview.name for preview in previews] if len(previews) > 1 else [],
        **_columns(upload, columns, guess=bool(fault)),
        **(_trial_context(upload, report) if report else {"any": False}),
    }
    return Trial(fault, not fault or bool(columns), context)


def _trial_context(upload: Upload, report: ImportReport) -> dict[str, Any]:
    """Result of a dry run, for the page."""
    found = report.as_dict()
    known = formats.FORMATS.get(report.format)
    return {
        "format": known.title if known else "Several formats",
        "whose": sorted(report.agents),
        "problem": report.problem,
        "already_here": report.already_here,
        "rows": report.rows,
        "earlier": report.earlier,
        "counts": [(name, found[name]) for name in COUNTS if found[name]],
        "skipped": report.skipped_because.most_common(),
        "refused": [(row, upload.without_paths(row.reason)) for row in report.refused[:MAX_ROWS]],
        "refused_count": report.refused_count,
        "more": max(report.refused_count - MAX_ROWS, 0),
        "notes": [upload.without_paths(note) for note in report.notes],
        "any": report.rows_stored > 0 or report.stored_rows > 0,
    }


def _columns(upload: Upload, columns: tuple[ColumnSeen, ...], *, guess: bool) -> dict[str, Any]:
    """The first rows as a table, with what each column is read as; with a guess of what it may be where the file cannot
    be read as it is."""
    chosen = {
        column: name
        for name, mapped in upload.columns.items()
        for column in (mapped.split("+") if name == "ignore" else [mapped])
    }
    guessed = not chosen and guess and not any(column.field for column in columns)
    if guessed:
        chosen = {column: name for name, column in _guess([column.name for column in columns]).items()}
    rows = max((len(column.samples) for column in columns), default=0)
    return {
        "columns": [(column, chosen.get(column.name) if chosen else column.field) for column in columns],
        "fields": FIELDS,
        "is_mapped": bool(chosen),
        "is_guessed": guessed and bool(chosen),
        "first_rows": [
            [column.samples[row] if row < len(column.samples) else "" for column in columns]
            for row in range(rows)
        ],
    }


def _guess(names: list[str]) -> dict[str, str]:
    """Field -> column by their names; the column before the response is the prompt, where none is called so."""
    found = columns_guessed(names)
    if "prompt" not in found and (response := found.get("response")):
        before = [name for name in names[: names.index(response)] if name not in found.values()]
        found |= {"prompt": before[-1]} if before else {}
    return found
