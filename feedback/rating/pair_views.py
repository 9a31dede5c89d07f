"""Page of comparisons: two responses to one prompt, side by side."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol, cast
from urllib.parse import urlencode

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache

from feedback.accounts.roles import page_for
from feedback.explorer.previews import preview_context
from feedback.explorer.search import DecisionFilter, filter_context
from feedback.rating.pair_queue import QueuedPair, compared_today, pair_get, pairs_waiting
from feedback.rating.service import ComparisonForm, comparison_undo
from feedback.rating.views import NOTICES, SKIP_LIMIT, UNDO_LIMIT, SessionIds, queue_filter, wants_card
from feedback.services import FeedbackConflict, FeedbackRefused, comparison_submit


class JudgingPages(Protocol):
    """Interface of the module that FEEDBACK_JUDGING names."""

    def rounds_waiting(self, rater: str, agent: str) -> Sequence[tuple[int, str, int | None]]:
        """Rounds with a pair for this rater: (number, agent, estimated answers still needed)."""

    def round_pairs(self, request: HttpRequest) -> HttpResponse:
        """The page of `/rate/pairs/?round=`."""


UNDO, SKIPPED = SessionIds("pairs_undo", UNDO_LIMIT), SessionIds("pairs_skipped", SKIP_LIMIT)
SAVED_NOTICES = {
    "left": "Saved: A is better",
    "right": "Saved: B is better",
    "tie": "Saved: equally good",
    "both_bad": "Saved: both bad",
}


@page_for("rate", "GET", "HEAD", "POST")
@never_cache
def pairs(request: HttpRequest) -> HttpResponse:
    """GET shows two responses; POST stores which one is better and shows the next pair.

    Filters: `?agent=&policy=&tag=&since=&until=`. `?pair=` shows this pair. `?after=` (script) returns the card after
    it, or 204. `?round=` shows the pairs of a judging round.
    """
    if "round" in request.GET:
        if (judging := _judging_pages()) is None:
            raise Http404("there are no judging rounds")
        return judging.round_pairs(request)
    within = queue_filter(request)
    if request.method == "POST":
        return _store(request, within)
    notice_key = request.GET.get("said", "")
    notice = SAVED_NOTICES.get(notice_key) or NOTICES.get(notice_key, "")
    if request.GET.get("pair"):
        return _card(request, within, _pair_or_404(request.GET["pair"]), said=notice)
    if after := request.GET.get("after"):
        waiting = pairs_waiting(request.user.get_username(), within, [*SKIPPED.read(request), after])
        return _card(request, within, waiting.pair) if waiting.pair else HttpResponse(status=204)
    return _card(request, within, said=notice)


@page_for("rate", "POST")
def pairs_undo(request: HttpRequest) -> HttpResponse:
    """Withdraw this session's last comparison and show its pair again."""
    within = queue_filter(request)
    comparison, earlier = comparison_undo(request.user.get_username(), UNDO.read(request))
    UNDO.write(request, earlier)
    if comparison is None:
        return _next_response(request, within, "nothing")
    if wants_card(request):
        pair = QueuedPair(comparison.left, comparison.right)
        return _card(request, within, pair, said=NOTICES["undone"], notes=comparison.notes)
    return _to_page(within, pair=f"{comparison.left_id}~{comparison.right_id}", said="undone")


@page_for("rate", "POST")
def pairs_skip(request: HttpRequest) -> HttpResponse:
    """Skip a pair for this session; `all=1` brings back every skipped pair."""
    within = queue_filter(request)
    if request.POST.get("all"):
        SKIPPED.write(request, [])
        return _next_response(request, within, "")
    pair = _pair_or_404(f"{request.POST.get('left', '')}~{request.POST.get('right', '')}")
    SKIPPED.append(request, pair.key)
    return _next_response(request, within, "skipped")


