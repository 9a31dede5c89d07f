"""The REST endpoint of suggested ratings: what they are worth, and what people made of them."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query
from backend.rest.reading import query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from rl.api.training import AGENT, agent_checked
from rl.jobs.label import label_model_summary
from rl.statistics.intervals import Interval


class Suggested(Answer):
    agent: str
    ratings: int
    """Ratings by people that the label model learnt from."""
    suggested: int
    """Ratings it suggested."""
    open: int
    """Suggestions still open."""
    accepted: int
    agreed: int
    """Rated the same without using the suggestion."""
    overruled: int
    accepted_share: Interval | None
    """Of those settled."""
    right_share: Interval | None
    """Accepted or agreed."""
    features: list[str]
    left_out: dict[str, str]
    figures: dict[str, Any] | None
    """accuracy, brier, calibration_error and the calibration curve on held-out ratings."""


class Suggestions(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Suggested ratings of an agent's decisions",
        {200: ("Their calibration and how many were accepted", Suggested)},
        parameters=(AGENT,),
        tag="ratings",
        operation="suggestions_shown",
    )
    def get(self, request: Request, agent: str) -> Response:
        query_read(Query, request)
        return Response(Suggested.of(label_model_summary(agent_checked(agent))))
