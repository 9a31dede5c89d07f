"""Pages of the imports there were: all of them, one with its report, and taking one back."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.erasure.artifacts import trained_text
from feedback.models import ImportBatch
from feedback.transfer.import_report import COUNTS, count_text
from feedback.transfer.import_undo import FORCE, UndoRefused, import_undo
from feedback.transfer.imports import batch_get, batches, rows_remaining

PAGE = 40
"""Imports on one page."""
MAX_ROWS = 100
"""Refused rows that the page of an import lists."""
OPTIONS = {
    "columns": "columns",
    "simulated": "ratings by a model or script",
    "skip_bad": "unreadable rows left out",
}
"""Options of an import without columns of their own -> words for them."""
UNDONE = ("decisions", "ratings", "comparisons", "outcomes", "traces", "withdrawals")


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def imports(request: HttpRequest) -> HttpResponse:
    """Every import, newest first: `?agent=&page=`."""
    agent = request.GET.get("agent", "")
    page = Paginator(batches(agent), PAGE).get_page(request.GET.get("page"))
    rows = [(row, ", ".join(count_text(n, name) for name, n in _counts(row.counts))) for row in page]
    context = {"page": page, "agent": agent, "rows": rows}
    return render(request, "feedback/imports.html", context)


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def import_detail(request: HttpRequest, number: int) -> HttpResponse:
    """One import with its report."""
    return render(request, "feedback/import_one.html", _context(_batch_or_404(number)))


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
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
        removed = ", ".join(count_text(count, name) for name, count in _removed_counts(report.as_dict()))
        messages.success(request, f"Import {number} was undone: {removed or 'nothing'} removed.")
        return redirect("import-one", number=number)
    context = {
        **_context(batch),
        "tried": report,
        "removed": _removed_counts(report.as_dict()),
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


def _option(value: Any) -> str:
    return ", ".join(f"{k} = {v}" for k, v in value.items()) if isinstance(value, dict) else "yes"


def _context(batch: ImportBatch) -> dict[str, Any]:
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
        "refused": batch.refused[:MAX_ROWS],
        "refused_more": max(batch.counts.get("refused", 0) - MAX_ROWS, 0),
        "undone": _removed_counts(batch.undone),
    }
