"""Page of the rows that readers skipped."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.models import ProblemRow
from feedback.storage.problem_rows import READERS, problems

PAGE = 50
"""Problems on one page."""


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def problem_rows(request: HttpRequest) -> HttpResponse:
    """Decisions that a reader of many rows skipped, newest first: `?agent=&reader=&page=`."""
    agent, reader = request.GET.get("agent", ""), request.GET.get("reader", "")
    is_known = reader in ("", *READERS)
    found = problems(agent, reader) if is_known else problems().none()
    page = Paginator(found, PAGE).get_page(request.GET.get("page"))
    agents = ProblemRow.objects.order_by("agent").values_list("agent", flat=True).distinct()
    query = {name: value for name, value in (("agent", agent), ("reader", reader)) if value}
    context: dict[str, Any] = {
        "page": page,
        "agent": agent,
        "reader": reader,
        "agents": list(agents),
        "readers": READERS.items(),
        "rows": [(row, READERS.get(row.reader, row.reader)) for row in page],
        "query": urlencode(query),
        "here": request.get_full_path(),
        "fault": "" if is_known else f"reader: expected one of {', '.join(READERS)}",
        "any": bool(query) or bool(page.paginator.count),
    }
    return render(request, "feedback/problems.html", context, status=200 if is_known else 400)
