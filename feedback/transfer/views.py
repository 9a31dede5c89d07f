"""Pages that bring files in, give them out, and show the imports there were."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect

from feedback.accounts.roles import SCOPE_PERMISSIONS, page_for
from feedback.erasure.withdrawals import trained_text
from feedback.models import SLUG_PATTERN, ImportBatch
from feedback.selectors import agent_slugs
from feedback.transfer import formats
from feedback.transfer.export import ExportReport, export_start, filename, media_type
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.records import FormatRefused
from feedback.transfer.import_ import MAX_LICENCE, ImportRefused, order_import
from feedback.transfer.import_report import COUNTS, batch_get, batches, count_text, rows_remaining
from feedback.transfer.import_undo import FORCE, Undone, UndoRefused, import_undo
from feedback.transfer.uploads import (
    Upload,
    pasted_file,
    pasted_text,
    too_large,
    upload_mapped,
    upload_store,
    upload_try,
    uploads_sweep,
)

UPLOAD_KEY = "import_upload"
"""Session key of the uploaded file, as an `Upload`."""


@csrf_exempt  # the size is looked at before the body is read; _imports checks the token
@never_cache
def imports(request: HttpRequest) -> HttpResponse:
    """GET asks for a file; POST takes one (or another map of the columns of the one taken), tries it and shows what it
    would bring."""
    return too_large(request) or _imports(request)


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@csrf_protect  # reads the body
def _imports(request: HttpRequest) -> HttpResponse:
    if request.method == "POST":
        return _file_retry(request) if request.POST.get("token") else _upload_response(request)
    if request.method not in ("GET", "HEAD"):
        return HttpResponse(status=405, headers={"Allow": "GET, HEAD, POST"})
    return _form(request)


def _form(request: HttpRequest, *, fault: str = "", status: int = 200) -> HttpResponse:
    context = {
        "fault": fault,
        "formats": formats.FORMATS.values(),
        "agents": agent_slugs(),
        "given": request.POST
        or Upload.of(request.session.get(UPLOAD_KEY) or {}),  # what was typed for a file
        "limit_mb": settings.FEEDBACK_UPLOAD_MAX_BYTES >> 20,
        "max_licence": MAX_LICENCE,
    }
    return render(request, "feedback/import.html", context, status=status)


def _upload_response(request: HttpRequest) -> HttpResponse:
    """Take a file."""
    _forget(request)
    file, ratings = request.FILES.get("file"), request.FILES.get("ratings")
    text = pasted_text(request.POST.get("text", ""))
    if file is None and not text:
        return _form(
            request, fault="Expected a file or rows, found neither: choose a file or paste some.", status=400
        )
    agent, licence = request.POST.get("agent", "").strip(), request.POST.get("licence", "").strip()
    if agent and not re.fullmatch(SLUG_PATTERN, agent):
        return _form(request, fault="Agent: expected a slug such as support-bot.", status=400)
    if len(licence) > MAX_LICENCE or not licence.isprintable():
        return _form(
            request, fault=f"Licence: expected a name of at most {MAX_LICENCE} characters.", status=400
        )
    upload = upload_store(
        file or pasted_file(text),
        ratings,
        format=request.POST.get("format") or "auto",
        agent=agent,
        licence=licence,
        simulated=request.POST.get("simulated") == "on",
    )
    return _trial_response(request, upload)


def _file_retry(request: HttpRequest) -> HttpResponse:
    """Try the file that was taken with another map of its columns."""
    upload = _session_upload(request)
    if upload is None:
        return _form(request, fault=UPLOAD_MISSING, status=400)
    try:
        changed = upload_mapped(upload, request.POST)
    except FormatRefused as refusal:
        return _trial_response(request, upload, fault=upload.for_page(str(refusal)))
    return _trial_response(request, changed)


UPLOAD_MISSING = "This upload is no longer here: choose the file again."


def _trial_response(request: HttpRequest, upload: Upload, *, fault: str = "") -> HttpResponse:
    """Show what a file would bring, or why it cannot be read."""
    trial = upload_try(upload, actor=request.user.get_username(), fault=fault)
    if not trial.readable:
        uploads_sweep(upload.token)
        return _form(request, fault=trial.fault, status=400)
    request.session[UPLOAD_KEY] = asdict(trial.upload)
    status = 400 if trial.fault else 200
    return render(request, "feedback/import_tried.html", trial.context, status=status)


@page_for("operate", "POST")
def import_do(request: HttpRequest) -> HttpResponse:
    """Import what this session uploaded and tried."""
    upload = _session_upload(request)
    if upload is None:
        return _form(request, fault=UPLOAD_MISSING, status=400)
    skip_bad = request.POST.get("skip_bad") == "on"
    try:
        report = order_import(upload.order(actor=request.user.get_username(), skip_bad=skip_bad))
    except (FormatRefused, ImportRefused) as refusal:
        return _form(request, fault=upload.for_page(str(refusal)), status=400)
    finally:
        _forget(request)
    if report.batch is None:
        return _form(
            request, fault=f"{upload.name}: {report.headline}.", status=400 if report.problem else 200
        )
    left_out = f"; {count_text(report.refused_count, 'rows')} left out" if report.refused_count else ""
    note = messages.warning if report.problem else messages.success
    note(request, f"{upload.name}: {report.headline}{left_out}.")
    return redirect("import-one", number=report.batch)


def _session_upload(request: HttpRequest) -> Upload | None:
    """The upload of this session that the form names."""
    upload = Upload.of(request.session.get(UPLOAD_KEY) or {})
    return upload if upload is not None and upload.token == request.POST.get("token") else None


def _forget(request: HttpRequest) -> None:
    """Remove this session's upload, and those that nobody came back for."""
    upload = request.session.pop(UPLOAD_KEY, None) or {}
    uploads_sweep(str(upload.get("token", "")) or "-")


