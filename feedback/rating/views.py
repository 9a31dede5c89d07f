"""Rating page: forms, writers, a decision to rate, its card, undo and skip."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlencode

from django import forms
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache

from backend.http import redirect_back
from feedback.accounts.roles import SCOPE_PERMISSIONS, page_for
from feedback.explorer.previews import preview_context
from feedback.explorer.search import DecisionFilter, filter_context, narrowed_of
from feedback.models import Comparison, Decision, Preference, Rating, Thumb
from feedback.rating.queue import (
    LEASE,
    decision_take,
    lease_release,
    lease_take,
    queue_progress,
    rating_last,
)
from feedback.rating.requests import correction_wanted
from feedback.selectors import decision_get
from feedback.services import (
    FeedbackConflict,
    FeedbackRefused,
    WriteResult,
    rating_submit,
    rating_withdraw,
)

STARS = ("1", "2", "3", "4", "5")


def tags_sent(sent: Any) -> list[str]:
    """Tags of a form: the ticked ones and the comma-separated ones."""
    ticked = sent.getlist("tag") if isinstance(sent, QueryDict) else []
    written = str(sent.get("other_tags", "")).split(",")
    return [*ticked, *(tag.strip() for tag in written if tag.strip())]


class SentForm(forms.Form):
    def fault(self) -> str:
        """Every error of the form on one line."""
        return "; ".join(f"{name}: {' '.join(map(str, faults))}" for name, faults in self.errors.items())


class ComparisonForm(SentForm):
    """A button pressed on the page of pairs.

    The page sets `id`, so that a double click or a resend is stored once.
    """

    id = forms.UUIDField()
    preference = forms.ChoiceField(choices=Preference.choices)
    notes = forms.CharField(required=False)

    def facts(self) -> dict[str, Any]:
        """Keyword arguments of `comparison_submit` besides the decisions and the rater. Valid forms only."""
        return {name: self.cleaned_data[name] for name in ("id", "preference", "notes")}


class RatingForm(SentForm):
    """A button (`verdict`) pressed on the rating page, with its inputs.

    The page sets `id`, so that a double click or a resend is stored once. Inputs are `tag` (repeated), `other_tags`
    (comma separated), `correction` (a text or a listed response) and `notes`. The button `pick` is a correction.
    """

    id = forms.UUIDField()
    decision = forms.UUIDField()
    verdict = forms.ChoiceField(choices=[(v, v) for v in ("up", "down", *STARS, "correct", "save")])
    other_tags = forms.CharField(required=False, max_length=2000)
    correction = forms.CharField(required=False, strip=False)
    notes = forms.CharField(required=False)

    def facts(self, decision: Decision) -> dict[str, object]:
        """Keyword arguments of `rating_submit` besides the rater. Valid forms only."""
        verdict = self.cleaned_data["verdict"]
        correction = self.cleaned_data["correction"].replace("\r\n", "\n")
        changed = bool(correction.strip()) and correction != decision.response.replace("\r\n", "\n")
        return {
            "id": self.cleaned_data["id"],
            "decision": decision,
            "thumb": verdict if verdict in Thumb.values else "",
            "stars": int(verdict) if verdict in STARS else None,
            "correction": correction if changed else None,
            "tags": tags_sent(self.data),
            "notes": self.cleaned_data["notes"],
        }


def form_values(last: Rating | None) -> dict[str, Any]:
    """Form values of a rater's newest rating; of a withdrawn one they are the earlier rating's, without verdict."""
    withdrawn = last is not None and last.withdrawn
    if last is not None and last.withdrawn:
        last = last.supersedes
    if last is None:
        return {"tags": [], "correction": "", "verdict": "", "notes": ""}
    return {
        "notes": last.notes,
        "tags": list(last.tags),
        "correction": last.correction or "",
        "verdict": "" if withdrawn else str(last.stars or last.thumb),
    }


def rating_give(rater: str, decision: Decision, verdict: str, facts: dict[str, Any]) -> WriteResult[Rating]:
    """Store a rating and release the lease.

    Args:
        verdict: The button of the rating page.
        facts: Keyword arguments of `rating_submit` besides the rater.

    Raises FeedbackRefused, or FeedbackConflict if the page was sent before with another button.
    """
    if verdict == "correct" and facts["correction"] is None:
        raise FeedbackRefused("The correction equals the response: change the text, then save it")
    written = rating_submit(rater=rater, **facts)
    lease_release(rater, decision.pk)
    return written


def rating_undo(rater: str, ids: Sequence[str]) -> tuple[Rating | None, list[str]]:
    """Withdraw the last of these ratings that still stands, and lease its decision to the rater again.

    Returns (rating, ids before it), or (None, []) if none of them stands and is this rater's.
    """
    rows = Rating.objects.filter(rater=rater).select_related("decision")
    rating, earlier = last_withdrawn(rows, rating_withdraw, ids)
    if rating is not None:
        lease_take(rater, rating.decision_id)
    return rating, earlier


W = TypeVar("W", Rating, Comparison)


def last_withdrawn(
    rows: QuerySet[W], withdraw: Callable[[W], WriteResult[W]], ids: Sequence[str]
) -> tuple[W | None, list[str]]:
    """Withdraw the last of these rows that still stands; returns it and the ids before it, or (None, [])."""
    earlier = list(ids)
    while earlier:
        row = rows.filter(pk=earlier.pop()).first()
        if row is None:
            continue
        try:
            withdraw(row)
        except FeedbackConflict:
            continue  # Replaced or withdrawn in another window: undo the one before.
        return row, earlier
    return None, []


UNDO_LIMIT = 10
"""Ratings of a session that can be undone, newest first."""
SKIP_LIMIT = 500
"""Skipped decisions that a session remembers; beyond it the oldest is shown again."""


@dataclass(frozen=True)
class SessionIds:
    """Ids stored in the session, newest last; beyond `limit` the oldest are dropped."""

    key: str
    limit: int

    def read(self, request: HttpRequest) -> list[str]:
        ids: list[str] = request.session.get(self.key, [])
        return ids

    def write(self, request: HttpRequest, ids: Sequence[str]) -> None:
        request.session[self.key] = list(ids)

    def append(self, request: HttpRequest, added: str) -> None:
        ids = [pk for pk in self.read(request) if pk != added]
        self.write(request, [*ids, added][-self.limit :])


UNDO, SKIPPED = SessionIds("rate_undo", UNDO_LIMIT), SessionIds("rate_skipped", SKIP_LIMIT)


def queue_filter(request: HttpRequest) -> DecisionFilter:
    """Read the queue's filter. Only users who may read decisions filter by policy: raters are blind to it."""
    try:
        within = narrowed_of(request.GET)
    except FeedbackRefused as refusal:
        raise Http404(str(refusal)) from refusal
    if within.policy and not request.user.has_perm(SCOPE_PERMISSIONS["read"]):
        raise PermissionDenied("only operators may filter by policy: raters do not see which policy answered")
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
    """True if the page's script asks for the card alone."""
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
    """The rating page, or only its card for the script.

    said: what was done. fault: what went wrong. kept: form values to fill in.
    """
    context = _card_context(request, decision, within, said=said, fault=fault, kept=kept)
    return card_response(request, ("feedback/_card.html", "feedback/rate.html"), context, status)


