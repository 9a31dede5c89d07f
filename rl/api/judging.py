"""The REST endpoints of judging rounds: begin one, read it, stop it, and judge its pairs blind."""

from __future__ import annotations

import uuid
from typing import Literal

from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Sent
from backend.rest.access import grant_of
from backend.rest.errors import not_found
from backend.rest.pages import page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe, of_path
from backend.rest.views import ApiView
from feedback.api.ratings import rater_of
from feedback.messages import Message
from feedback.storage.fields import Storable, Uuid
from rl.api.loop import AgentPageQuery, policy_lookup
from rl.evaluation.judging import INCUMBENT, round_create, round_dispatch
from rl.models import JudgingRound as RoundRow
from rl.registry.judge_reports import RoundShown, round_represent
from rl.registry.judging import (
    JudgingRefused,
    judgement_submit,
    pair_get,
    pair_next,
    round_get,
    round_stop,
)

ROUND = of_path("id", {"type": "integer"}, "The judging round")


Preference = Literal["left", "right", "tie", "both_bad"]


class JudgingRoundSent(Sent):
    policy: Storable
    against: Storable = INCUMBENT
    """incumbent, base, or a policy."""


class JudgingPair(Answer):
    pair: uuid.UUID | None
    messages: list[Message]
    """The prompt, as chat messages."""
    left: str
    right: str


class JudgementSent(Sent):
    pair: Uuid
    preference: Preference


class JudgementStored(Answer):
    pair: uuid.UUID
    preference: Preference
    status: str


class JudgingRounds(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List judging rounds, newest first",
        {200: ("A page of them", Page[RoundShown])},
        query=AgentPageQuery,
        tag="policies",
        operation="judging_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgentPageQuery, request)
        found = RoundRow.objects.select_related("policy", "opponent")
        if sent.agent:
            found = found.filter(agent=sent.agent)
        return Response(page_of(found, request, sent, round_represent))

    @describe(
        "Begin a judging round",
        {202: ("The round; a worker generates its answers", RoundShown)},
        body=JudgingRoundSent,
        refusals=(404, 409),
        tag="policies",
        operation="judging_begin",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(JudgingRoundSent, request.data)
        judging = round_create(
            policy_lookup(sent.policy), against=sent.against, actor=grant_of(request).holder
        )
        round_dispatch(judging)
        return Response(round_represent(judging), status=202)


class JudgingRoundOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a judging round",
        {200: ("Its verdict, interval and counts", RoundShown)},
        parameters=(ROUND,),
        refusals=(404,),
        tag="policies",
        operation="judging_read",
        description="The interval and the verdict hold at every look.",
    )
    def get(self, request: Request, pk: int) -> Response:
        query_read(Query, request)
        return Response(round_represent(_round(pk)))


class JudgingStop(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Stop a judging round",
        {200: ("The round with the verdict it has now", RoundShown)},
        parameters=(ROUND,),
        refusals=(404, 409),
        tag="policies",
        operation="judging_stop",
    )
    def post(self, request: Request, pk: int) -> Response:
        body_read(Sent, request.data or {})
        return Response(round_represent(round_stop(_round(pk), actor=grant_of(request).holder)))


class JudgingPairs(ApiView):
    scopes = {"GET": "rate", "POST": "rate"}

    @describe(
        "Get the next pair to judge, blind",
        {200: ("The pair; `pair` is null where none waits for this rater", JudgingPair)},
        parameters=(ROUND,),
        refusals=(404,),
        tag="ratings",
        operation="judging_pair",
    )
    def get(self, request: Request, pk: int) -> Response:
        query_read(Query, request)
        shown = pair_next(_round(pk), grant_of(request).holder)
        if shown is None:
            return Response({"pair": None, "messages": [], "left": "", "right": ""})
        return Response(JudgingPair.of(shown, pair=shown.pair.pk, messages=shown.decision.messages))

    @describe(
        "Judge a pair",
        {201: ("Stored", JudgementStored)},
        body=JudgementSent,
        parameters=(ROUND,),
        refusals=(404, 409),
        tag="ratings",
        operation="judging_judge",
    )
    def post(self, request: Request, pk: int) -> Response:
        sent = body_read(JudgementSent, request.data)
        judging = _round(pk)
        rater = rater_of(request, {})
        shown = pair_get(judging, str(sent.pair), rater)
        if shown is None:
            raise not_found("no such pair in this round", "pair")
        judgement_submit(shown.pair, rater, sent.preference)
        judging.refresh_from_db()
        return Response(JudgementStored.of(sent, status=judging.status), status=201)


def _round(pk: int) -> RoundRow:
    try:
        return round_get(pk)
    except JudgingRefused as refusal:
        raise not_found(str(refusal), "id") from refusal
