"""A response and its score in one request, for apps that have both at once."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import fields_in
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.api.bodies import OF_AGENT, Feedback, FeedbackSent
from feedback.api.ratings import rater_of
from feedback.recording.ingest import scored_response_record


class FeedbackSend(ApiView):
    scopes = {"POST": "rate"}

    @describe(
        "Record a response with its score",
        {201: ("Stored", Feedback), 200: ("Stored before, with the same body", Feedback)},
        body=FeedbackSent,
        parameters=(OF_AGENT,),
        refusals=(409,),
        tag="ratings",
        operation="feedback_record",
        description="Stored as a decision with a rating; with a runId, as a rating of the decision "
        "recorded under it.",
    )
    def post(self, request: Request, agent: str) -> Response:
        facts = fields_in(FeedbackSent, request.data)
        run = facts.pop("runId", "")
        if not isinstance(run, str):
            raise RequestRefused("expected the app's own id of the run", fields={"runId": "expected text"})
        written = scored_response_record(agent=agent, rater=rater_of(request, {}), run_id=run, **facts)
        return Response(Feedback.of(written.row, agentId=agent), status=201 if written.created else 200)
