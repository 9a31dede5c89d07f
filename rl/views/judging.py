"""Pages of judging rounds: blind pairs for raters, and the round's result for operators."""

from __future__ import annotations

import copy
from urllib.parse import urlencode

from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse

from backend.http import button, page
from feedback.explorer.previews import preview_context
from feedback.models import Decision
from feedback.rating.views import NOTICES, SKIP_LIMIT, SessionIds, wants_card
from rl.evaluation.judging import round_create, round_dispatch
from rl.gates.headlines import share_of
from rl.models import JudgingRound, Policy
from rl.registry.judge_reports import round_judge_report
from rl.registry.judging import (
    JudgingRefused,
    ShownPair,
    judgement_submit,
    judgement_undo,
    pair_get,
    pair_next,
    pair_shown,
    pairs_judged,
    round_get,
    round_standing,
    round_stop,
)
from rl.registry.service import RegistryRefused

READ, MOVE = "rl.view_policy", "rl.change_policy"
SKIPPED = SessionIds("judging_skipped", SKIP_LIMIT)
SAVED = {"left": "Saved: A is better", "right": "Saved: B is better", "tie": "Saved: equally good"}
EXAMPLES = 12
"""Pairs that the page of an ended round shows."""
EARLY = 10
"""Decided prompts below which a page does not foretell that a round brings no verdict."""


def rounds_waiting(rater: str, agent: str) -> list[tuple[int, str, int | None]]:
    """Open rounds with a pair for this rater: number, agent, and about how many answers they need."""
    rows = JudgingRound.objects.filter(
        status__in=(JudgingRound.Status.ANSWERING, JudgingRound.Status.RUNNING)
    ).exclude(policy__stage=Policy.Stage.REJECTED)
    rows = rows.filter(agent=agent) if agent else rows
    return [(row.pk, row.agent, round_standing(row).further) for row in rows if pair_next(row, rater)]


def round_pairs(request: HttpRequest) -> HttpResponse:
    """FEEDBACK_JUDGING: `/rate/pairs/?round=`, one blind pair at a time. GET shows it, POST stores what is said of it.

    A POST has `pair` and `preference`, or `turn`: `skip`, `undo`, or `all`, which brings the skipped ones back.
    """
    judging = _round_or_404(request.GET["round"])
    rater = request.user.get_username()
    if request.method == "POST":
        return _take(request, judging, rater)
    if after := request.GET.get("after"):
        following = pair_next(judging, rater, [*SKIPPED.read(request), after])
        return _card(request, judging, following) if following else HttpResponse(status=204)
    shown = None
    if named := request.GET.get("pair"):
        shown = _pair_or_404(judging, named, rater)
    return _card(request, judging, shown, said=_notice(request.GET.get("said", "")))


def _take(request: HttpRequest, judging: JudgingRound, rater: str) -> HttpResponse:
    turn = request.POST.get("turn", "")
    if turn == "all":
        SKIPPED.write(request, [])
        return _next(request, judging, "")
    if turn == "undo":
        pair = judgement_undo(judging, rater)
        shown = pair_shown(pair, rater) if pair is not None else None
        said = "undone" if shown else "nothing"
        if wants_card(request):
            return _card(request, judging, shown, said=_notice(said))
        return _to_page(judging, said=said, pair=str(shown.pair.pk) if shown else "")
    shown = _pair_or_404(judging, request.POST.get("pair", ""), rater)
    if turn == "skip":
        SKIPPED.append(request, str(shown.pair.pk))
        return _next(request, judging, "skipped")
    preference = request.POST.get("preference", "")
    try:
        judgement_submit(shown.pair, rater, preference)
    except JudgingRefused as refusal:
        judging.refresh_from_db()
        if not judging.is_open:
            return _card(request, judging, said=str(refusal).capitalize())
        return _card(request, judging, shown, fault=str(refusal).capitalize(), status=400)
    return _next(request, judging, preference)


def _notice(said: str) -> str:
    return {**NOTICES, **SAVED, "both_bad": "Saved: both bad"}.get(said, "")


def _next(request: HttpRequest, judging: JudgingRound, said: str) -> HttpResponse:
    if not wants_card(request):
        return _to_page(judging, said=said)
    judging.refresh_from_db()
    shown = None
    if judging.is_open and (ahead := request.headers.get("X-Ratchet-Shown")):
        # our script had the next pair already and shows it
        shown = _pair_or_404(judging, ahead, request.user.get_username())
    return _card(request, judging, shown, said=_notice(said))


def _to_page(judging: JudgingRound, **query: str) -> HttpResponse:
    words = urlencode({"round": judging.pk, **{name: value for name, value in query.items() if value}})
    return redirect(f"{reverse('pairs')}?{words}")


