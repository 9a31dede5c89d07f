"""The rating page: a decision to rate, its card, undo and skip."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required, permission_required
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST

from backend.redirects import redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.explorer.previews import preview_context
from feedback.explorer.search import DecisionFilter, filter_context, narrowed_of
from feedback.models import Decision
from feedback.rating.forms import (
    PAGE_FIELDS,
    STARS,
    RatingForm,
    form_values,
    page_inputs,
    rating_id,
    tags_sent,
)
from feedback.rating.queue import (
    LEASE,
    decision_take,
    lease_release,
    lease_take,
    queue_progress,
    rating_last,
)
from feedback.rating.service import SuggestionChanged, rating_give, rating_undo
from feedback.rating.session import SKIP_LIMIT, UNDO_LIMIT, SessionIds
from feedback.rating.suggestions import suggestion_of
from feedback.selectors import decision_get
from feedback.services import FeedbackConflict, FeedbackRefused

UNDO, SKIPPED = SessionIds("rate_undo", UNDO_LIMIT), SessionIds("rate_skipped", SKIP_LIMIT)


def queue_filter(request: HttpRequest) -> DecisionFilter:
    """Filter of the queue read from the address. Raters are blind, so a policy is named by who may read it
    alone."""
    try:
        within = narrowed_of(request.GET)
    except FeedbackRefused as refusal:
        raise Http404(str(refusal)) from refusal
    if within.policy and not request.user.has_perm(SCOPE_PERMISSIONS["read"]):
        raise PermissionDenied("only operators filter by policy: raters do not see which one decided")
    return within


def _decision_or_404(value: str) -> Decision:
    try:
        decision = decision_get(uuid.UUID(value))
    except ValueError:
        decision = None
    if decision is None:
        raise Http404("no such decision")
    return decision


def wants_card(request: HttpRequest) -> bool:
    """True if the request is the page's script's, which gets the card alone."""
    return request.headers.get("X-Ratchet-Card") == "1"


def _card(
    request: HttpRequest,
    decision: Decision | None,
    within: DecisionFilter,
    *,
    said: str = "",
    fault: str = "",
    kept: dict[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    """The rating page, or its card alone. `said`: what was done; `fault`: what went wrong; `kept`: what stood there."""
    alone = wants_card(request)
    template = "feedback/_card.html" if alone else "feedback/rate.html"
    context = _card_context(request, decision, within, said=said, fault=fault, kept=kept)
    response = render(request, template, context, status=status)
    if alone:
        response["X-Ratchet-Card"] = "1"
    return response


def card_in_place(request: HttpRequest, agent: str) -> dict[str, Any]:
    """Context of `feedback/_card.html` on a page other than the queue's: the next decision of an agent that waits for
    this rater; empty where none does. Without scripts the card's forms lead back to that page (`back`)."""
    within = DecisionFilter(agent=agent)
    decision = decision_take(request.user.get_username(), within, SKIPPED.read(request))
    if decision is None:
        return {}
    return _card_context(request, decision, within) | {"back": request.get_full_path()}


