"""POST /api/decide/: an agent's decision, answered and recorded in one call."""

from __future__ import annotations

import math
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import object_in
from backend.rest.schema import describe, ref
from backend.rest.views import ApiView
from feedback.api.representations import decision_represent, pending_decision_represent
from feedback.models import Decision
from feedback.recording.recorder import Storage
from feedback.selectors import decision_get
from feedback.storage.factories import identity_of
from rl.agents import get_agent
from rl.agents.base import Agent
from rl.api.training import agent_checked
from rl.serving.base import ServingRefused
from rl.serving.decide import ORDER, DecideOrder, action_of, decide, order_checked, order_hash
from rl.serving.fallback import NobodyAnswers
from rl.serving.recording_policy import HEADER as RECORDED_HEADER
from rl.serving.recording_policy import RecordingImpossible
from rl.serving.routing import ModelUnknown

OPTIONAL = ("state", "messages", "candidates", "unit", "run_id", "metadata", "id")


class Unavailable(RequestRefused):
    """No model answers now, or no decision can be recorded."""

    def __init__(self, error: NobodyAnswers | RecordingImpossible) -> None:
        self.wait = max(1, math.ceil(error.retry_after_s))
        what = "no model can answer now" if isinstance(error, NobodyAnswers) else "no policy can answer"
        super().__init__(f"{what}: {error}; try again in {self.wait} s", code="unavailable", status=503)


class Decide(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Decide: assign, answer, record",
        {
            201: ("The decision", ref("DecisionMade")),
            200: ("Decided before: the result of the same id", ref("DecisionMade")),
        },
        body=ref("DecideSent"),
        refusals=(404, 409),
        tag="decisions",
        operation="decisions_decide",
        description="With candidates, sent or found in the state, one is sampled and the whole "
        "distribution is recorded; otherwise the answer is generated as text. Give `state` or "
        "`messages`.",
    )
    def post(self, request: Request) -> Response:
        sent = object_in(request.data, required=("agent",), optional=OPTIONAL)
        order = _order(sent)
        agent = get_agent(order.agent)
        if order.id is not None and (before := decision_get(order.id)) is not None:
            _check_request(agent, order)
            if before.agent != order.agent or _order_of(before) not in (None, order_hash(order)):
                raise RequestRefused(
                    f"the id {order.id} was used before with a different body; send a new id",
                    code="conflict",
                    status=409,
                    fields={"id": "already used for another write"},
                )
            action = action_of(agent, before.response, before.state)
            body = {**decision_represent(before), "action": action, "stored": True, "recorded": True}
            return Response(body, status=200)
        try:
            decision = decide(order)
        except ServingRefused as refusal:
            raise _refusal(refusal) from refusal
        except (NobodyAnswers, RecordingImpossible) as error:
            raise Unavailable(error) from error
        body = {
            **pending_decision_represent(decision.facts),
            "action": decision.action,
            "stored": decision.storage is Storage.DATABASE,
            "recorded": decision.recorded,
        }
        return Response(body, status=201, headers={} if decision.recorded else {RECORDED_HEADER: "no"})


def _check_request(agent: Agent, order: DecideOrder) -> None:
    try:
        order_checked(agent, order)
    except ServingRefused as refusal:
        raise _refusal(refusal) from refusal


def _refusal(refusal: ServingRefused) -> RequestRefused:
    field = refusal.param.partition("[")[0] or "agent"
    status = 404 if isinstance(refusal, ModelUnknown) else 400
    return RequestRefused(str(refusal), status=status, fields={field: str(refusal)})


def _order_of(decision: Decision) -> str | None:
    """The hash of the order a decision was made for; None where it was recorded before these were kept.

    What was not decided here at all was no order, and has the hash of none.
    """
    serving = decision.metadata.get("serving")
    order_digest = serving.get(ORDER) if isinstance(serving, dict) else None
    return order_digest if isinstance(order_digest, str) or decision.source == "decide" else ""


def _order(sent: dict[str, Any]) -> DecideOrder:
    if "state" not in sent and "messages" not in sent:
        raise RequestRefused(
            "expected state or messages", fields={"state": "required where there are no messages"}
        )
    for name in ("unit", "run_id"):
        if not isinstance(sent.get(name, ""), str):
            raise RequestRefused(f"{name}: expected a text", fields={name: "expected a text"})
    if not isinstance(sent.get("metadata", {}), dict):
        raise RequestRefused("metadata: expected an object", fields={"metadata": "expected an object"})
    if not isinstance(sent.get("candidates", []), list):
        raise RequestRefused("candidates: expected a list", fields={"candidates": "expected a list"})
    return DecideOrder(
        agent=agent_checked(sent["agent"] if isinstance(sent["agent"], str) else ""),
        state=sent.get("state"),
        messages=sent.get("messages"),
        candidates=sent.get("candidates"),
        unit=sent.get("unit", ""),
        run_id=sent.get("run_id", ""),
        metadata=sent.get("metadata", {}),
        id=identity_of(sent["id"]) if "id" in sent else None,
    )
