"""The page of the way from a hosted model to an own one, and the button that takes its next step."""

from __future__ import annotations

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from backend.http import button, page
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.selectors import agent_slugs
from rl.flywheel import flywheel, flywheel_step


@page(SCOPE_PERMISSIONS["operate"])
def flywheel_page(request: HttpRequest, slug: str) -> HttpResponse:
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
