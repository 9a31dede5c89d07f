"""The REST endpoints of rewards and reward models."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Sent, Time
from backend.rest.errors import RequestRefused
from backend.rest.pages import page_of
from backend.rest.reading import body_read, query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from feedback.selectors import agent_slugs
from feedback.storage.fields import Slug
from rl.api.loop import AgentPageQuery
from rl.datasets.reward_records import RewardsRefused, rewards_calculate
from rl.models import RewardModelVersion
from rl.reward_models.service import ranks_above_chance

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


class RewardModel(Answer):
    name: str
    agent: str
    stage: Literal["candidate", "champion", "retired", "rejected"]
    run: int | None = Field(validation_alias="run_id")
    base_model: str
    objective: Literal["pairwise", "regression", "binary"]
    architecture: str
    feedback_count: int
    ranking: dict[str, Any]
    """Share of held-out feedback ranked as people did: value, low, high, n, what, compared."""
    better_than_a_coin: bool
    created_at: Time


def reward_model_represent(version: RewardModelVersion) -> dict[str, Any]:
    """A reward model as commands and the API answer it."""
    return RewardModel.of(version, better_than_a_coin=ranks_above_chance(version.ranking))


class RewardModels(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "List reward models, newest first",
        {200: ("A page of them", Page[RewardModel])},
        query=AgentPageQuery,
        tag="rewards",
        operation="reward_models_list",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgentPageQuery, request)
        found = RewardModelVersion.objects.order_by("-pk")
        if sent.agent:
            found = found.filter(agent=sent.agent)
        return Response(page_of(found, request, sent, reward_model_represent))
