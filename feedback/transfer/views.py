"""Pages that bring files in and give them out: an upload is tried first, and imported when its counts were seen."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST, require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.models import SLUG_PATTERN
from feedback.selectors import agents_known
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_start, filename, media_type
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.columns import FIELDS
from feedback.transfer.formats.previews import FilePreview
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import MAX_LICENCE, ImportRefused, order_import
from feedback.transfer.import_report import COUNTS, ImportReport, counted
from feedback.transfer.uploads import (
    Upload,
    columns_chosen,
    columns_read,
    columns_shown,
    upload_store,
    uploads_sweep,
)

UPLOAD_KEY = "import_upload"
"""Where a session remembers what it uploaded, as `Upload.as_dict`."""
SHOWN = 100
"""Refused rows that the page lists."""


@csrf_exempt  # the size is looked at before the body is read; _imports checks the token
@never_cache
def imports(request: HttpRequest) -> HttpResponse:
    """GET asks for a file; POST takes one (or another map of the columns of the one taken), tries it and shows what it
    would bring."""
    limit = settings.FEEDBACK_UPLOAD_MAX_BYTES
    if int(request.META.get("CONTENT_LENGTH") or 0) > limit:
        fault = (
            f"The upload is larger than {limit >> 20} MB. Split the file, zip it, or read it with "
            "`manage.py import_feedback FILE`, which takes any size."
        )
        # what was not read of the body cannot be answered over: the connection ends with this
        return HttpResponse(fault, status=413, content_type="text/plain", headers={"Connection": "close"})
    response: HttpResponse = _imports(request)
    return response


@csrf_protect
@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
def _imports(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        return _again(request) if request.POST.get("token") else _taken(request)
    if request.method not in ("GET", "HEAD"):
        return HttpResponse(status=405, headers={"Allow": "GET, HEAD, POST"})
    return _form(request)


def _form(request: HttpRequest, *, fault: str = "", status: int = 200) -> HttpResponse:
    context = {
        "fault": fault,
        "formats": formats.FORMATS.values(),
        "agents": agents_known(),
        "given": request.POST,
        "limit_mb": settings.FEEDBACK_UPLOAD_MAX_BYTES >> 20,
        "max_licence": MAX_LICENCE,
    }
    return render(request, "feedback/import.html", context, status=status)


def _taken(request: HttpRequest) -> HttpResponse:
    """Take a file."""
    _forget(request)
    file, ratings = request.FILES.get("file"), request.FILES.get("ratings")
    if file is None:
        return _form(request, fault="Expected a file, found none: choose one.", status=400)
    agent, licence = request.POST.get("agent", "").strip(), request.POST.get("licence", "").strip()
    if agent and not re.fullmatch(SLUG_PATTERN, agent):
        return _form(request, fault="Agent: expected a slug such as support-bot.", status=400)
    if len(licence) > MAX_LICENCE or not licence.isprintable():
        return _form(
            request, fault=f"Licence: expected a name of at most {MAX_LICENCE} characters.", status=400
        )
    upload = upload_store(
        file,
        ratings,
        format=request.POST.get("format") or "auto",
        agent=agent,
        licence=licence,
        simulated=request.POST.get("simulated") == "on",
    )
    return _tried(request, upload)


def _again(request: HttpRequest) -> HttpResponse:
    """Try the file that was taken with another map of its columns."""
    upload = _kept(request)
    if upload is None:
        return _form(request, fault=GONE, status=400)
    plain = replace(upload, columns={}, scale="")
    try:
        previews = plain.previews()
        chosen = columns_chosen(previews, request.POST)
    except FormatRefused as refusal:
        return _tried(request, upload, fault=upload.without_paths(str(refusal)))
    scale = request.POST.get("scale", "").strip()
    unchanged = chosen == columns_read(previews) and not scale
    return _tried(request, plain if unchanged else replace(plain, columns=chosen, scale=scale))


GONE = "This upload is no longer here: choose the file again."


def _tried(request: HttpRequest, upload: Upload, *, fault: str = "") -> HttpResponse:
    """Read the file without storing anything, and show what it would bring; or why it cannot be read, with a form for
    its columns where a map may cure it."""
    report: ImportReport | None = None
    previews: tuple[FilePreview, ...] = ()
    try:
        previews = replace(upload, columns={}, scale="").previews()
        if not fault:
            order = upload.order(actor=request.user.get_username(), skip_bad=True)
            report = order_import(order, dry_run=True)
    except FormatRefused as refusal:
        fault = upload.without_paths(str(refusal))
    fault = fault.partition(" Say which with --format")[0]  # the page asks for both itself
    if fault and not columns_shown(previews):
        uploads_sweep(upload.token)
        return _form(request, fault=fault, status=400)
    request.session[UPLOAD_KEY] = upload.as_dict()
    context = {
        "upload": upload,
        "name": upload.name,
        "fault": fault,
        "notes": list(dict.fromkeys(note for preview in previews for note in preview.notes)),
        "members": [preview.name for preview in previews] if len(previews) > 1 else [],
        **_columns(upload, previews),
        **(_brought(upload, report) if report else {"any": False}),
    }
    return render(request, "feedback/import_tried.html", context, status=400 if fault else 200)


def _brought(upload: Upload, report: ImportReport) -> dict[str, Any]:
    """What a dry run came to, for the page."""
    found = report.as_dict()
    known = formats.FORMATS.get(report.format)
    return {
        "format": known.title if known else "Several formats",
        "problem": report.problem,
        "already_here": report.already_here,
        "rows": report.rows,
        "earlier": report.earlier,
        "counts": [(name, found[name]) for name in COUNTS if found[name]],
        "skipped": report.skipped_because.most_common(),
        "refused": [(row, upload.without_paths(row.reason)) for row in report.refused[:SHOWN]],
        "refused_count": report.refused_count,
        "more": max(report.refused_count - SHOWN, 0),
        "notes": [upload.without_paths(note) for note in report.notes],
        "any": report.rows_stored > 0 or report.stored > 0,
    }


def _columns(upload: Upload, previews: tuple[FilePreview, ...]) -> dict[str, Any]:
    """The first rows as a table, with what each column is read as."""
    columns = columns_shown(previews)
    chosen = {
        column: name
        for name, mapped in upload.columns.items()
        for column in (mapped.split("+") if name == "ignore" else [mapped])
    }
    rows = max((len(column.samples) for column in columns), default=0)
    return {
        "columns": [(column, chosen.get(column.name) if chosen else column.field) for column in columns],
        "fields": FIELDS,
        "is_mapped": bool(chosen),
        "first_rows": [
            [column.samples[row] if row < len(column.samples) else "" for column in columns]
            for row in range(rows)
        ],
    }


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
def import_do(request: HttpRequest) -> HttpResponse:
    """Import what this session uploaded and tried."""
    upload = _kept(request)
    if upload is None:
        return _form(request, fault=GONE, status=400)
    skip_bad = request.POST.get("skip_bad") == "on"
    try:
        report = order_import(upload.order(actor=request.user.get_username(), skip_bad=skip_bad))
    except (FormatRefused, ImportRefused) as refusal:
        return _form(request, fault=upload.without_paths(str(refusal)), status=400)
    finally:
        _forget(request)
    if report.batch is None:
        return _form(
            request, fault=f"{upload.name}: {report.headline}.", status=400 if report.problem else 200
        )
    left_out = f"; {counted(report.refused_count, 'rows')} left out" if report.refused_count else ""
    note = messages.warning if report.problem else messages.success
    note(request, f"{upload.name}: {report.headline}{left_out}.")
    return redirect("import-one", number=report.batch)


def _kept(request: HttpRequest) -> Upload | None:
    """The upload of this session that the form names."""
    upload = Upload.of(request.session.get(UPLOAD_KEY) or {})
    return upload if upload is not None and upload.token == request.POST.get("token") else None


def _forget(request: HttpRequest) -> None:
    """Remove this session's upload, and those that nobody came back for."""
    kept = request.session.pop(UPLOAD_KEY, None) or {}
    uploads_sweep(str(kept.get("token", "")) or "-")


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def exports(request: HttpRequest) -> HttpResponse:
    """Which format, and whose feedback."""
    return render(
        request, "feedback/export.html", {"formats": formats.FORMATS.values(), "agents": agents_known()}
    )


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def export_file(request: HttpRequest) -> HttpResponseBase:
    """The file itself, as a stream: `?format=&agent=`."""
    name, agent = request.GET.get("format", "ratchet"), request.GET.get("agent") or None
    if name not in formats.SHAPES or (agent is not None and agent not in agents_known()):
        return HttpResponseRedirect("/export/")
    return StreamingHttpResponse(
        export_start(name, Selection(agent), ExportReport(name)),
        content_type=media_type(name),
        headers={"Content-Disposition": f'attachment; filename="{filename(name, agent)}"'},
    )
