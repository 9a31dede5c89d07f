"""POST /api/decide/: an agent's decision, answered and recorded in one call."""

from __future__ import annotations

import math
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import Refused
from backend.rest.reading import object_in
from backend.rest.schema import described, ref
from backend.rest.views import ApiView
from feedback.api.shown import decision_as_shown, decision_shown
from feedback.building import identity_of
from feedback.selectors import decision_get
from rl.agents import get_agent
from rl.api.training import agent_checked
from rl.serving.answering import NobodyAnswers
from rl.serving.base import ServingRefused
from rl.serving.deciding import DecideOrder, action_of, decide
from rl.serving.routing import ModelUnknown

OPTIONAL = ("state", "messages", "candidates", "unit", "run_id", "metadata", "id")


class Unavailable(Refused):
    """No model answers now."""

    def __init__(self, error: NobodyAnswers) -> None:
        self.wait = max(1, math.ceil(error.retry_after_s))
        super().__init__(
            f"no model answers now: {error}; try again in {self.wait} s", code="unavailable", status=503
        )


class Decide(ApiView):
    scopes = {"POST": "ingest"}

    @described(
        "Decide: assign, answer, record",
        {
            201: ("The decision", ref("DecisionMade")),
            200: ("Decided before, under the same id", ref("DecisionMade")),
        },
        body=ref("DecideSent"),
        refusals=(409,),
        tag="decisions",
        operation="decisions_decide",
        description="With listed candidates, sent or found in the state, one of them is drawn and the whole "
        "distribution recorded; otherwise an answer is written. Give `state` or `messages`.",
    )
    def post(self, request: Request) -> Response:
        sent = object_in(request.data, required=("agent",), optional=OPTIONAL)
        order = _order(sent)
        agent = get_agent(order.agent)
        if order.id is not None and (before := decision_get(order.id)) is not None:
            if before.agent != order.agent:
                raise Refused(
                    f"decision {order.id} was recorded for another agent",
                    code="conflict",
                    status=409,
                    fields={"id": "already used for another write"},
                )
            action = action_of(agent, before.response, before.state)
            return Response({**decision_shown(before), "action": action, "stored": True}, status=200)
        try:
            made = decide(order)
        except ServingRefused as refusal:
            field = refusal.param.partition("[")[0] or "agent"
            status = 404 if isinstance(refusal, ModelUnknown) else 400
            raise Refused(str(refusal), status=status, fields={field: str(refusal)}) from refusal
        except NobodyAnswers as error:
            raise Unavailable(error) from error
        return Response(
            {**decision_as_shown(made.facts), "action": made.action, "stored": made.recorded}, status=201
        )


def _order(sent: dict[str, Any]) -> DecideOrder:
    if "state" not in sent and "messages" not in sent:
        raise Refused("expected state or messages", fields={"state": "required where there are no messages"})
    for name in ("unit", "run_id"):
        if not isinstance(sent.get(name, ""), str):
            raise Refused(f"{name}: expected a text", fields={name: "expected a text"})
    if not isinstance(sent.get("metadata", {}), dict):
        raise Refused("metadata: expected an object", fields={"metadata": "expected an object"})
    if not isinstance(sent.get("candidates", []), list):
        raise Refused("candidates: expected a list", fields={"candidates": "expected a list"})
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
