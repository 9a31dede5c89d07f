"""Execution traces over REST, as the client package sends them."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.schema import describe, ref
from backend.rest.views import ApiView
from feedback.api.representations import trace_represent
from feedback.api.schemas import fields_in
from feedback.recording.traces import trace_record


class Traces(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Record an agent's execution trace and the decisions in it",
        {
            201: ("Stored", ref("Trace")),
            200: ("Stored before, with the same body", ref("Trace")),
            202: ("Left out by the agent's collection_rate", ref("DecisionLeftOut")),
        },
        body=ref("TraceSent"),
        refusals=(409,),
        tag="traces",
        operation="traces_record",
        description="The trace and its decisions are stored together or not at all.",
    )
    def post(self, request: Request) -> Response:
        done = trace_record(**fields_in(request.data, "TraceSent"))
        if not done.stored:
            return Response({"id": str(done.trace.pk), "stored": False}, status=202)
        body = {
            **trace_represent(done.trace),
            "stored": True,
            "decisions": [str(pk) for pk in done.decisions],
        }
        return Response(body, status=201 if done.created else 200)
