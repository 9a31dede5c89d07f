"""Pages that bring files in and give them out: an upload is tried first, and imported when its counts were seen."""

from __future__ import annotations

import re
import secrets
import shutil
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt, csrf_protect
from django.views.decorators.http import require_POST, require_safe

from feedback import formats
from feedback.exported import Selection
from feedback.exporting import ExportReport, export_stream, filename, media_type
from feedback.formats.records import FormatRefused
from feedback.importing import ImportRefused, file_import
from feedback.models import SLUG_PATTERN
from feedback.roles import SCOPE_PERMISSIONS
from feedback.selectors import agents_known

UPLOAD_KEY = "import_upload"
"""Where a session remembers what it uploaded: {token, file, ratings, ...options}."""
KEPT_S = 3600
"""Seconds an upload waits for its import."""
SHOWN = 100
"""Refused rows that the page lists."""
COUNTS = ("decisions", "ratings", "comparisons", "corrections", "outcomes", "traces")


def _uploads() -> Path:
    folder: Path = settings.RATCHET_HOME / "uploads"
    return folder


@csrf_exempt  # the size is looked at before the body is read; _imports checks the token
@never_cache
def imports(request: HttpRequest) -> HttpResponse:
    """GET asks for a file; POST takes one, tries it and shows what it would bring."""
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
        return _tried(request)
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
    }
    return render(request, "feedback/import.html", context, status=status)


def _tried(request: HttpRequest) -> HttpResponse:
    _forget(request)
    file, ratings = request.FILES.get("file"), request.FILES.get("ratings")
    if file is None:
        return _form(request, fault="Expected a file, found none: choose one.", status=400)
    upload: dict[str, Any] = {
        "token": secrets.token_urlsafe(16),
        "format": request.POST.get("format") or "auto",
        "agent": request.POST.get("agent", "").strip(),
        "simulated": request.POST.get("simulated") == "on",
    }
    if upload["agent"] and not re.fullmatch(SLUG_PATTERN, upload["agent"]):
        return _form(request, fault="Agent: expected a slug such as support-bot.", status=400)
    folder = _uploads() / upload["token"]
    folder.mkdir(parents=True)
    upload["file"] = _kept(folder, "file", file)
    upload["ratings"] = _kept(folder, "ratings", ratings) if ratings else ""
    try:
        report = file_import(**_asked(upload), skip_bad=True, dry_run=True)
    except FormatRefused as refusal:
        shutil.rmtree(folder)
        return _form(request, fault=_named(str(refusal), upload), status=400)
    request.session[UPLOAD_KEY] = upload
    found = report.as_dict()
    context = {
        "upload": upload,
        "name": file.name,
        "format": formats.FORMATS[report.format].title,
        "counts": [(name, found[name]) for name in COUNTS if found[name]],
        "skipped": report.skipped_because.most_common(),
        "refused": [(row, _named(row.reason, upload)) for row in sorted(report.refused, key=_line)[:SHOWN]],
        "refused_count": len(report.refused),
        "more": max(len(report.refused) - SHOWN, 0),
        "any": any(found[name] for name in COUNTS),
    }
    return render(request, "feedback/import_tried.html", context)


def _line(row: Any) -> int:
    line: int = row.line
    return line


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
def import_do(request: HttpRequest) -> HttpResponse:
    """Import what this session uploaded and tried."""
    upload = request.session.get(UPLOAD_KEY)
    if not upload or upload["token"] != request.POST.get("token") or not Path(upload["file"]).exists():
        return _form(request, fault="This upload is no longer here: choose the file again.", status=400)
    try:
        report = file_import(**_asked(upload), skip_bad=request.POST.get("skip_bad") == "on")
    except (FormatRefused, ImportRefused) as refusal:
        return _form(request, fault=_named(str(refusal), upload), status=400)
    finally:
        _forget(request)
    found = report.as_dict()
    counts = ", ".join(f"{found[name]} {name}" for name in COUNTS if found[name]) or "nothing new"
    left_out = f"; {len(report.refused)} rows were left out" if report.refused else ""
    messages.success(request, f"Imported {counts}{left_out}.")
    return redirect("import")


def _asked(upload: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": upload["file"],
        "format": upload["format"],
        "agent": upload["agent"] or None,
        "ratings_path": upload["ratings"] or None,
        "simulated": upload["simulated"],
    }


def _kept(folder: Path, name: str, file: UploadedFile) -> str:
    """Keep an upload under a name of ours: its own says nothing that reading needs but its ending."""
    ending = "".join(suffix for suffix in Path(file.name or "").suffixes[-2:] if suffix in ENDINGS)
    path = folder / f"{name}{ending}"
    with path.open("wb") as kept:
        for chunk in file.chunks():
            kept.write(chunk)
    return str(path)


ENDINGS = (".json", ".jsonl", ".gz")


def _named(text: str, upload: dict[str, Any]) -> str:
    """A refusal without the path that the file has here."""
    return text.replace(upload["ratings"] or "\0", "ratings file").replace(upload["file"], "file")


def _forget(request: HttpRequest) -> None:
    """Remove this session's upload, and those that nobody came back for."""
    request.session.pop(UPLOAD_KEY, None) if request.method == "POST" else None
    folders = list(_uploads().iterdir()) if _uploads().is_dir() else []
    own = request.POST.get("token")
    for folder in folders:
        if folder.name == own or folder.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(folder, ignore_errors=True)


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
        export_stream(name, Selection(agent), ExportReport(name)),
        content_type=media_type(name),
        headers={"Content-Disposition": f'attachment; filename="{filename(name, agent)}"'},
    )