def card_response(
    request: HttpRequest, templates: tuple[str, str], context: dict[str, object], status: int
) -> HttpResponse:
    """The card alone for the page's script (first template), or the page (second)."""
    alone = wants_card(request)
    response = render(request, templates[0 if alone else 1], context, status=status)
    if alone:
        response["X-Ratchet-Card"] = "1"
    return response


def card_in_place(request: HttpRequest, agent: str) -> dict[str, object]:
    """Context of `feedback/_card.html` on another page: the agent's next decision in this rater's queue, or {}.

    Without JavaScript, the card's forms redirect to that page (`back`).
    """
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
) -> dict[str, object]:
    rater = request.user.get_username()
    context: dict[str, object] = {
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
            "rating_id": uuid.uuid4(),
            "kept": kept,
            "tags": [(tag, tag in kept["tags"]) for tag in suggested],
            "other_tags": ", ".join(tag for tag in kept["tags"] if tag not in suggested),
            "correction_wanted": correction_wanted(decision),
            "back": request.POST.get("back", ""),
        }
    return context


def _next_response(request: HttpRequest, within: DecisionFilter, *, said: str = "") -> HttpResponse:
    """The next decision: its card for the script, a redirect for a plain form so that a reload is safe."""
    if not wants_card(request):
        return to_page(request, "rate", within, said=said)
    # The script preloaded the next card and shows it already.
    ahead = request.headers.get("X-Ratchet-Shown")
    decision = decision_take(
        request.user.get_username(),
        within,
        SKIPPED.read(request),
        ahead=_decision_or_404(ahead) if ahead else None,
    )
    return _card(request, decision, within, said=_notice(said))


