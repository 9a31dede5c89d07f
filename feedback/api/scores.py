"""A response and its score in one request, for apps that have both at once."""

from __future__ import annotations

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.schema import describe, parameter, ref
from backend.rest.views import ApiView
from feedback.api.ratings import rater_of
from feedback.api.schemas import SLUG, fields_in
from feedback.recording.ingest import scored_response_record


class Feedback(ApiView):
    scopes = {"POST": "rate"}

    @describe(
        "Record a response with its score",
        {201: ("Stored", ref("Feedback")), 200: ("Stored before, with the same body", ref("Feedback"))},
        body=ref("FeedbackSent"),
        parameters=(parameter("agent", SLUG, "Whose response it is", where="path"),),
        refusals=(409,),
        tag="ratings",
        operation="feedback_record",
        description="Stored as a decision with a rating; with a runId, as a rating of the decision "
        "recorded under it.",
    )
    def post(self, request: Request, agent: str) -> Response:
        facts = fields_in(request.data, "FeedbackSent")
        run = facts.pop("runId", "")
        if not isinstance(run, str):
            raise RequestRefused("expected the app's own id of the run", fields={"runId": "expected text"})
        written = scored_response_record(agent=agent, rater=rater_of(request, {}), run_id=run, **facts)
        rating = written.row
        body = {
            "id": str(rating.pk),
            "agentId": agent,
            "score": rating.score,
            "createdAt": rating.created_at.isoformat(),
        }
        return Response(body, status=201 if written.created else 200)
