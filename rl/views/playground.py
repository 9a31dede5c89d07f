"""Playground of an agent: one question to several policies, their answers side by side, rated where they stand."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from urllib.parse import urlencode

from django.contrib import messages
from django.contrib.auth.decorators import login_required, permission_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods, require_POST

from feedback.accounts.roles import SCOPE_PERMISSIONS
from feedback.explorer.previews import preview_context
from feedback.models import Decision, Rating
from feedback.selectors import ratings_standing
from feedback.services import FeedbackRefused
from rl.agents.base import InvalidResponse
from rl.models import Policy
from rl.models.agent_definitions import agent_served
from rl.serving.base import ServingRefused
from rl.serving.playground import (
    MAX_POLICIES,
    PlaygroundAnswer,
    Question,
    answer_before,
    answer_rate,
    answers_recorded,
    examples_recent,
    playground_ask,
    policies_default,
    policies_offered,
    system_prompt_recorded,
    writes_text,
)
from rl.serving.routing import AgentUnknown, agent_check

CANDIDATES_SHOWN = 12


@login_required
@permission_required(SCOPE_PERMISSIONS["ingest"], raise_exception=True)
@require_http_methods(["GET", "HEAD", "POST"])
def playground(request: HttpRequest, slug: str) -> HttpResponse:
    """The form and the answers: of a POST, or of `?answers=` with ids of decisions that were asked for here.

    `?decision=` fills in the prompt of a recorded decision, `?policy=` picks whom to ask.
    """
    _agent_checked(slug)
    form = request.POST if request.method == "POST" else request.GET
    policy_names = form.getlist("policy")
    policy_choices = policies_offered(slug, policy_names)
    # a form sends lines ended by CR LF, which no recorded prompt has and no policy has learnt from
    text = form.get("question", "").replace("\r\n", "\n")
    question = Question(text, _lines(form.get("candidates", "")))
    fault, answers = "", []
    if request.method == "POST":
        try:
            answers = playground_ask(slug, question, policy_names, request.user.get_username())
        except ServingRefused as refusal:
            fault = str(refusal)
    elif ids := _ids(form.get("answers", "")):
        answers = [PlaygroundAnswer(row.policy, row.pk) for row in answers_recorded(slug, ids)]
        fault = (
            "" if len(answers) == len(ids) else f"{len(ids) - len(answers)} of these answers are not stored"
        )
    rows = answers_recorded(slug, [answer.decision for answer in answers if answer.decision])
    like = rows[:1] or answers_recorded(slug, _ids(form.get("decision", ""))[:1])
    before = answer_before(like[0]) if like else None
    system = system_prompt_recorded(slug)
    if like and not question.text:
        question = Question.of_decision(like[0], system, question.candidates)
    context = {
        "slug": slug,
        "title": agent_served(slug).title,
        "question": question.text,
        "system": system,
        "candidates": "\n".join(question.candidates),
        "offered": [
            (
                name,
                stage,
                name in (policy_names or [row.policy for row in rows] or policies_default(policy_choices)),
            )
            for name, stage in policy_choices
        ],
        "most": MAX_POLICIES,
        "fault": fault,
        "answers": _answers(answers, rows, request.user.get_username()),
        "before": before and {**preview_context(before), "title": _answered_by(before)},
        "asked": ",".join(str(row.pk) for row in rows),
        "examples": examples_recent(slug),
        "streams": writes_text(slug),
    }
    return render(
        request, "rl/playground.html", context, status=400 if fault and request.method == "POST" else 200
    )


@login_required
@permission_required(SCOPE_PERMISSIONS["rate"], raise_exception=True)
@permission_required(SCOPE_PERMISSIONS["ingest"], raise_exception=True)
@require_POST
def playground_rate(request: HttpRequest, slug: str) -> HttpResponse:
    """Rate one answer (`up`, `down`), or prefer it to all others of the question (`best`); back to the answers."""
    ids = _ids(request.POST.get("answers", ""))
    rows = {str(row.pk): row for row in answers_recorded(slug, ids)}
    row = rows.pop(request.POST.get("decision", ""), None)
    if row is None:
        raise Http404("expected one of the answers that are shown")
    rater, verdict = request.user.get_username(), request.POST.get("verdict", "")
    try:
        answer_rate(row, list(rows.values()), verdict, rater)
    except FeedbackRefused as refusal:
        messages.error(request, f"{refusal}: {'; '.join(refusal.fields.values())}".rstrip(": "))
    else:
        messages.success(request, _thanks(verdict, row))
    form = {
        "answers": ",".join(map(str, ids)),
        "candidates": request.POST.get("candidates", ""),
        "policy": request.POST.getlist("policy"),
    }
    query = urlencode({name: value for name, value in form.items() if value}, doseq=True)
    return redirect(f"{reverse('playground', args=[slug])}?{query}#answers")


def _answered_by(row: Decision) -> str:
    """Title of whoever gave a recorded answer."""
    policy = Policy.objects.filter(agent=row.agent, name=row.policy).first()
    return policy.title if policy else row.policy or "your app's model"


def _thanks(verdict: str, row: Decision) -> str:
    if verdict == "best":
        return f"Stored: the answer of {row.policy} is preferred to the others."
    return f"Stored: the answer of {row.policy} is {'good' if verdict == 'up' else 'bad'}."


def _agent_checked(slug: str) -> None:
    try:
        agent_check(slug)
    except AgentUnknown as error:
        raise Http404(str(error)) from error


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def _ids(text: str) -> list[uuid.UUID]:
    """At most MAX_POLICIES ids of decisions. Raises Http404 for what is none."""
    try:
        return [uuid.UUID(part) for part in text.split(",") if part][:MAX_POLICIES]
    except ValueError as error:
        raise Http404("expected ids of decisions, with commas") from error


def _answers(
    answers: Sequence[PlaygroundAnswer], rows: Sequence[Decision], rater: str
) -> list[dict[str, object]]:
    """Each answer as the page draws it: its preview, its candidates, the rater's own rating of it."""
    by_id = {row.pk: row for row in rows}
    mine = {
        rating.decision_id: rating
        for rating in ratings_standing().filter(decision_id__in=list(by_id), rater=rater)
    }
    rendered_answers = []
    for answer in answers:
        row = by_id.get(answer.decision) if answer.decision else None
        one: dict[str, object] = {"policy": answer.policy, "refusal": answer.refusal}
        if row is not None:
            rating: Rating | None = mine.get(row.pk)
            one |= {
                **preview_context(row),
                "probabilities": _probabilities(row),
                "unusable": _unusable(row),
                "thumb": rating.thumb if rating else "",
            }
        rendered_answers.append(one)
    return rendered_answers


def _unusable(row: Decision) -> str:
    """Reason why the agent's app cannot use an answer; empty where it can."""
    if ((row.metadata or {}).get("serving") or {}).get("finish_reason") == "length":
        return f"cut off: it reached its limit{f' of {row.tokens_out:,} tokens' if row.tokens_out else ''}"
    try:
        agent_served(row.agent).parse(row.response, row.state)
    except InvalidResponse as fault:
        return f"not valid: {fault}"
    return ""


def _probabilities(row: Decision) -> list[dict[str, object]]:
    """Candidates with the probability each was drawn with, the likeliest first."""
    found = [
        {
            "text": candidate["response"],
            "share": float(candidate["probability"]),
            "bar": round(100 * float(candidate["probability"]), 1),
            "chosen": candidate["response"] == row.response,
        }
        for candidate in row.candidates or []
        if isinstance(candidate, dict) and isinstance(candidate.get("probability"), (int, float))
    ]
    return sorted(found, key=lambda one: -one["share"])[:CANDIDATES_SHOWN]
