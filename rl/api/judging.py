"""The REST endpoints of judging rounds: begin one, read it, stop it, and judge its pairs blind."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.pages import page_of
from backend.rest.reading import object_in, parameters
from backend.rest.schema import describe, page_schema, parameter, ref
from backend.rest.views import ApiView
from feedback.api.ratings import rater_of
from rl.api.loop import OF_AGENT, PAGING, policy_lookup
from rl.api.training import agent_checked, text
from rl.evaluation.judging import INCUMBENT, round_create, round_dispatch
from rl.models import JudgingRound
from rl.registry.judging import (
    JudgingRefused,
    judgement_submit,
    pair_get,
    pair_next,
    round_get,
    round_represent,
    round_stop,
)
from rl.registry.service import RegistryRefused

ROUND = parameter("id", {"type": "integer"}, "The judging round", where="path")


class JudgingRounds(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List judging rounds, newest first",
        {200: ("A page of them", page_schema(ref("JudgingRound")))},
        parameters=(OF_AGENT, *PAGING),
        tag="policies",
        operation="judging_list",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", *PAGE_PARAMETERS))
        found = JudgingRound.objects.select_related("policy", "opponent")
        if "agent" in given:
            found = found.filter(agent=agent_checked(given["agent"]))
        return Response(page_of(found, request, round_represent))

    @describe(
        "Begin a judging round",
        {202: ("The round; a worker generates its answers", ref("JudgingRound"))},
        body=ref("JudgingRoundSent"),
        refusals=(404, 409),
        tag="policies",
        operation="judging_begin",
    )
    def post(self, request: Request) -> Response:
        facts = object_in(request.data, required=("policy",), optional=("against",))
        policy = policy_lookup(text(facts, "policy"))
        try:
            judging = round_create(
                policy, against=text(facts, "against", INCUMBENT), actor=grant_of(request).holder
            )
        except (JudgingRefused, RegistryRefused) as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal
        round_dispatch(judging)
        return Response(round_represent(judging), status=202)


class JudgingRoundOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read a judging round",
        {200: ("Its verdict, interval and counts", ref("JudgingRound"))},
        parameters=(ROUND,),
        refusals=(404,),
        tag="policies",
        operation="judging_read",
        description="The interval and the verdict hold at every look.",
    )
    def get(self, request: Request, pk: int) -> Response:
        parameters(request, ())
        return Response(round_represent(_round(pk)))


class JudgingStop(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Stop a judging round",
        {200: ("The round with the verdict it has now", ref("JudgingRound"))},
        parameters=(ROUND,),
        refusals=(404, 409),
        tag="policies",
        operation="judging_stop",
    )
    def post(self, request: Request, pk: int) -> Response:
        object_in(request.data or {}, required=(), optional=())
        judging = _round(pk)
        try:
            return Response(round_represent(round_stop(judging, actor=grant_of(request).holder)))
        except JudgingRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal


class JudgingPairs(ApiView):
    scopes = {"GET": "rate", "POST": "rate"}

    @describe(
        "Get the next pair to judge, blind",
        {200: ("The pair; `pair` is null where none waits for this rater", ref("JudgingPair"))},
        parameters=(ROUND,),
        refusals=(404,),
        tag="ratings",
        operation="judging_pair",
    )
    def get(self, request: Request, pk: int) -> Response:
        parameters(request, ())
        shown = pair_next(_round(pk), grant_of(request).holder)
        if shown is None:
            return Response({"pair": None, "messages": [], "left": "", "right": ""})
        return Response(
            {
                "pair": str(shown.pair.pk),
                "messages": shown.decision.messages,
                "left": shown.left,
                "right": shown.right,
            }
        )

    @describe(
        "Judge a pair",
        {201: ("Stored", ref("JudgementStored"))},
        body=ref("JudgementSent"),
        parameters=(ROUND,),
        refusals=(404, 409),
        tag="ratings",
        operation="judging_judge",
    )
    def post(self, request: Request, pk: int) -> Response:
        facts: dict[str, Any] = object_in(request.data, required=("pair", "preference"), optional=())
        pair, preference = text(facts, "pair"), text(facts, "preference")
        judging = _round(pk)
        rater = rater_of(request, {})
        if preference not in ("left", "right", "tie", "both_bad"):
            fault = "expected left, right, tie or both_bad"
            raise RequestRefused(f"preference: {fault}", fields={"preference": fault})
        shown = pair_get(judging, pair, rater)
        if shown is None:
            raise RequestRefused(
                "no such pair in this round", code="not_found", status=404, fields={"pair": "does not exist"}
            )
        try:
            judgement_submit(shown.pair, rater, preference)
        except JudgingRefused as refusal:
            raise RequestRefused(str(refusal), code="conflict", status=409) from refusal
        judging.refresh_from_db()
        return Response({"pair": pair, "preference": preference, "status": str(judging.status)}, status=201)


def _round(pk: int) -> JudgingRound:
    try:
        return round_get(pk)
    except JudgingRefused as refusal:
        raise RequestRefused(
            str(refusal), code="not_found", status=404, fields={"id": "does not exist"}
        ) from refusal
