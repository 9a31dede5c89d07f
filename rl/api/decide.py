"""POST /api/decide/: an agent's decision, answered and recorded in one call."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Sent
from backend.rest.errors import RequestRefused
from backend.rest.reading import body_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.api.bodies import DecisionFound
from feedback.models import Decision
from feedback.recording.recorder import Storage
from feedback.selectors import decision_get
from feedback.storage.factories import decision_build
from feedback.storage.fields import Name, SentId, ShapedAs, Share, Slug, Text
from rl.agents import get_agent
from rl.agents.base import Agent
from rl.serving.base import ServingRefused
from rl.serving.decide import MAX_CANDIDATES, ORDER, DecideOrder, action_of, decide, order_checked, order_hash
from rl.serving.fallback import NobodyAnswers
from rl.serving.gateway import RECORDED_HEADER, RecordingImpossible
from rl.serving.routing import ModelUnknown


class SentCandidate(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    response: Annotated[str, Field(min_length=1)]
    score: Share | None = None


class SentTurn(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Any] | None = None
    """A text, or a list of text parts. An answer may be a refusal, calls, or nothing."""


class DecideSent(Sent):
    agent: Slug
    state: Any = None
    """What the agent decides about; its keys are the agent's own."""
    messages: Annotated[Any, ShapedAs(Text | Annotated[list[SentTurn], Field(min_length=1)])] = None
    """Chat messages instead of a state."""
    candidates: (
        Annotated[
            list[Any],
            ShapedAs(
                Annotated[
                    list[Annotated[str, Field(min_length=1)] | SentCandidate],
                    Field(min_length=1, max_length=MAX_CANDIDATES),
                ]
            ),
        ]
        | None
    ) = None
    """Responses to choose among, all different; default: those the agent finds in the state."""
    unit: Name = ""
    """User or session that is assigned to an arm and stays there."""
    run_id: Name = ""
    metadata: dict[str, Any] = {}
    id: SentId | None = None


class DecisionMade(DecisionFound):  # type: ignore[misc, valid-type]
    action: dict[str, Any] | None
    """Parsed response; null if it is not valid for the agent."""
    stored: bool
    """false: not in the database yet."""
    recorded: bool
    """false: neither the database nor the disk could store it (`GATEWAY_WITHOUT_RECORDING`)."""


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
            201: ("The decision", DecisionMade),
            200: ("Decided before: the result of the same id", DecisionMade),
        },
        body=DecideSent,
        refusals=(404, 409),
        tag="decisions",
        operation="decisions_decide",
        description="With candidates, sent or found in the state, one is sampled and the whole "
        "distribution is recorded; otherwise the answer is generated as text. Give `state` or "
        "`messages`.",
    )
    def post(self, request: Request) -> Response:
        order = _order(body_read(DecideSent, request.data))
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
            return Response(DecisionMade.of(before, action=action, stored=True, recorded=True))
        try:
            decision = decide(order)
        except ServingRefused as refusal:
            raise _refusal(refusal) from refusal
        except (NobodyAnswers, RecordingImpossible) as error:
            raise Unavailable(error) from error
        body = DecisionMade.of(
            decision_build(**decision.facts, reserved=True),
            action=decision.action,
            stored=decision.storage is Storage.DATABASE,
            recorded=decision.recorded,
        )
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


def _order(sent: DecideSent) -> DecideOrder:
    if not sent.model_fields_set & {"state", "messages"}:
        raise RequestRefused(
            "expected state or messages", fields={"state": "required where there are no messages"}
        )
    return DecideOrder(
        agent=sent.agent,
        state=sent.state,
        messages=sent.messages,
        candidates=sent.candidates,
        unit=sent.unit,
        run_id=sent.run_id,
        metadata=sent.metadata,
        id=sent.id,
    )
