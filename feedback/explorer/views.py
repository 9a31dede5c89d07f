"""Pages: decisions, one decision, withdrawing and restoring decisions, and the rows that bulk readers skipped."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from datetime import timedelta
from urllib.parse import urlencode

from django.contrib import messages
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme

from backend.rest.errors import RequestRefused
from backend.rest.pages import LOOK
from feedback.accounts.roles import SCOPE_PERMISSIONS, page_for
from feedback.erasure.withdrawals import (
    WithdrawalUnknown,
    decision_restore,
    decision_withdraw,
    decisions_withdraw,
    trained_text,
)
from feedback.explorer.decision_facts import Reward, decision_facts
from feedback.explorer.listing import (
    MATCHING,
    RATING_FILTERS,
    DecisionSearch,
    count_text,
    decisions_page,
    history_of,
    search_read,
    selection_chosen,
    timeline_of,
)
from feedback.explorer.previews import answer_line, glimpse_of, preview_context, text_blocks
from feedback.explorer.search import DecisionFilter, filter_context
from feedback.models import Decision, ProblemRow, Rating
from feedback.storage.facts import DECISION, RATING
from feedback.storage.problem_rows import READERS, problems
from feedback.storage.validation import FeedbackRefused

RATING_PAGE_FIELDS = ("rater", "rater_kind", "thumb", "stars", "score", "correction", "tags", "notes")
"""Rating fields that the decision page lays out itself; it lists the others."""
DECISION_PAGE_FIELDS = {
    "agent",
    "messages",
    "response",
    "reasoning",
    "state",
    "candidates",
    "policy",
    "unit",
    "arm",
}
DECISION_PAGE_FIELDS |= {
    "propensity",
    "run_id",
    "latency_ms",
    "tokens_in",
    "tokens_out",
    "tags",
    "metadata",
    "source",
}
"""Decision fields that the decision page lays out itself; it lists the others."""


@page_for("read")
def decisions(request: HttpRequest) -> HttpResponse:
    """Decisions, newest first: `?q=&agent=&policy=&rated=&min_reward=&tag=&since=&until=`, from cursor `before=`."""
    fault, page, cursor = "", None, request.GET.get("before", "")
    try:
        search = search_read(request.GET)
        page = decisions_page(search, cursor)
    except (FeedbackRefused, RequestRefused) as refusal:
        fault = "; ".join(f"{name}: {reason}" for name, reason in refusal.fields.items()) or str(refusal)
        search = DecisionSearch(DecisionFilter())
    query = search.parts
    context = {
        **filter_context(request, search.filter, search.beyond_filter),
        "within": search.filter,
        "q": search.q,
        "rated": search.rated,
        "min_reward": search.beyond_filter.get("min_reward", ""),
        "kinds": [(name, words) for name, (words, _) in RATING_FILTERS.items()],
        "asked": query,
        "count": count_text(search, page, first=not cursor) if page else "",
        "narrowed": [_narrowed(name, value) for name, value in query.items() if name != "agent"],
        "quick": [(words, urlencode({**query, **more})) for words, more in _quick().items()],
        "may_withdraw": request.user.has_perm(SCOPE_PERMISSIONS["operate"]),
        "fault": fault,
        "found": page,
        "rows": [_row(row) for row in page.decisions] if page else [],
        "look": f"{LOOK:,}",
        "first_page": not cursor,
        "newest": urlencode(query),
        "older": urlencode({**query, "before": page.older}) if page and page.older else "",
    }
    return render(request, "feedback/decisions.html", context, status=400 if fault else 200)


def _narrowed(name: str, value: str) -> str:
    """One condition of a search in words."""
    if name == "rated":
        return RATING_FILTERS[value][0]
    return f"{name.replace('_', ' ')} {value}" if name in ("since", "until", "min_reward", "batch") else value


def _quick() -> dict[str, dict[str, str]]:
    """Searches of one click."""
    week = f"{timezone.localdate() - timedelta(days=7):%Y-%m-%d}"
    return {
        "disliked by people": {"rated": "disliked"},
        "not rated": {"rated": "unrated"},
        "raters differ": {"rated": "disputed"},
        "last week": {"since": week},
    }


def _row(decision: Decision) -> dict[str, object]:
    question, answered = glimpse_of(decision)
    ratings: list[Rating] = decision.standing  # type: ignore[attr-defined]
    return {
        "decision": decision,
        "asked": question,
        "answered": answered,
        "verdicts": [verdict_display(rating) for rating in ratings[:5]],
        "more": max(0, len(ratings) - 5),
    }


def verdict_display(rating: Rating) -> dict[str, object]:
    """A rating's verdict for a template: `tone` (good, bad, middling, off), short `text` and `words`."""
    if rating.withdrawn:
        return {"tone": "off", "text": "taken back", "words": "taken back"}
    if rating.score is not None:
        share, text, words = rating.score, f"{rating.score:.2f}", f"{rating.score:.2f} of 1"
    elif rating.stars is not None:
        share, text, words = (rating.stars - 1) / 4, f"{rating.stars}★", f"{rating.stars} of 5 stars"
    elif rating.thumb:
        share, text = float(rating.thumb == "up"), "good" if rating.thumb == "up" else "bad"
        words = text
    elif rating.correction is not None:
        return {"tone": "off", "text": "corrected", "words": "corrected"}
    else:
        return {"tone": "off", "text": "noted", "words": "tags or notes"}
    tone = "good" if share > 0.5 else "bad" if share < 0.5 else "middling"
    return {"tone": tone, "text": text, "words": words, "simulated": rating.rater_kind == "simulated"}


