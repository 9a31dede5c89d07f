"""REST endpoint of random samples: draw one for the rating queue, read what it shows."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query, Sent, Time
from backend.rest.errors import RequestRefused
from backend.rest.reading import body_read, query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.rating.requests import (
    MOST_DRAWN,
    LikedShare,
    SampleRefused,
    liked_by_choice,
    liked_in_sample,
    sample_draw,
)
from feedback.storage.fields import Slug


class AgentQuery(Query):
    agent: Slug
    """Whose decisions."""


class SampleShown(Answer):
    agent: str
    sample: LikedShare | None
    by_choice: LikedShare | None


class SampleSent(Sent):
    agent: Slug
    count: Annotated[int, Field(ge=1, le=MOST_DRAWN)] = 50
    days: Annotated[int, Field(ge=1)] = 7
    """Of the last so many days."""


class SampleDrawn(Answer):
    agent: str
    drawn: int
    among: int
    """Decisions that could have been drawn."""
    since: Time


class Samples(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "Liked answers in an agent's random sample, and among ratings that people chose to give",
        {200: ("Counts; null where there is none", SampleShown)},
        query=AgentQuery,
        tag="ratings",
        operation="sample_read",
    )
    def get(self, request: Request) -> Response:
        agent = query_read(AgentQuery, request).agent
        shares = {"sample": liked_in_sample(agent), "by_choice": liked_by_choice(agent)}
        return Response(SampleShown.of({"agent": agent, **shares}))

    @describe(
        "Draw random decisions that the rating queue asks for first, in place of an earlier sample",
        {201: ("Drawn", SampleDrawn)},
        body=SampleSent,
        tag="ratings",
        operation="sample_draw",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(SampleSent, request.data)
        try:
            drawn = sample_draw(sent.agent, sent.count, sent.days)
        except SampleRefused as refusal:
            raise RequestRefused(str(refusal)) from refusal
        return Response(SampleDrawn.of(drawn), status=201)
