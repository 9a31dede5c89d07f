"""REST endpoint of the agreement among an agent's raters."""

from __future__ import annotations

import re

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused
from backend.rest.reading import parameters
from backend.rest.schema import Schema, describe, list_schema, parameter
from backend.rest.views import ApiView
from feedback.agreement.report import QUESTIONS, agreement_report
from feedback.api.schemas import SLUG, answer_schema
from feedback.models import SLUG_PATTERN, Aggregation, RaterKind
from feedback.storage.bodies import nullable

COUNT: Schema = {"type": "integer", "minimum": 0}
COEFFICIENT: Schema = {"type": ["number", "null"], "maximum": 1, "description": "null: not defined"}
ESTIMATE: Schema = answer_schema({"value": COEFFICIENT, "low": COEFFICIENT, "high": COEFFICIENT, "n": COUNT})
SHARE: Schema = nullable({"type": "number", "minimum": 0, "maximum": 1})
RATER: Schema = answer_schema(
    {
        "rater": {"type": "string"},
        "ratings": COUNT,
        "shared": {**COUNT, "description": "Of what others rated too"},
        "agreement": {**SHARE, "description": "Mean share of the others who said the same"},
        "alpha": {**COEFFICIENT, "description": "Krippendorff's alpha with the others"},
        "reliability": {**SHARE, "description": "Probability of being right, by Dawid-Skene"},
        "low": {"type": "boolean", "description": "`enough` is shared and alpha is below `low_alpha`"},
    }
)
PAIR: Schema = answer_schema(
    {
        "first": {"type": "string"},
        "second": {"type": "string"},
        "shared": COUNT,
        "agreement": {**SHARE, "description": "Share on which both said the same"},
        "kappa": {**ESTIMATE, "description": "Cohen's kappa; quadratically weighted for stars and scores"},
    }
)
QUESTION: Schema = answer_schema(
    {
        "question": {"type": "string", "enum": [question.name for question in QUESTIONS]},
        "title": {"type": "string"},
        "metric": {"type": "string", "enum": ["nominal", "ordinal", "interval"]},
        "ratings": COUNT,
        "decisions": COUNT,
        "overlapping": {**COUNT, "description": "Of these, rated by two or more"},
        "alpha": {**ESTIMATE, "description": "Krippendorff's alpha with its 95 % interval"},
        "meaning": {"type": "string"},
        "raters": list_schema(RATER, description="Lowest alpha first"),
        "pairs": list_schema(PAIR, description="Those who share most first"),
        "pairs_left_out": COUNT,
    }
)
REPORT: Schema = answer_schema(
    {
        "agent": SLUG,
        "rater_kind": {"type": "string", "enum": list(RaterKind.values)},
        "aggregation": {"type": "string", "enum": list(Aggregation.values)},
        "questions": list_schema(QUESTION, description="Those that were answered"),
        "low_alpha": {"type": "number"},
        "enough": COUNT,
    }
)


class Agreement(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "How far an agent's raters agree",
        {200: ("Per question: alpha, each rater with the others, each two raters", REPORT)},
        parameters=(
            parameter("agent", SLUG, "Whose decisions were rated; required"),
            parameter(
                "rater_kind",
                {"type": "string", "enum": list(RaterKind.values)},
                "Left out: people where any rated, else simulated raters",
            ),
        ),
        tag="ratings",
        operation="agreement_report",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, ("agent", "rater_kind"))
        fields: dict[str, str] = {}
        if not re.fullmatch(SLUG_PATTERN, given.get("agent", "")):
            fields["agent"] = f"expected an agent's slug, found {given.get('agent', '')!r}"[:200]
        if given.get("rater_kind", "human") not in RaterKind.values:
            fields["rater_kind"] = f"expected human or simulated, found {given['rater_kind']!r}"[:200]
        if fields:
            raise RequestRefused("expected ?agent=SLUG", fields=fields)
        return Response(agreement_report(given["agent"], given.get("rater_kind")).as_dict())
