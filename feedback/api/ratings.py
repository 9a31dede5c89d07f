"""REST endpoints of ratings, comparisons and outcomes."""

from __future__ import annotations

import uuid
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.installation import PROGRAM
from backend.rest.access import RATE_AS, grant_of
from backend.rest.errors import RequestRefused
from backend.rest.reading import fields_in
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.api.bodies import Comparison, ComparisonSent, Outcome, OutcomeSent, Rating, RatingSent
from feedback.recording.recorder import recorded_or_never
from feedback.services import WriteResult, comparison_submit, outcome_record, rating_submit


def rater_of(request: Request, facts: dict[str, Any]) -> str:
    """Name of the rater: the key itself, or whom it names where it has `rate_as`; a person rates as
    themselves.

    Raises RequestRefused (403) for a key that names somebody else without it, (400) for a person that does, or
    simulates one.
    """
    grant = grant_of(request)
    name = facts.pop("rater", grant.holder)
    if grant.is_person and name != grant.holder:
        raise RequestRefused(
            f"you are signed in as {grant.holder} and can rate only as yourself; to send others' "
            "ratings use an API key with rate_as",
            fields={"rater": "expected your own name, or nothing"},
        )
    if not grant.is_person and name != grant.holder and RATE_AS not in grant.scopes:
        raise RequestRefused(
            f"the key {grant.holder!r} has the scope rate, and rates as itself; to send others' ratings it needs "
            f"rate_as: make one with `{PROGRAM} api_key create NAME --scopes rate,{RATE_AS}`, or leave `rater` out",
            code="forbidden",
            status=403,
            fields={"rater": f"expected {grant.holder}, or nothing"},
        )
    if grant.is_person and facts.get("rater_kind", "human") != "human":
        raise RequestRefused(
            "expected a person's rating", fields={"rater_kind": "expected human, found another"}
        )
    rater: str = name
    return rater


def _answer(written: WriteResult, shown: dict[str, Any]) -> Response:
    return Response(shown, status=201 if written.created else 200)


class Ratings(ApiView):
    scopes = {"POST": "rate"}

    @describe(
        "Rate a decision",
        {201: ("Stored", Rating), 200: ("Stored before, with the same body", Rating)},
        body=RatingSent,
        refusals=(404, 409),
        tag="ratings",
        operation="ratings_submit",
    )
    def post(self, request: Request, pk: uuid.UUID) -> Response:
        facts = fields_in(RatingSent, request.data)
        rater = rater_of(request, facts)
        written = recorded_or_never(pk, then=lambda: rating_submit(decision=pk, rater=rater, **facts))
        return _answer(written, Rating.of(written.row))


class Comparisons(ApiView):
    scopes = {"POST": "rate"}

    @describe(
        "Compare two decisions on the same prompt",
        {201: ("Stored", Comparison), 200: ("Stored before, with the same body", Comparison)},
        body=ComparisonSent,
        refusals=(404, 409),
        tag="ratings",
        operation="comparisons_submit",
    )
    def post(self, request: Request) -> Response:
        facts = fields_in(ComparisonSent, request.data)
        rater = rater_of(request, facts)
        written = recorded_or_never(
            facts["left"], facts["right"], then=lambda: comparison_submit(rater=rater, **facts)
        )
        return _answer(written, Comparison.of(written.row))


class Outcomes(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Record a measured fact about a decision",
        {201: ("Stored", Outcome), 200: ("Stored before, with the same body", Outcome)},
        body=OutcomeSent,
        refusals=(404, 409),
        tag="decisions",
        operation="outcomes_record",
    )
    def post(self, request: Request, pk: uuid.UUID) -> Response:
        facts = fields_in(OutcomeSent, request.data)
        written = recorded_or_never(pk, then=lambda: outcome_record(decision=pk, **facts))
        return _answer(written, Outcome.of(written.row))