@page_for("read")
def exports(request: HttpRequest) -> HttpResponse:
    """Page to choose a format and an agent to export."""
    return render(
        request, "feedback/export.html", {"formats": formats.FORMATS.values(), "agents": agent_slugs()}
    )


@page_for("read")
def export_file(request: HttpRequest) -> HttpResponseBase:
    """The file itself, as a stream: `?format=&agent=`."""
    name, agent = request.GET.get("format", "ratchet"), request.GET.get("agent") or None
    if name not in formats.SHAPES or (agent is not None and agent not in agent_slugs()):
        return HttpResponseRedirect("/export/")
    return StreamingHttpResponse(
        export_start(name, Selection(agent), ExportReport(name)),
        content_type=media_type(name),
        headers={"Content-Disposition": f'attachment; filename="{filename(name, agent)}"'},
    )


# --- The imports there were --------------------------------------------------------------------------------

PAGE = 40
"""Imports on one page."""
MAX_REFUSED_SHOWN = 100
"""Refused rows that the page of an import lists."""
OPTIONS = {
    "columns": "columns",
    "simulated": "ratings by a model or script",
    "skip_bad": "unreadable rows left out",
}
"""Options of an import without columns of their own -> words for them."""
UNDONE = ("decisions", "ratings", "comparisons", "outcomes", "traces", "withdrawals")


@page_for("read")
def import_list(request: HttpRequest) -> HttpResponse:
    """Every import, newest first: `?agent=&page=`."""
    agent = request.GET.get("agent", "")
    page = Paginator(batches(agent), PAGE).get_page(request.GET.get("page"))
    rows = [(row, ", ".join(count_text(n, name) for name, n in _counts(row.counts))) for row in page]
    context = {"page": page, "agent": agent, "rows": rows}
    return render(request, "feedback/imports.html", context)


@page_for("read")
def import_detail(request: HttpRequest, number: int) -> HttpResponse:
    """One import with its report."""
    return render(request, "feedback/import_one.html", _context(_batch_or_404(number)))


@page_for("operate", "POST")
def import_take_back(request: HttpRequest, number: int) -> HttpResponse:
    """Try to take an import back and ask; `confirm=on` does it, `force=on` although something was trained on it."""
    batch = _batch_or_404(number)
    confirmed, force = request.POST.get("confirm") == "on", request.POST.get("force") == "on"
    try:
        report = import_undo(number, actor=request.user.get_username(), dry_run=not confirmed, force=force)
    except UndoRefused as refusal:
        return render(
            request, "feedback/import_one.html", {**_context(batch), "fault": str(refusal)}, status=409
        )
    if confirmed:
        removed = ", ".join(count_text(count, name) for name, count in _removed_counts(Undone.of(report)))
        messages.success(request, f"Import {number} was undone: {removed or 'nothing'} removed.")
        return redirect("import-one", number=number)
    context = {
        **_context(batch),
        "tried": report,
        "removed": _removed_counts(Undone.of(report)),
        "trained": trained_text(report.trained_on) if report.was_trained_on else "",
        "force": FORCE,
    }
    return render(request, "feedback/import_undo.html", context)


def _batch_or_404(number: int) -> ImportBatch:
    batch = batch_get(number)
    if batch is None:
        raise Http404(f"no import {number}")
    return batch


def _counts(counts: dict[str, int]) -> list[tuple[str, int]]:
    return [(name, counts[name]) for name in COUNTS if counts.get(name)]


def _removed_counts(found: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, found[name]) for name in UNDONE if found.get(name)]


def _option(value: object) -> str:
    return ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else "yes"


def _context(batch: ImportBatch) -> dict[str, object]:
    left = rows_remaining(batch)
    return {
        "batch": batch,
        "counts": _counts(batch.counts),
        "left": [(name, count) for name, count in left.items() if count != batch.counts.get(name, 0)],
        "decisions_left": left["decisions"],
        "options": [
            (words, _option(value)) for name, words in OPTIONS.items() if (value := batch.options.get(name))
        ],
        "skipped": sorted(batch.skipped_because.items(), key=lambda item: -item[1]),
        "refused": batch.refused[:MAX_REFUSED_SHOWN],
        "refused_more": max(batch.counts.get("refused", 0) - MAX_REFUSED_SHOWN, 0),
        "undone": _removed_counts(batch.undone),
    }
