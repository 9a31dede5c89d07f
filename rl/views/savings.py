"""The page of savings: per agent and month what was paid, what the incumbent alone would have cost; also as CSV."""

from __future__ import annotations

from itertools import groupby

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from backend.http import page
from feedback.accounts.roles import SCOPE_PERMISSIONS
from rl.savings import Savings, ledger_cached, ledger_csv
from rl.serving.routes import route_shown


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
