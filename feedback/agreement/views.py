"""Page of agreement among raters."""

from __future__ import annotations

import re

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render

from feedback.accounts.roles import page_for
from feedback.agreement.report import (
    ENOUGH,
    LOW_ALPHA,
    PairAgreement,
    QuestionAgreement,
    RaterAgreement,
    agreement_report,
)
from feedback.agreement.statistics import AgreementEstimate
from feedback.models import SLUG_PATTERN, RaterKind
from feedback.selectors import agent_slugs

PAIRS_SHOWN = 30


@page_for("read")
def agreement(request: HttpRequest) -> HttpResponse:
    """Agreement of an agent's raters: `?agent=` (default: the first) and `?rater_kind=human|simulated`."""
    agents = agent_slugs()
    agent = request.GET.get("agent") or (agents[0] if agents else "")
    kind = request.GET.get("rater_kind") or None
    if (agent and not re.fullmatch(SLUG_PATTERN, agent)) or kind not in (None, *RaterKind.values):
        raise Http404("no such agent or kind of rater")
    report = agreement_report(agent, kind) if agent else None
    questions = [_question(question) for question in report.questions] if report else []
    context = {
        "agents": agents,
        "agent": agent,
        "kind": kind,
        "report": report,
        "questions": questions,
        "single": [one for one, of in zip(questions, report.questions, strict=True) if not of.overlapping]
        if report
        else [],
        "low_alpha": LOW_ALPHA,
        "enough": ENOUGH,
    }
    return render(request, "feedback/agreement.html", context)


def _question(found: QuestionAgreement) -> dict[str, object]:
    return {
        "found": found,
        "ratings": f"{found.ratings:,}",
        "decisions": f"{found.decisions:,}",
        "overlapping": f"{found.overlapping:,}",
        "alpha": _coefficient(found.alpha.value),
        "between": _interval_text(found.alpha),
        "range": _range(found.alpha),
        "raters": [_rater(rater) for rater in found.raters],
        "pairs": [_pair(pair) for pair in found.pairs[:PAIRS_SHOWN]],
        "pairs_more": len(found.pairs[PAIRS_SHOWN:]) + found.pairs_left_out,
        "low": [rater.rater for rater in found.raters if rater.low],
        "all_low": all(rater.low or rater.alpha is None for rater in found.raters)
        and any(rater.low for rater in found.raters),
    }


def _rater(rater: RaterAgreement) -> dict[str, object]:
    return {
        "name": rater.rater,
        "ratings": f"{rater.ratings:,}",
        "shared": f"{rater.shared:,}",
        "agreement": _percent(rater.agreement),
        "alpha": _coefficient(rater.alpha),
        "bar": _bar(rater.alpha),
        "low": rater.low,
        "few": rater.shared < ENOUGH,
    }


def _pair(pair: PairAgreement) -> dict[str, object]:
    return {
        "first": pair.first,
        "second": pair.second,
        "shared": f"{pair.shared:,}",
        "agreement": _percent(pair.agreement),
        "kappa": _coefficient(pair.kappa.value),
        "between": _interval_text(pair.kappa),
        "bar": _bar(pair.kappa.value),
    }


def _coefficient(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}".replace("-", "−")


def _interval_text(estimate: AgreementEstimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{_coefficient(estimate.low)} to {_coefficient(estimate.high)}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def _bar(value: float | None) -> float | None:
    """Length in percent; 0 for negative values."""
    return None if value is None else round(max(value, 0.0) * 100, 1)


def _range(estimate: AgreementEstimate) -> dict[str, float] | None:
    """Position and interval on a scale of 0 to 100; negative values are drawn at 0."""
    if estimate.value is None:
        return None
    low = estimate.value if estimate.low is None else estimate.low
    high = estimate.value if estimate.high is None else estimate.high
    left, right, dot = (round(max(value, 0.0) * 100, 1) for value in (low, high, estimate.value))
    return {"left": left, "width": round(right - left, 1), "dot": dot}
