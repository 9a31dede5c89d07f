"""Every component of the pages in both themes, at /design/ where DEBUG is on."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render

from backend.http import page

TOKENS = (
    "paper",
    "panel",
    "sunk",
    "ink",
    "dim",
    "line-strong",
    "accent",
    "accent-soft",
    "good",
    "warn",
    "bad",
)
SIZES = ("title", "head", "lead", "text", "small")
STATUSES = ("queued", "running", "succeeded", "failed", "refused", "cancelled")
STAGES = ("candidate", "challenger", "champion", "rejected", "retired")


@page("feedback.add_rating")
def design(request: HttpRequest) -> HttpResponse:
    context = {
        "themes": ("light", "dark"),
        "tokens": TOKENS,
        "sizes": SIZES,
        "statuses": STATUSES,
        "stages": STAGES,
    }
    return render(request, "design.html", context)
