"""The page: tickets, a suggested reply to each, and two thumbs."""

from __future__ import annotations

import logging

from django.http import HttpRequest, HttpResponse, HttpResponseBadRequest
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_POST

from helpdesk.models import Ticket
from helpdesk.suggestions import suggestion_fetch, suggestion_rate
from ratchet_client import RatchetError

logger = logging.getLogger(__name__)


@require_GET
def tickets(request: HttpRequest) -> HttpResponse:
    """All tickets; a reply is suggested for those that have none yet."""
    away = False
    for ticket in Ticket.objects.filter(decision_id=None):
        try:
            suggestion_fetch(ticket)
        except RatchetError as error:  # the desk works without suggestions
            logger.warning("no suggestion: %s", error)
            away = True
            break
    return render(request, "helpdesk/tickets.html", {"tickets": Ticket.objects.order_by("pk"), "away": away})


@require_POST
def thumb(request: HttpRequest, pk: int) -> HttpResponse:
    """Rate a suggestion."""
    ticket = get_object_or_404(Ticket, pk=pk, decision_id__isnull=False)
    said = request.POST.get("thumb", "")
    if said not in ("up", "down"):
        return HttpResponseBadRequest(f"thumb: expected up or down, found {said!r}")
    suggestion_rate(ticket, said, clerk="clerk-1")  # an app with sign-in: request.user.username
    return redirect("tickets")
