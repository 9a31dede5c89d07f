"""The REST endpoint of suggested ratings: what they are worth, and what people made of them."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.reading import parameters
from backend.rest.schema import describe, ref
from backend.rest.views import ApiView
from rl.api.training import AGENT, agent_checked
from rl.jobs.label import label_model_summary


class Suggestions(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Suggested ratings of an agent's decisions",
        {200: ("Their calibration and how many were accepted", ref("SuggestionsShown"))},
        parameters=(AGENT,),
        tag="ratings",
        operation="suggestions_shown",
    )
    def get(self, request: Request, agent: str) -> Response:
        parameters(request, ())
        return Response(label_model_summary(agent_checked(agent)))