def to_page(request: HttpRequest, address: str, within: DecisionFilter, **query: str) -> HttpResponseRedirect:
    """Redirect to a page of cards with its filter, or to the page that the form names."""
    if request.POST.get("back"):
        return redirect_back(request, address)
    words = urlencode({**within.parts, **{name: value for name, value in query.items() if value}})
    return redirect(f"{reverse(address)}?{words}" if words else reverse(address))


SAVED_NOTICES = {
    "up": "Saved: good",
    "down": "Saved: bad",
    "correct": "Saved your correction",
    "save": "Saved",
    "accept-up": "Accepted: good",
    "accept-down": "Accepted: bad",
}
NOTICES = {"undone": "Undone", "skipped": "Skipped", "nothing": "There is nothing to undo"}


@page_for("rate", "GET", "HEAD", "POST")
@never_cache
def rate(request: HttpRequest) -> HttpResponse:
    """GET shows a decision; POST stores a rating and shows the next one.

    Filters: `?agent=&policy=&tag=&since=&until=`. `?decision=` shows this one. `?after=` (script) returns the card
    after that one, or 204.
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
        lease_take(rater, decision.pk)  # Shown even if others hold its leases.
    else:
        decision = decision_take(rater, filters, skipped)
    return _card(request, decision, filters, said=_notice(notice_key))


def _notice(done: str) -> str:
    stars = f"Saved: {done} of 5 stars" if done in STARS else ""
    return NOTICES.get(done) or SAVED_NOTICES.get(done) or stars


def _rate_store(request: HttpRequest, within: DecisionFilter) -> HttpResponse:
    decision = _decision_or_404(request.POST.get("decision", ""))
    sent = request.POST.copy()
    if "pick" in sent:
        sent["verdict"], sent["correction"] = "correct", str(request.POST["pick"])
    form = RatingForm(sent)
    values = {
        "notes": sent.get("notes", ""),
        "tags": tags_sent(sent),
        "correction": sent.get("correction", ""),
        "verdict": "",
    }
    if not form.is_valid():
        return _card(request, decision, within, fault=form.fault(), kept=values, status=400)
    verdict = form.cleaned_data["verdict"]
    try:
        written = rating_give(request.user.get_username(), decision, verdict, form.facts(decision))
    except FeedbackConflict:
        fault = "You rated this already. Rate it again here to replace your rating"
        return _card(request, decision, within, fault=fault, status=409)
    except FeedbackRefused as refusal:
        return _card(request, decision, within, fault=str(refusal), kept=values, status=400)
    if written.created:
        UNDO.append(request, str(written.row.pk))
    return _next_response(request, within, said=verdict)


@page_for("rate", "POST")
def rate_undo(request: HttpRequest) -> HttpResponse:
    """Withdraw this session's last rating and show its decision again."""
    within = queue_filter(request)
    rating, earlier = rating_undo(request.user.get_username(), UNDO.read(request))
    UNDO.write(request, earlier)
    if rating is None:
        return _next_response(request, within, said="nothing")
    if wants_card(request):
        return _card(request, rating.decision, within, said=NOTICES["undone"])
    return to_page(request, "rate", within, decision=str(rating.decision_id), said="undone")


@page_for("rate", "POST")
def rate_skip(request: HttpRequest) -> HttpResponse:
    """Skip a decision for this session; `all=1` brings back every skipped one."""
    within = queue_filter(request)
    if request.POST.get("all"):
        SKIPPED.write(request, [])
        return _next_response(request, within)
    decision = _decision_or_404(request.POST.get("decision", ""))
    SKIPPED.append(request, str(decision.pk))
    lease_release(request.user.get_username(), decision.pk)
    return _next_response(request, within, said="skipped")
