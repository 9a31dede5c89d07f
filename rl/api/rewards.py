"""The REST endpoints of rewards and reward models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Sent
from backend.rest.errors import RequestRefused
from backend.rest.reading import body_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.selectors import agent_slugs
from feedback.storage.fields import Slug
from rl.datasets.reward_records import RewardsRefused, rewards_calculate

MAX_REWARDS = 2000
"""Rewards calculated by one call: more would keep the caller, and a worker, waiting."""


class RewardsAsked(Sent):
    agent: Slug | None = None
    """Of this agent alone."""
    limit: Annotated[int, Field(ge=1, le=MAX_REWARDS)] = MAX_REWARDS


class RewardsCalculated(Answer):
    calculated: int
    """Decisions whose reward was calculated."""
    written: int
    """Those whose reward is new or has changed."""
    pending: int
    """Decisions that still wait."""
    unreadable: dict[str, str]
    """Decisions that cannot be read and were skipped, the first of them, and why."""
    unreadable_count: int
    """How many were skipped: /problems/ lists them."""
    refused: dict[str, str]
    """Agents whose rewards cannot be calculated as they are set, and why."""


class CalculatePending(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Calculate pending rewards",
        {200: ("Numbers of calculated and still pending rewards", RewardsCalculated)},
        body=RewardsAsked,
        refusals=(404, 409),
        tag="rewards",
        operation="rewards_calculate",
        description=f"At most {MAX_REWARDS:,} a call: call again while `pending` is above 0.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(RewardsAsked, request.data)
        try:
            found = rewards_calculate(sent.agent, limit=sent.limit)
        except RewardsRefused as refusal:
            code = "conflict" if sent.agent in agent_slugs() else "not_found"
            raise RequestRefused(str(refusal), code=code, fields={"agent": str(refusal)}) from refusal
        return Response(RewardsCalculated.of(found))
