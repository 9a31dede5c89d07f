"""Execution traces over REST, as the client package sends them."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.reading import fields_in
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.api.bodies import DecisionLeftOut, TraceSent, TraceStored
from feedback.recording.traces import trace_record


class Traces(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Record an agent's execution trace and the decisions in it",
        {
            201: ("Stored", TraceStored),
            200: ("Stored before, with the same body", TraceStored),
            202: ("Left out by the agent's collection_rate", DecisionLeftOut),
        },
        body=TraceSent,
        refusals=(409,),
        tag="traces",
        operation="traces_record",
        description="The trace and its decisions are stored together or not at all.",
    )
    def post(self, request: Request) -> Response:
        done = trace_record(**fields_in(TraceSent, request.data))
        if not done.stored:
            return Response(DecisionLeftOut.of(done.trace, stored=False), status=202)
        body = TraceStored.of(done.trace, stored=True, decisions=done.decisions)
        return Response(body, status=201 if done.created else 200)
