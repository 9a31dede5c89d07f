"""REST endpoints of ratings, comparisons, outcomes, samples to rate and agreement of raters."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend import limits
from backend.bodies import Answer, Query, Sent, Time
from backend.installation import PROGRAM
from backend.rest.access import RATE_AS, grant_of
from backend.rest.errors import RequestRefused
from backend.rest.reading import StrictJSONParser, body_read, fields_in, query_read
from backend.rest.schema import describe, of_path
from backend.rest.views import ApiView
from feedback.accounts.feedback_tokens import FeedbackThrottle, TokenAuthentication, decision_named
from feedback.agreement.report import ENOUGH, LOW_ALPHA, QuestionAgreement, agreement_report
from feedback.api.bodies import (
    OF_AGENT,
    Comparison,
    ComparisonSent,
    Feedback,
    FeedbackSent,
    Outcome,
    OutcomeSent,
    Rating,
    RatingSent,
    TokenRatingSent,
)
from feedback.models import RaterKind
from feedback.rating.requests import (
    MOST_DRAWN,
    LikedShare,
    SampleRefused,
    liked_by_choice,
    liked_in_sample,
    sample_draw,
)
from feedback.recording.ingest import scored_response_record
from feedback.recording.recorder import recorded_or_never
from feedback.selectors import decision_get
from feedback.services import WriteResult, comparison_submit, outcome_record, rating_submit
from feedback.storage.fields import OneOf, Slug


def rater_of(request: Request, facts: dict[str, Any]) -> str:
    """Name of the rater: the key itself, or whom it names where it has `rate_as`; a person rates as
    themselves.

    Raises RequestRefused (403) for a key that names somebody else or another kind of rater without it, (400) for a
    person that does.
    """
    grant = grant_of(request)
    name, kind = facts.pop("rater", grant.holder), facts.get("rater_kind", RaterKind.HUMAN)
    name = name.strip() if isinstance(name, str) else name
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
    if kind != RaterKind.HUMAN and grant.is_person:
        raise RequestRefused(
            "expected a person's rating", fields={"rater_kind": "expected human, found another"}
        )
    if kind != RaterKind.HUMAN and RATE_AS not in grant.scopes:
        raise RequestRefused(
            f"the key {grant.holder!r} has the scope rate, and says nothing about the kind of its rater; that needs "
            f"{RATE_AS}: leave `rater_kind` out, or make a key with `--scopes rate,{RATE_AS}`",
            code="forbidden",
            status=403,
            fields={"rater_kind": "expected human, or nothing"},
        )
    rater: str = name
    return rater


def _answer(written: WriteResult[Any], shown: Mapping[str, object]) -> Response:
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


class SmallJSONParser(StrictJSONParser):
    most_bytes = limits.FEEDBACK_BYTES


class TokenRatings(ApiView):
    """The only address that answers pages of other sites (CORS_URLS_REGEX)."""

    scopes = {"POST": "rate"}
    authentication_classes = [TokenAuthentication, *ApiView.authentication_classes]
    throttle_classes = [FeedbackThrottle]
    parser_classes = [SmallJSONParser]
    takes_publishable_keys = True

    @describe(
        "Rate a decision with its token",
        {201: ("Stored", Rating), 200: ("Stored before, with the same body", Rating)},
        body=TokenRatingSent,
        parameters=(of_path("token", {"type": "string"}, "`feedback_token` of an answer"),),
        refusals=(404, 409),
        tag="ratings",
        operation="ratings_submit_by_token",
        description="The token needs no key. It rates one decision until it expires.",
    )
    def post(self, request: Request, token: str) -> Response:
        grant = grant_of(request)
        decision = decision_named(token)
        facts = fields_in(TokenRatingSent, request.data)

        def rate() -> WriteResult[Any]:
            row = decision_get(decision) if grant.agent else None
            if row is not None and row.agent != grant.agent:
                raise RequestRefused(
                    f"this publishable key rates answers of {grant.agent} alone", code="forbidden", status=403
                )
            return rating_submit(decision=decision, rater=grant.holder, **facts)

        written = recorded_or_never(decision, then=rate)
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


class AgreementQuery(Query):
    agent: Slug
    """Whose decisions were rated."""
    rater_kind: Annotated[str, OneOf(RaterKind.values)] | None = None
    """Left out: people where any rated, else simulated raters."""


class AgreementReport(Answer):
    agent: str
    rater_kind: Annotated[str, OneOf(RaterKind.values)]
    questions: list[QuestionAgreement]
    """Those that were answered."""
    low_alpha: float = LOW_ALPHA
    enough: int = ENOUGH


class Agreement(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "How far an agent's raters agree",
        {200: ("Per question: alpha, each rater with the others, each two raters", AgreementReport)},
        query=AgreementQuery,
        tag="ratings",
        operation="agreement_report",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(AgreementQuery, request)
        return Response(AgreementReport.of(agreement_report(sent.agent, sent.rater_kind)))
