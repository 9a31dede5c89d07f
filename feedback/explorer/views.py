"""Pages of the explorer: decisions found, and everything known of one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.explorer.decision_facts import Reward, decision_facts
from feedback.explorer.decision_search import DecisionSearch, search_read
from feedback.explorer.listing import LOOK, RATING_FILTERS, decisions_page, history_of, place_of
from feedback.explorer.page_context import filter_context, preview_context
from feedback.explorer.previews import answer_line, glimpse_of, text_blocks
from feedback.explorer.search import narrowed_of
from feedback.explorer.timeline import timeline_of
from feedback.models import Decision, Rating
from feedback.storage.bodies import says_nothing
from feedback.storage.facts import DECISION, RATING
from feedback.storage.validation import FeedbackRefused

RATING_PAGE_FIELDS = ("rater", "rater_kind", "thumb", "stars", "score", "correction", "tags", "notes")
"""Fields of a rating that have places of their own on a decision's page."""
DECISION_PAGE_FIELDS = (
    "agent", "messages", "response", "reasoning", "state", "candidates", "policy", "unit", "arm", "propensity",
    "run_id", "latency_ms", "tokens_in", "tokens_out", "tags", "metadata", "source",
)  # fmt: skip
"""Fields of a decision that have places of their own there."""


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def decisions(request: HttpRequest) -> HttpResponse:
    """Decisions, newest first: `?q=&agent=&policy=&rated=&min_reward=&tag=&since=&until=`; `before=` where another page
    ended."""
    fault, page, position = "", None, None
    try:
        search = search_read(request.GET)
        position = place_of(request.GET.get("before", ""))
    except FeedbackRefused as refusal:
        fault = "; ".join(f"{name}: {reason}" for name, reason in refusal.fields.items()) or str(refusal)
        search = DecisionSearch(narrowed_of({}))
    else:
        page = decisions_page(
            search.filter,
            q=search.q,
            rated=search.rating_state,
            min_reward=search.min_reward,
            before=position,
        )
    query = search.parts
    context = {
        **filter_context(request, search.filter, search.beside),
        "within": search.filter,
        "q": search.q,
        "rated": search.rating_state,
        "min_reward": search.beside.get("min_reward", ""),
        "kinds": [(name, words) for name, (words, _) in RATING_FILTERS.items()],
        "asked": query,
        "may_withdraw": request.user.has_perm(SCOPE_PERMISSIONS["operate"]),
        "fault": fault,
        "found": page,
        "rows": [_row(row) for row in page.decisions] if page else [],
        "look": f"{LOOK:,}",
        "first_page": position is None,
        "newest": urlencode(query),
        "older": urlencode({**query, "before": str(page.older)}) if page and page.older else "",
    }
    return render(request, "feedback/decisions.html", context, status=400 if fault else 200)


def _row(decision: Decision) -> dict[str, Any]:
    question, answered = glimpse_of(decision)
    ratings: list[Rating] = decision.standing  # type: ignore[attr-defined]
    return {
        "decision": decision,
        "asked": question,
        "answered": answered,
        "verdicts": [verdict_display(rating) for rating in ratings[:5]],
        "more": max(0, len(ratings) - 5),
    }


def verdict_display(rating: Rating) -> dict[str, Any]:
    """Verdict of a rating: its tone (good, bad, middling), a mark and words."""
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


def _further_values(rating: Rating) -> list[tuple[str, Any]]:
    """Labels and values of the fields that have no place of their own on the page."""
    return [
        (field.page_input.label if field.page_input else field.name, value)
        for field in RATING
        if field.name not in RATING_PAGE_FIELDS
        and not says_nothing(field, value := getattr(rating, field.name))
    ]


@login_required
@permission_required(SCOPE_PERMISSIONS["read"], raise_exception=True)
@require_safe
def decision(request: HttpRequest, pk: uuid.UUID) -> HttpResponse:
    """One decision with everything known of it; `?part=` of a long trace."""
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


def _candidates(row: Decision) -> list[dict[str, Any]]:
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
    facts: list[tuple[str, Any]] = [
        ("arm", row.arm),
        ("propensity", "" if row.propensity is None else f"{row.propensity:.3g}"),
        ("unit", row.unit),
        ("run", row.run_id),
        ("took", "" if row.latency_ms is None else f"{row.latency_ms:,.0f} ms"),
        ("tokens in", "" if row.tokens_in is None else f"{row.tokens_in:,}"),
        ("tokens out", "" if row.tokens_out is None else f"{row.tokens_out:,}"),
        ("cost", f"${cost:.6f}" if isinstance(cost, (int, float)) else ""),
        ("provider's model", (serving.get("upstream") or {}).get("model", "")),
        ("source", row.source),
        ("ratings by people", f"{row.ratings_human} of {row.ratings_wanted} wanted"),
        *(
            (field.name, value)
            for field in DECISION
            if field.name not in DECISION_PAGE_FIELDS
            and not says_nothing(field, value := getattr(row, field.name))
        ),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _reward(reward: Reward | None) -> dict[str, Any] | None:
    """Drawn on a scale from -2 to 2: bars from the middle, in hundredths of the width."""
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
