"""REST endpoint of the agreement among an agent's raters."""

from __future__ import annotations

from typing import Annotated

from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Answer, Query
from backend.rest.reading import query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.agreement.report import ENOUGH, LOW_ALPHA, QuestionAgreement, agreement_report
from feedback.models import Aggregation, RaterKind
from feedback.storage.fields import OneOf, Slug


class AgreementQuery(Query):
    agent: Slug
    """Whose decisions were rated."""
    rater_kind: Annotated[str, OneOf(RaterKind.values)] | None = None
    """Left out: people where any rated, else simulated raters."""


class AgreementReport(Answer):
    agent: str
    rater_kind: Annotated[str, OneOf(RaterKind.values)]
    aggregation: Annotated[str, OneOf(Aggregation.values)]
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