def _card_context(
    request: HttpRequest,
    decision: Decision | None,
    within: DecisionFilter,
    *,
    said: str = "",
    fault: str = "",
    kept: dict[str, Any] | None = None,
) -> dict[str, Any]:
    rater = request.user.get_username()
    context: dict[str, Any] = {
        "within": within,
        "decision": decision,
        "progress": queue_progress(rater, within),
        "skipped": len(SKIPPED.read(request)),
        "undo": len(UNDO.read(request)),
        "said": said,
        "fault": fault,
        "lease_minutes": int(LEASE.total_seconds() // 60),
        **filter_context(request, within),
    }
    if decision is not None:
        kept = kept if kept is not None else form_values(rating_last(rater, decision))
        shown = preview_context(decision)
        suggested = shown["facts"].suggested_tags
        context |= shown | {
            "rating_id": rating_id(),
            "kept": kept,
            "inputs": page_inputs(kept),
            "tags": [(tag, tag in kept["tags"]) for tag in suggested],
            "other_tags": ", ".join(tag for tag in kept["tags"] if tag not in suggested),
            "suggestion": suggestion_of(decision),
            "back": request.POST.get("back", ""),
        }
    return context


def _next_response(request: HttpRequest, within: DecisionFilter, *, said: str = "") -> HttpResponse:
    """Go on to the next decision: the card for our script, a redirect for a plain form (so that reload is safe)."""
    if not wants_card(request):
        return _to_page(request, within, said=said)
    # our script had the next card already and shows it
    ahead = request.headers.get("X-Ratchet-Shown")
    decision = decision_take(
        request.user.get_username(),
        within,
        SKIPPED.read(request),
        ahead=_decision_or_404(ahead) if ahead else None,
    )
    return _card(request, decision, within, said=_notice(said))


def _to_page(request: HttpRequest, within: DecisionFilter, **query: str) -> HttpResponseRedirect:
    if request.POST.get("back"):
        return redirect_back(request, "rate")
    words = urlencode({**within.parts, **{name: value for name, value in query.items() if value}})
    return redirect(f"{reverse('rate')}?{words}" if words else reverse("rate"))


SAVED_NOTICES = {
    "up": "Saved: good",
    "down": "Saved: bad",
    "correct": "Saved your correction",
    "save": "Saved",
    "accept-up": "Accepted: good",
    "accept-down": "Accepted: bad",
}
NOTICES = {"undone": "Undone", "skipped": "Skipped", "nothing": "There is nothing to undo"}


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@never_cache
@require_http_methods(["GET", "HEAD", "POST"])
def rate(request: HttpRequest) -> HttpResponse:
    """One decision at a time. GET shows it, POST stores a rating and goes on.

    Filters: `?agent=&policy=&tag=&since=&until=`. `?decision=` shows this one; `?after=`, for our script, the card to
    follow that one, or 204 where there is none.
    """
    filters = queue_filter(request)
    if request.method == "POST":
        return _rate_store(request, filters)
    rater = request.user.get_username()
    skipped = SKIPPED.read(request)
    if request.GET.get("after"):
        decision = decision_take(rater, filters, skipped, after=_decision_or_404(request.GET["after"]))
        return _card(request, decision, filters) if decision else HttpResponse(status=204)
    notice_key = request.GET.get("said", "")
    if request.GET.get("decision"):
        decision = _decision_or_404(request.GET["decision"])
        lease_take(rater, decision.pk)  # asked for by name it is shown, whoever else has it
    else:
        decision = decision_take(rater, filters, skipped)
    return _card(request, decision, filters, said=_notice(notice_key))


def _notice(done: str) -> str:
    """Words for what was done: an undo, a skip, or the verdict that was saved."""
    stars = f"Saved: {done} of 5 stars" if done in STARS else ""
    return NOTICES.get(done) or SAVED_NOTICES.get(done) or stars


def _rate_store(request: HttpRequest, within: DecisionFilter) -> HttpResponse:
    decision = _decision_or_404(request.POST.get("decision", ""))
    form = RatingForm(request.POST)
    values = {
        **{field.name: request.POST.get(field.name, "") for field in PAGE_FIELDS},
        "tags": tags_sent(request.POST),
        "correction": request.POST.get("correction", ""),
        "verdict": "",
    }
    if not form.is_valid():
        return _card(request, decision, within, fault=form.fault(), kept=values, status=400)
    verdict = form.cleaned_data["verdict"]
    try:
        written = rating_give(request.user.get_username(), decision, verdict, form.facts(decision))
    except FeedbackConflict:
        # the page was sent before with another button: what was pressed first counts
        fault = "You rated this already; rate it again here to replace that"
        return _card(request, decision, within, fault=fault, status=409)
    except FeedbackRefused as refusal:
        status = 409 if isinstance(refusal, SuggestionChanged) else 400
        return _card(request, decision, within, fault=str(refusal), kept=values, status=status)
    if written.created:
        UNDO.append(request, str(written.row.pk))
    return _next_response(request, within, said=verdict)


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_POST
def rate_undo(request: HttpRequest) -> HttpResponse:
    """Take the last rating of this session back, and show its decision again."""
    within = queue_filter(request)
    rating, earlier = rating_undo(request.user.get_username(), UNDO.read(request))
    UNDO.write(request, earlier)
    if rating is None:
        return _next_response(request, within, said="nothing")
    if wants_card(request):
        return _card(request, rating.decision, within, said=NOTICES["undone"])
    return _to_page(request, within, decision=str(rating.decision_id), said="undone")


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@require_POST
def rate_skip(request: HttpRequest) -> HttpResponse:
    """Skip a decision for this session, or (`all=1`) bring back the skipped ones."""
    within = queue_filter(request)
    if request.POST.get("all"):
        SKIPPED.write(request, [])
        return _next_response(request, within)
    decision = _decision_or_404(request.POST.get("decision", ""))
    SKIPPED.append(request, str(decision.pk))
    lease_release(request.user.get_username(), decision.pk)
    return _next_response(request, within, said="skipped")
