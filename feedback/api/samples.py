"""REST endpoint of random samples: draw one for the rating queue, read what it shows."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import object_in, parameters
from backend.rest.schema import Schema, describe, parameter
from backend.rest.views import ApiView
from feedback.api.schemas import SLUG, TIME, answer_schema, request_schema
from feedback.models import SLUG_PATTERN
from feedback.rating.requests import (
    MOST_DRAWN,
    LikedShare,
    SampleRefused,
    liked_by_choice,
    liked_in_sample,
    sample_draw,
)
from feedback.storage.bodies import nullable

COUNT: Schema = {"type": "integer", "minimum": 0}
LIKED: Schema = nullable(
    answer_schema(
        {
            "liked": {**COUNT, "description": "Rated decisions whose mean verdict is good"},
            "rated": {**COUNT, "description": "Decisions rated good or bad"},
            "drawn": {**COUNT, "description": "Decisions of the sample, rated or not; 0 without one"},
            "representative": {
                "type": "boolean",
                "description": "Whether the decisions were drawn at random",
            },
        }
    )
)
SHOWN: Schema = answer_schema({"agent": SLUG, "sample": LIKED, "by_choice": LIKED})
DRAWN: Schema = answer_schema({"agent": SLUG, "drawn": COUNT, "among": COUNT, "since": TIME})
AGENT = parameter("agent", SLUG, "Whose decisions; required")


class Samples(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "Liked answers in an agent's random sample, and among ratings that people chose to give",
        {200: ("Counts; null where there is none", SHOWN)},
        parameters=(AGENT,),
        tag="ratings",
        operation="sample_read",
    )
    def get(self, request: Request) -> Response:
        agent = _agent_checked(parameters(request, ("agent",)).get("agent", ""))
        return Response(
            {
                "agent": agent,
                "sample": _represent(liked_in_sample(agent)),
                "by_choice": _represent(liked_by_choice(agent)),
            }
        )

    @describe(
        "Draw random decisions that the rating queue asks for first, in place of an earlier sample",
        {201: ("Drawn", DRAWN)},
        body=request_schema(
            {"agent": SLUG},
            {
                "count": {"type": "integer", "minimum": 1, "maximum": MOST_DRAWN, "default": 50},
                "days": {
                    "type": "integer",
                    "minimum": 1,
                    "default": 7,
                    "description": "Of the last so many days",
                },
            },
        ),
        tag="ratings",
        operation="sample_draw",
    )
    def post(self, request: Request) -> Response:
        facts = object_in(request.data, required=("agent",), optional=("count", "days"))
        fields: dict[str, str] = {
            name: f"expected a whole number, found {facts[name]!r}"[:200]
            for name in ("count", "days")
            if name in facts and (not isinstance(facts[name], int) or isinstance(facts[name], bool))
        }
        if fields:
            raise RequestRefused("expected whole numbers", fields=fields)
        agent = _agent_checked(facts["agent"])
        try:
            drawn = sample_draw(agent, facts.get("count", 50), facts.get("days", 7))
        except SampleRefused as refusal:
            raise RequestRefused(str(refusal)) from refusal
        return Response({**asdict(drawn), "since": drawn.since.isoformat()}, status=201)


def _agent_checked(agent: Any) -> str:
    if not isinstance(agent, str) or not re.fullmatch(SLUG_PATTERN, agent):
        found = f"expected an agent's slug, found {agent!r}"[:200]
        raise RequestRefused("expected an agent", fields={"agent": found})
    return agent


def _represent(found: LikedShare | None) -> dict[str, Any] | None:
    return None if found is None else asdict(found)
