"""Withdrawing one decision, or many that were ticked or found, and restoring one."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.erasure.artifacts import trained_text
from feedback.erasure.withdrawals import (
    WithdrawalUnknown,
    decision_restore,
    decision_withdraw,
    decisions_withdraw,
)
from feedback.explorer.decision_search import search_read, selection_chosen
from feedback.explorer.listing import MATCHING
from feedback.storage.validation import FeedbackRefused


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
    learnt = f" Policies trained on it are not changed: {trained}." if trained else ""
    messages.success(request, f"Decision {str(pk)[:8]} is withdrawn: it is excluded from training.{learnt}")
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


@login_required
@permission_required(SCOPE_PERMISSIONS["operate"], raise_exception=True)
@require_POST
def decisions_take_out(request: HttpRequest) -> HttpResponse:
    """Withdraw the decisions that were ticked (`id`, repeated) or found (`which=found` with the search's fields).

    Without `confirm` it is tried alone, and a page asks. `count`: how many that page named; another number asks again.
    """
    form = request.POST
    search: dict[str, str] = {}
    try:
        found = search_read(form)
        search = found.parts
        in_search = form.get("which") == "found"
        selection = selection_chosen(found if in_search else None, form.getlist("id"))
    except FeedbackRefused as refusal:
        messages.error(request, "; ".join(refusal.fields.values()) or str(refusal))
        return redirect(_list(search))
    actor, reason = request.user.get_username(), form.get("reason", "").strip()[:500]
    tried = decisions_withdraw(selection, actor=actor, reason=reason, dry_run=True)
    if not tried.decisions:
        messages.warning(request, "Nothing to withdraw: what was chosen is withdrawn already.")
        return redirect(_list(search))
    if form.get("confirm") != "on" or form.get("count") != str(tried.decisions):
        context: dict[str, Any] = {
            "tried": tried,
            "trained": trained_text(tried.trained_on) if tried.trained_on else "",
            "reason": reason,
            "which": form.get("which", ""),
            "search": search,
            "ids": [] if in_search else [str(pk) for pk in selection.ids],
            "most": f"{MATCHING:,}" if in_search and len(selection.ids) == MATCHING else "",
            "changed": form.get("confirm") == "on",
            "back": _list(search),
        }
        return render(request, "feedback/withdraw.html", context)
    done = decisions_withdraw(selection, actor=actor, reason=reason)
    many = f"{done.decisions:,} decision{'' if done.decisions == 1 else 's'}"
    learnt = f" {trained_text(done.trained_on).capitalize()}, and stays so." if done.trained_on else ""
    messages.success(
        request, f"{many} withdrawn (withdrawal {done.withdrawal}): they are excluded from training.{learnt}"
    )
    return redirect(_list(search))


def _list(search: dict[str, str]) -> str:
    """Address of the decisions page with a search."""
    return reverse("decisions") + (f"?{urlencode(search)}" if search else "")