def _store(request: HttpRequest, within: DecisionFilter) -> HttpResponse:
    pair = _pair_or_404(f"{request.POST.get('left', '')}~{request.POST.get('right', '')}")
    form = ComparisonForm(request.POST)
    notes = request.POST.get("notes", "")
    if not form.is_valid():
        return _card(request, within, pair, fault=form.fault(), notes=notes, status=400)
    try:
        written = comparison_submit(
            left=pair.left, right=pair.right, rater=request.user.get_username(), **form.facts()
        )
    except FeedbackConflict:
        fault = "You compared these already. Compare them again here to replace your answer"
        return _card(request, within, pair, fault=fault, status=409)
    except FeedbackRefused as refusal:
        return _card(request, within, pair, fault=str(refusal), notes=notes, status=400)
    if written.created:
        UNDO.append(request, str(written.row.pk))
    return _next_response(request, within, form.cleaned_data["preference"])


def _judging_pages() -> JudgingPages | None:
    path: str = settings.FEEDBACK_JUDGING
    return cast(JudgingPages, import_module(path)) if path else None


def _pair_or_404(text: str) -> QueuedPair:
    """The pair of `<left id>~<right id>`."""
    left, _, right = text.partition("~")
    try:
        pair = pair_get(uuid.UUID(left), uuid.UUID(right))
    except ValueError:
        pair = None
    if pair is None:
        raise Http404("no such pair of decisions")
    return pair


def _next_response(request: HttpRequest, within: DecisionFilter, said: str) -> HttpResponse:
    if not wants_card(request):
        return _to_page(within, said=said)
    pair = None
    if shown := request.headers.get("X-Ratchet-Shown"):
        # The script preloaded the next pair and shows it already.
        pair = _pair_or_404(shown)
    return _card(request, within, pair, said=SAVED_NOTICES.get(said) or NOTICES.get(said, ""))


def _query(within: DecisionFilter) -> str:
    return f"?{within.query}" if within.query else ""


def _to_page(within: DecisionFilter, **query: str) -> HttpResponseRedirect:
    words = urlencode({**within.parts, **{name: value for name, value in query.items() if value}})
    return redirect(f"{reverse('pairs')}?{words}" if words else reverse("pairs"))


def _card(
    request: HttpRequest,
    within: DecisionFilter,
    pair: QueuedPair | None = None,
    *,
    said: str = "",
    fault: str = "",
    notes: str = "",
    status: int = 200,
) -> HttpResponse:
    """The page, or only its card for the script; without `pair`, the next one waiting."""
    rater = request.user.get_username()
    waiting = pairs_waiting(rater, within, SKIPPED.read(request))
    pair = pair or waiting.pair
    today = compared_today(rater, within.agent)
    context: dict[str, Any] = {
        "within": within,
        "action": f"{reverse('pairs')}{_query(within)}",
        "rounds": judging.rounds_waiting(rater, within.agent) if (judging := _judging_pages()) else [],
        "pair": pair,
        "today": today,
        "waiting": waiting.count,
        "total": max(1, today + waiting.count),
        "skipped": len(SKIPPED.read(request)),
        "undo": len(UNDO.read(request)),
        "said": said,
        "fault": fault,
        "notes": notes,
        **filter_context(request, within),
    }
    if pair is not None:
        sides = [preview_context(pair.left), preview_context(pair.right)]
        context |= {
            "hidden": [("id", uuid.uuid4()), ("left", pair.left.pk), ("right", pair.right.pk)],
            "shown": f"{pair.left.pk}~{pair.right.pk}",
            "next_card": f"{reverse('pairs')}?{urlencode({'after': pair.key, **within.parts})}",
            "sides": [("A", "left", sides[0]), ("B", "right", sides[1])],
            "top": sides[0],
            "brief": all(side["preview"].brief for side in sides),
            "as_text": sides[0]["preview"].template.endswith("/text.html"),
        }
    alone = wants_card(request)
    template = "feedback/_pair.html" if alone else "feedback/pairs.html"
    response = render(request, template, context, status=status)
    if alone:
        response["X-Ratchet-Card"] = "1"
    return response
