"""The REST endpoint of rewards: calculate those that are pending."""

from __future__ import annotations

import dataclasses

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import object_in
from backend.rest.schema import describe, ref
from backend.rest.views import ApiView
from feedback.selectors import agent_slugs
from rl.api.training import agent_checked
from rl.datasets.reward_records import RewardsRefused, rewards_calculate

MAX_REWARDS = 2000
"""Rewards calculated by one call: more would keep the caller, and a worker, waiting."""


class CalculatePending(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Calculate pending rewards",
        {200: ("Numbers of calculated and still pending rewards", ref("RewardsCalculated"))},
        body=ref("RewardsAsked"),
        refusals=(404, 409),
        tag="rewards",
        operation="rewards_calculate",
        body_required=False,
        description=f"At most {MAX_REWARDS:,} a call: call again while `pending` is above 0.",
    )
    def post(self, request: Request) -> Response:
        facts = object_in(request.data, required=(), optional=("agent", "limit"))
        agent, limit = facts.get("agent"), facts.get("limit")
        if agent is not None and not isinstance(agent, str):
            raise RequestRefused("agent: expected a slug", fields={"agent": "expected a slug"})
        if limit is None:
            limit = MAX_REWARDS
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_REWARDS:
            fault = f"expected a whole number from 1 to {MAX_REWARDS}"
            raise RequestRefused(f"limit: {fault}", fields={"limit": fault})
        try:
            found = rewards_calculate(agent_checked(agent) if agent else None, limit=limit)
        except RewardsRefused as refusal:
            known = agent in agent_slugs()
            raise RequestRefused(
                str(refusal),
                code="conflict" if known else "not_found",
                status=409 if known else 404,
                fields={"agent": str(refusal)},
            ) from refusal
        return Response(dataclasses.asdict(found))
