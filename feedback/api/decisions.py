"""Decisions over REST: record one or many, find, read."""

from __future__ import annotations

import uuid
from collections import Counter
from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from backend.rest.errors import RequestRefused, error_body
from backend.rest.pages import MAX_PAGE_SIZE, PAGE_SIZE, page_of
from backend.rest.pages import PARAMETERS as PAGE_PARAMETERS
from backend.rest.reading import parameters
from backend.rest.schema import describe, page_schema, parameter, ref
from backend.rest.views import ApiView
from feedback.api.representations import decision_represent, outcome_represent, rating_represent
from feedback.api.schemas import SLUG, fields_in
from feedback.explorer.decision_facts import reward_query, rewarded_at_least
from feedback.explorer.search import (
    DecisionWhole,
    decision_whole,
    decisions_search,
    parse_batch_number,
    text_looked_through,
)
from feedback.recording.ingest import MAX_BULK, IngestResult, decision_ingest, decisions_ingest
from feedback.recording.recorder import recorded_or_never
from feedback.storage.validation import Check, DecisionUnknown, FeedbackRefused

FILTERS = ("agent", "policy", "rated", "since", "q", "min_reward", "batch")


class Decisions(ApiView):
    scopes = {"GET": "read", "POST": "ingest"}

    @describe(
        "Record a decision, or a list of up to 1,000",
        {
            201: ("Recorded; of a list, at least one and none refused",
                  {"oneOf": [ref("Decision"), ref("DecisionsAnswer")]}),
            200: ("Recorded before, with the same body", {"oneOf": [ref("Decision"), ref("DecisionsAnswer")]}),
            202: ("Left out by the agent's collection_rate", ref("DecisionLeftOut")),
            207: ("Of a list, some were refused: see each result", ref("DecisionsAnswer")),
        },
        body={"oneOf": [ref("DecisionSent"), ref("DecisionsSent")]},
        refusals=(409,),
        tag="decisions",
        operation="decisions_record",
        description="A list is answered item by item: a refused one does not hold back the others.",
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        if isinstance(request.data, list):
            return _bulk(request.data)
        done = decision_ingest(**fields_in(request.data, "DecisionSent"))
        if not done.stored:
            return Response({"id": str(done.row.pk), "stored": False}, status=202)
        return Response({**decision_represent(done.row), "stored": True}, status=201 if done.created else 200)

    @describe(
        "Find decisions, newest first",
        {200: ("A page of them", page_schema(ref("DecisionFound")))},
        parameters=(
            parameter("agent", SLUG, "Of this agent"),
            parameter("policy", {"type": "string"}, "Answered by this policy"),
            parameter("rated", {"type": "boolean"}, "true: with a rating that stands; false: without"),
            parameter("since", {"type": "string", "format": "date-time"}, "Recorded at or after"),
            parameter(
                "q",
                {"type": "string"},
                "Text in the prompt, the response or its reasoning, upper and lower case alike",
            ),
            parameter(
                "min_reward",
                {"type": "number", "minimum": -2, "maximum": 2},
                "With a raw reward of at least this",
            ),
            parameter("batch", {"type": "integer", "minimum": 1}, "Brought by the import of this number"),
            parameter("cursor", {"type": "string"}, "Where to go on: from next or previous of an answer"),
            parameter(
                "page_size",
                {"type": "integer", "minimum": 1, "maximum": MAX_PAGE_SIZE, "default": PAGE_SIZE},
                "Rows",
            ),
        ),
        tag="decisions",
        operation="decisions_find",
    )
    def get(self, request: Request) -> Response:
        given = parameters(request, (*FILTERS, *PAGE_PARAMETERS))
        filters = _filters(given)
        found = decisions_search(**filters)
        if (least := reward_query(given.get("min_reward", ""))) is not None:
            found = rewarded_at_least(found, least)
        among = None
        if least is not None or "rated" in filters or text_looked_through(filters["q"]):
            among = decisions_search(**{**filters, "rated": None, "q": ""})
        return Response(page_of(found, request, decision_represent, among=among))


class DecisionOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read one decision with its ratings and outcomes",
        {200: ("The decision", ref("DecisionWhole"))},
        refusals=(404,),
        tag="decisions",
        operation="decisions_read",
    )
    def get(self, request: Request, pk: uuid.UUID) -> Response:
        parameters(request, ())
        found = recorded_or_never(pk, then=lambda: _decision_get(pk))
        return Response(
            {
                **decision_represent(found.decision),
                "ratings": [rating_represent(row) for row in found.ratings],
                "outcomes": [outcome_represent(row) for row in found.outcomes],
            }
        )


def _filters(given: dict[str, str]) -> dict[str, Any]:
    """Query parameters as `decisions_search` takes them. Raises FeedbackRefused with a fault per parameter."""
    check = Check()
    filters: dict[str, Any] = {"policy": given.get("policy", ""), "q": given.get("q", "")}
    if "agent" in given:
        filters["agent"] = check.agent(given["agent"])
    if "since" in given:
        # a + that was not encoded arrives as a space
        filters["since"] = check.time(
            "since", given["since"].replace(" ", "+") if "T" in given["since"] else given["since"]
        )
    if "batch" in given:
        filters["batch"] = parse_batch_number(check, given["batch"])
    if "rated" in given:
        filters["rated"] = check.choice("rated", given["rated"].lower(), ("true", "false")) == "true"
    check.raise_faults("search")
    return filters


def _bulk(items: list[Any]) -> Response:
    if not 1 <= len(items) <= MAX_BULK:
        raise RequestRefused(f"expected a list of 1 to {MAX_BULK:,} decisions, found {len(items):,}")
    readable: list[dict[str, Any]] = []
    answers: list[dict[str, Any] | None] = []
    for item in items:
        try:
            readable.append(fields_in(item, "DecisionSent"))
            answers.append(None)
        except RequestRefused as refusal:
            answers.append(_refusal_entry("invalid", str(refusal.detail), refusal.fields))
    done = iter(decisions_ingest(readable))
    results = [answer or _result(next(done)) for answer in answers]
    counts = Counter(result["status"] for result in results)
    refused = counts[400] + counts[409]
    body = {
        "created": counts[201],
        "repeated": counts[200],
        "left_out": counts[202],
        "refused": refused,
        "results": results,
    }
    return Response(body, status=207 if refused else 201 if counts[201] else 200)


def _result(done: IngestResult | FeedbackRefused) -> dict[str, Any]:
    if isinstance(done, FeedbackRefused):
        return _refusal_entry(done.code, str(done), done.fields)
    status = 201 if done.created else 200 if done.stored else 202
    return {"status": status, "id": str(done.row.pk), "stored": done.stored}


def _refusal_entry(code: str, message: str, fields: dict[str, str]) -> dict[str, Any]:
    return {"status": 409 if code == "conflict" else 400, **error_body(code, message, fields)}


def _decision_get(pk: uuid.UUID) -> DecisionWhole:
    found = decision_whole(pk)
    if found is None:
        raise DecisionUnknown(f"no decision {pk}", {"id": "does not exist"})
    return found