def _further_values(rating: Rating) -> list[tuple[str, object]]:
    """Labels and values of the fields that the page does not lay out."""
    return [
        (field.name, value)
        for field in RATING
        if field.name not in RATING_PAGE_FIELDS
        and not field.says_nothing(value := getattr(rating, field.name))
    ]


@page_for("read")
def decision(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """One decision: answer, trace (`?part=` of a long one), feedback, reward and provenance."""
    row = Decision.objects.select_related("trace", "withdrawal").filter(pk=pk).first()
    if row is None:
        raise Http404(f"no decision {pk}")
    part = request.GET.get("part", "")
    facts = decision_facts(row.pk, row.policy)
    history = history_of(row)
    context = {
        **preview_context(row),
        "glimpse": glimpse_of(row),
        "candidates": _candidates(row),
        "timeline": timeline_of(row.trace, row.pk, int(part) if part.isdecimal() else None)
        if row.trace
        else None,
        "ratings": [
            (
                rating,
                stands,
                {**verdict_display(rating), "more": _further_values(rating)},
                text_blocks(rating.correction or ""),
            )
            for rating, stands in history.ratings
        ],
        "history": history,
        "siblings": [(other, glimpse_of(other)[1]) for other in history.siblings],
        "reward": _reward(facts.get("reward")),
        "policy_url": facts.get("policy_url", ""),
        "links": [link for link in facts.get("links", ()) if request.user.has_perm(link["permission"])],
        "made_by": _provenance(row),
        "state_text": json.dumps(row.state, ensure_ascii=False, indent=2),
        "metadata": sorted(row.metadata.items()) if isinstance(row.metadata, Mapping) else [],
    }
    return render(request, "feedback/decision.html", context)


def _candidates(row: Decision) -> list[dict[str, object]]:
    rows = []
    for candidate in row.candidates or []:
        text = candidate if isinstance(candidate, str) else str(candidate.get("response", ""))
        score = None if isinstance(candidate, str) else candidate.get("score")
        rows.append(
            {
                "text": answer_line(text),
                "score": score,
                "bar": None if score is None else round(100 * float(score), 1),
                "chosen": text == row.response,
            }
        )
    return rows


def _provenance(row: Decision) -> list[tuple[str, str]]:
    serving = row.metadata.get("serving", {}) if isinstance(row.metadata, Mapping) else {}
    cost = serving.get("cost_usd")
    facts: list[tuple[str, object]] = [
        ("arm", row.arm),
        ("propensity", "" if row.propensity is None else f"{row.propensity:.3g}"),
        ("unit", row.unit),
        ("run", row.run_id),
        ("took", "" if row.latency_ms is None else f"{row.latency_ms:,.0f} ms"),
        ("tokens in", "" if row.tokens_in is None else f"{row.tokens_in:,}"),
        ("tokens out", "" if row.tokens_out is None else f"{row.tokens_out:,}"),
        ("cost", f"${cost:.6f}" if isinstance(cost, (int, float)) and cost else ""),
        ("provider's model", (serving.get("upstream") or {}).get("model", "")),
        ("source", row.source),
        ("ratings by people", f"{row.ratings_human} of {row.ratings_wanted} wanted"),
        *(
            (field.name, value)
            for field in DECISION
            if field.name not in DECISION_PAGE_FIELDS
            and not field.says_nothing(value := getattr(row, field.name))
        ),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _reward(reward: Reward | None) -> dict[str, object] | None:
    """A reward for the template; bars start at the middle of a scale from -2 to 2, in percent of its width."""
    if reward is None:
        return None
    return {
        "value": f"{reward['value']:.3f}",
        "raw": f"{reward['raw']:+.2f}",
        "calculated_at": reward.get("calculated_at"),
        "components": [
            {
                "name": part["name"],
                "raw": None if (raw := part["raw"]) is None else f"{raw:+.2f}",
                "weight": f"{part['weight']:g}",
                "left": 0 if raw is None else round(50 + min(raw, 0.0) * 25, 1),
                "width": 0 if raw is None else round(abs(raw) * 25, 1),
                "tone": "bad" if raw is not None and raw < 0 else "good",
                "detail": [(str(key), str(value)) for key, value in part["detail"].items()],
            }
            for part in reward["components"]
        ],
    }


PROBLEMS_PAGE = 50
"""Problems on one page."""


@page_for("read")
def problem_rows(request: HttpRequest) -> HttpResponse:
    """Decisions that a bulk reader skipped, newest first: `?agent=&reader=&page=`."""
    agent, reader = request.GET.get("agent", ""), request.GET.get("reader", "")
    is_known = reader in ("", *READERS)
    found = problems(agent, reader) if is_known else problems().none()
    page = Paginator(found, PROBLEMS_PAGE).get_page(request.GET.get("page"))
    agents = ProblemRow.objects.order_by("agent").values_list("agent", flat=True).distinct()
    query = {name: value for name, value in (("agent", agent), ("reader", reader)) if value}
    context: Mapping[str, object] = {
        "page": page,
        "agent": agent,
        "reader": reader,
        "agents": list(agents),
        "readers": READERS.items(),
        "rows": [(row, READERS.get(row.reader, row.reader)) for row in page],
        "query": urlencode(query),
        "here": request.get_full_path(),
        "fault": "" if is_known else f"reader: expected one of {', '.join(READERS)}",
        "any": bool(query) or bool(page.paginator.count),
    }
    return render(request, "feedback/problems.html", context, status=200 if is_known else 400)


@page_for("operate", "POST")
def decision_take_out(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """Withdraw one decision, then redirect to `next=`."""
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


@page_for("operate", "POST")
def decision_put_back(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
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


@page_for("operate", "POST")
def decisions_take_out(request: HttpRequest) -> HttpResponse:
    """Withdraw the ticked decisions (`id`, repeated) or all that a search finds (`which=found` and its fields).

    Asks for confirmation first, and again if the number found is no longer the `count` that was confirmed.
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
        messages.warning(request, "Nothing to withdraw: every chosen decision is withdrawn already.")
        return redirect(_list(search))
    if form.get("confirm") != "on" or form.get("count") != str(tried.decisions):
        context: Mapping[str, object] = {
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
    return reverse("decisions") + (f"?{urlencode(search)}" if search else "")
