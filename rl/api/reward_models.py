"""The REST endpoint of reward models: the list of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Time
from backend.rest.pages import page_of
from backend.rest.reading import query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from rl.api.loop import AgentPageQuery
from rl.models import RewardModelVersion
from rl.reward_models.service import ranks_above_chance


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