def _card(
    request: HttpRequest,
    judging: JudgingRound,
    shown: ShownPair | None = None,
    *,
    said: str = "",
    fault: str = "",
    status: int = 200,
) -> HttpResponse:
    rater = request.user.get_username()
    shown = shown or pair_next(judging, rater, SKIPPED.read(request))
    here = f"{reverse('pairs')}?round={judging.pk}"
    standing = round_standing(judging)
    given = standing.counts.judgements
    context: dict[str, object] = {
        "round": judging,
        "standing": standing,
        "given": given,
        "total": max(1, given + (standing.further or standing.counts.waiting * judging.raters)),
        "action": here,
        "skipped": shown is None and judging.is_open and pair_next(judging, rater) is not None,
        "undo": judging.is_open and judging.pairs.filter(judgements__rater=rater).exists(),
        "said": said,
        "fault": fault,
    }
    if shown is not None:
        decisions = [_answered(shown.decision, text) for text in (shown.left, shown.right)]
        sides = [preview_context(decision) for decision in decisions]
        context |= {
            "pair": {"left": decisions[0], "right": decisions[1]},
            "hidden": [("pair", shown.pair.pk)],
            "shown": str(shown.pair.pk),
            "next_card": f"{here}&after={shown.pair.pk}",
            "sides": [("A", "left", sides[0]), ("B", "right", sides[1])],
            "top": sides[0],
            "brief": all(side["preview"].brief for side in sides),
            "as_text": sides[0]["preview"].template.endswith("/text.html"),
        }
    alone = wants_card(request)
    response = render(
        request, "feedback/_pair.html" if alone else "feedback/pairs.html", context, status=status
    )
    if alone:
        response["X-Ratchet-Card"] = "1"
    return response


def _answered(decision: Decision, response: str) -> Decision:
    """The decision as if it had been answered so, to be shown and never saved; it names no policy."""
    found = copy.copy(decision)
    found.response, found.reasoning, found.policy = response, "", ""
    return found


def _round_or_404(text: str) -> JudgingRound:
    try:
        return round_get(int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0)
    except JudgingRefused as refusal:
        raise Http404(str(refusal)) from refusal


def _pair_or_404(judging: JudgingRound, pk: str, rater: str) -> ShownPair:
    found = pair_get(judging, pk, rater)
    if found is None:
        raise Http404("no such pair in this judging round")
    return found


@page(READ)
def judging_round(request: HttpRequest, pk: int) -> HttpResponse:
    """Where a round stands, and its pairs once it has ended."""
    judging = _round_or_404(str(pk))
    standing = round_standing(judging)
    ended = judging.status == JudgingRound.Status.ENDED
    share = standing.share
    figure = {"value": share.value, "low": share.low, "high": share.high, "n": share.decided}
    context = {
        "round": judging,
        "standing": standing,
        "words": standing.words(judging.policy.name, judging.opponent_name),
        "accuracy": share_of({"share": figure}, "share") if share.decided else None,
        "confidence": f"{100 * share.confidence:.3g} %",
        "hopeless": not ended and standing.further is None and share.decided >= EARLY,
        "pairs": judging.pairs.count(),
        "judge": round_judge_report(judging),
        "examples": pairs_judged(judging)[:EXAMPLES] if ended else [],
        "may_stop": request.user.has_perm(MOVE)
        and not ended
        and judging.status != JudgingRound.Status.FAILED,
        "working": judging.status in (JudgingRound.Status.WAITING, JudgingRound.Status.ANSWERING),
    }
    return render(request, "rl/judging_round.html", context)


@button(MOVE)
def judging_stop(request: HttpRequest, pk: int) -> HttpResponse:
    """End a round with the verdict it has now."""
    judging = _round_or_404(str(pk))
    try:
        round_stop(
            judging, actor=request.user.get_username(), reason=request.POST.get("reason", "").strip()[:500]
        )
    except JudgingRefused as refusal:
        messages.error(request, f"{refusal}.".capitalize())
    return redirect("judging-round", pk)


@button(MOVE)
def policy_judge(request: HttpRequest, name: str) -> HttpResponse:
    """Begin a judging round of a policy against the incumbent; a worker generates the answers."""
    policy = get_object_or_404(Policy, name=name)
    try:
        judging = round_create(policy, actor=request.user.get_username())
    except (JudgingRefused, RegistryRefused) as refusal:
        messages.error(request, f"{refusal}.")
        return redirect("policy", name)
    round_dispatch(judging)
    return redirect("judging-round", judging.pk)
