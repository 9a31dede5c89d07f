"""Page of the rows that readers skipped, and withdrawing or restoring one decision."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST, require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.erasure.withdrawals import WithdrawalUnknown, decision_restore, decision_withdraw
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
    known = reader in ("", *READERS)
    found = problems(agent, reader) if known else problems().none()
    page = Paginator(found, PAGE).get_page(request.GET.get("page"))
    agents = ProblemRow.objects.order_by("agent").values_list("agent", flat=True).distinct()
    asked = {name: value for name, value in (("agent", agent), ("reader", reader)) if value}
    context: dict[str, Any] = {
        "page": page,
        "agent": agent,
        "reader": reader,
        "agents": list(agents),
        "readers": READERS.items(),
        "rows": [(row, READERS.get(row.reader, row.reader)) for row in page],
        "query": urlencode(asked),
        "here": request.get_full_path(),
        "fault": "" if known else f"reader: expected one of {', '.join(READERS)}",
        "any": bool(asked) or bool(page.paginator.count),
    }
    return render(request, "feedback/problems.html", context, status=200 if known else 400)


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
def decision_take_out(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Withdraw one decision; `next=` is the page to go on with."""
    try:
        done = decision_withdraw(
            pk, actor=request.user.get_username(), reason=request.POST.get("reason", "")[:500]
        )
    except WithdrawalUnknown as unknown:
        raise Http404(str(unknown)) from unknown
    trained = ", ".join(str(name) for name in done.trained_on.get("policies", ()))
    learnt = f" Trained on it, and still so: {trained}." if trained else ""
    messages.success(request, f"Decision {str(pk)[:8]} is withdrawn: nothing learns from it.{learnt}")
    return _next_page(request, pk)


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
def decision_put_back(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Restore one withdrawn decision."""
    try:
        decision_restore(pk, actor=request.user.get_username())
    except WithdrawalUnknown as unknown:
        raise Http404(str(unknown)) from unknown
    messages.success(request, f"Decision {str(pk)[:8]} counts again.")
    return _next_page(request, pk)


def _next_page(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    target = request.POST.get("next", "")
    safe = url_has_allowed_host_and_scheme(target, None, require_https=request.is_secure())
    return redirect(target) if target and safe else redirect("decision", pk=pk)
