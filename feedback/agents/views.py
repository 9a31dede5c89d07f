"""Page to rename or delete an agent."""

from __future__ import annotations

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from feedback.accounts.roles import page_for
from feedback.agents.changes import AgentNotRecorded, AgentRefused, agent_delete, agent_rename
from feedback.erasure.withdrawals import trained_text


@page_for("operate", "GET", "HEAD", "POST")
def agent_change(request: HttpRequest, slug: str) -> HttpResponse:
    """GET lists what an agent has. POST `action=rename&new=`, or `action=delete&name=` with the slug typed."""
    fault, status = "", 200
    if request.method == "POST":
        try:
            if request.POST.get("action") == "rename":
                new = request.POST.get("new", "").strip()
                agent_rename(slug, new)
                messages.success(request, f"{slug} was renamed to {new}.")
                return redirect("agent", slug=new)
            if request.POST.get("name", "").strip() == slug:
                force = request.POST.get("force") == "on"
                agent_delete(slug, actor=request.user.get_username(), force=force)
                messages.success(request, f"{slug} was deleted.")
                return redirect("home")
            fault, status = f"Expected the agent's name, {slug}, to confirm the deletion.", 400
        except AgentNotRecorded as refusal:
            raise Http404(str(refusal)) from refusal
        except AgentRefused as refusal:
            fault, status = str(refusal), 409
    try:
        found = agent_delete(slug, actor="", dry_run=True)
    except AgentNotRecorded as refusal:
        raise Http404(str(refusal)) from refusal
    context = {
        "slug": slug,
        "fault": fault,
        "rows": list(found.rows.items()),
        "files": found.files,
        "trained": trained_text(found.trained, "for it") if found.trained else "",
        "given": request.POST,
    }
    return render(request, "feedback/agent_change.html", context, status=status)
