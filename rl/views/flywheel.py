"""The pages of the way from a hosted model to an own one, its next step, and what it saves (also as CSV)."""

from __future__ import annotations

from itertools import groupby

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from backend.http import button, page
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.selectors import agent_slugs
from rl.flywheel import flywheel, flywheel_step
from rl.savings import Savings, ledger_cached, ledger_csv
from rl.serving.routes import route_shown


@page(SCOPE_PERMISSIONS["operate"])
def flywheel_page(request: HttpRequest, slug: str) -> HttpResponse:
    """The five stations of one agent."""
    if slug not in agent_slugs():
        raise Http404(f"no agent {slug}")
    return render(request, "rl/flywheel.html", {"slug": slug, "wheel": flywheel(slug)})


@button(SCOPE_PERMISSIONS["operate"])
def step(request: HttpRequest, slug: str) -> HttpResponse:
    """Take the next step that needs no person; what the service says is shown."""
    if slug not in agent_slugs():
        raise Http404(f"no agent {slug}")
    try:
        done = flywheel_step(slug, actor=request.user.get_username())
    except ValueError as refusal:
        messages.error(request, str(refusal))
    else:
        messages.success(request, f"Done: {done}.")
    return redirect("flywheel", slug)


@page(SCOPE_PERMISSIONS["operate"])
def savings(request: HttpRequest) -> HttpResponse:
    """The ledger of every agent, newest month first; `?agent=` and `?format=csv`."""
    asked = request.GET.get("agent", "")
    rows = [row for row in ledger_cached() if not asked or row.agent == asked]
    if request.GET.get("format") == "csv":
        headers = {"Content-Disposition": 'attachment; filename="savings.csv"'}
        return HttpResponse(ledger_csv(rows), content_type="text/csv; charset=utf-8", headers=headers)
    ordered = sorted(rows, key=lambda row: row.agent)
    agents = [(name, list(months)) for name, months in groupby(ordered, key=lambda row: row.agent)]
    shown = [(name, Savings(months), route_shown(name)) for name, months in agents]
    return render(request, "rl/savings.html", {"agents": shown, "asked": asked})
