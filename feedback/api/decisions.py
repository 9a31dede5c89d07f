"""Decisions, traces and withdrawals over REST."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import FLOAT_TEXT, INT_TEXT, Answer, Query, Sent, Time
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused, error_body
from backend.rest.pages import PageQuery, page_of
from backend.rest.reading import body_read, fields_in, query_read
from backend.rest.schema import Page, describe
from backend.rest.views import ApiView
from feedback.accounts.feedback_tokens import feedback_links
from feedback.api.bodies import (
    DecisionFound,
    DecisionLeftOut,
    DecisionsAnswer,
    DecisionSent,
    DecisionsRecorded,
    DecisionsSent,
    DecisionStored,
    DecisionWhole,
    TraceSent,
    TraceStored,
)
from feedback.erasure.withdrawals import (
    WithdrawalSelection,
    Withdrawn,
    decisions_withdraw,
    withdrawal_restore,
    withdrawals,
)
from feedback.explorer.decision_facts import rewarded_at_least
from feedback.explorer.search import decisions_search
from feedback.models import Decision, Outcome
from feedback.recording.ingest import MAX_BULK, IngestResult, decision_ingest, decisions_ingest, trace_record
from feedback.recording.recorder import recorded_or_never
from feedback.selectors import decision_get, ratings_standing
from feedback.services import rating_submit
from feedback.storage.fields import RowNumber, Slug, Storable, TimeSent, Uuid
from feedback.storage.validation import DecisionUnknown, FeedbackRefused


def plus_read(text: str) -> str:
    """A time whose + was not encoded, and arrives as a space."""
    return text.replace(" ", "+") if "T" in text else text


class DecisionQuery(PageQuery):
    agent: Slug | None = None
    policy: Storable = ""
    """Answered by this policy."""
    run_id: Storable = ""
    """Recorded under this run of the app."""
    rated: Annotated[Literal["true", "false"] | None, BeforeValidator(str.lower)] = None
    """true: with a rating that stands; false: without."""
    since: Annotated[TimeSent | None, BeforeValidator(plus_read)] = None
    """Recorded at or after."""
    q: Storable = ""
    """Text in the prompt, the response or its reasoning, upper and lower case alike."""
    min_reward: Annotated[float, Field(ge=-2, le=2), FLOAT_TEXT] | None = None
    """With a raw reward of at least this."""
    batch: Annotated[RowNumber, INT_TEXT] | None = None
    """Brought by the import of this number."""


class Decisions(ApiView):
    scopes = {"GET": "read", "POST": "ingest"}

    @describe(
        "Record a decision, or a list of up to 1,000",
        {
            201: ("Recorded; of a list, at least one and none refused", DecisionsRecorded),
            200: ("Recorded before, with the same body", DecisionsRecorded),
            202: ("Left out by the agent's collection_rate", DecisionLeftOut),
            207: ("Of a list, some were refused: see each result", DecisionsAnswer),
        },
        body=DecisionsSent,
        refusals=(409,),
        tag="decisions",
        operation="decisions_record",
        description="A list is answered item by item: a refused one does not hold back the others.",
    )
    def post(self, request: Request) -> Response:
        if isinstance(request.data, list):
            return _bulk(request, request.data)
        facts, thumb = _decision_read(request, request.data)
        done = decision_ingest(**facts)
        if not done.stored:
            return Response(DecisionLeftOut.of(done.row, stored=False), status=202)
        _thumb_store(request, done, thumb)
        body = DecisionStored.of(done.row, stored=True, **feedback_links(request, done.row.pk))
        return Response(body, status=201 if done.created else 200)

    @describe(
        "Find decisions, newest first",
        {200: ("A page of them", Page[DecisionFound])},  # type: ignore[valid-type]
        query=DecisionQuery,
        tag="decisions",
        operation="decisions_find",
    )
    def get(self, request: Request) -> Response:
        sent = query_read(DecisionQuery, request)
        narrowed = partial(
            decisions_search,
            agent=sent.agent or "",
            policy=sent.policy,
            run_id=sent.run_id,
            since=sent.since,
            batch=sent.batch,
        )
        rated = None if sent.rated is None else sent.rated == "true"
        found, among = narrowed(rated=rated, q=sent.q), None
        if sent.min_reward is not None:
            found = rewarded_at_least(found, sent.min_reward)
        if sent.min_reward is not None or rated is not None or sent.q:
            among = narrowed()
        return Response(page_of(found, request, sent, DecisionFound.of, among=among))


class DecisionOne(ApiView):
    scopes = {"GET": "read"}

    @describe(
        "Read one decision with its ratings and outcomes",
        {200: ("The decision", DecisionWhole)},
        refusals=(404,),
        tag="decisions",
        operation="decisions_read",
    )
    def get(self, request: Request, pk: uuid.UUID) -> Response:
        query_read(Query, request)
        decision = recorded_or_never(pk, then=lambda: _decision_get(pk))
        ratings = list(ratings_standing(of_withdrawn=True).filter(decision=decision))
        outcomes = list(Outcome.objects.filter(decision=decision).order_by("at", "id"))
        return Response(DecisionWhole.of(decision, ratings=ratings, outcomes=outcomes))


def _decision_read(request: Request, data: object) -> tuple[dict[str, object], str | None]:
    """The fields of a decision that was sent, and its thumb. Files say `prompt` for messages; so may callers.

    Raises RequestRefused.
    """
    if isinstance(data, dict) and data.get("messages") is None:
        data = {
            "messages" if name == "prompt" else name: value
            for name, value in data.items()
            if name != "messages"
        }
    facts = fields_in(DecisionSent, data)
    if "prompt" in facts:
        raise RequestRefused(
            "expected messages or prompt, found both", fields={"prompt": "messages are there"}
        )
    thumb = facts.pop("thumb", None)
    if thumb not in (None, "up", "down"):
        raise RequestRefused(
            "a decision was refused", fields={"thumb": f"expected up or down, found {thumb!r:.40}"}
        )
    if thumb and "rate" not in grant_of(request).scopes:
        raise RequestRefused(
            "a thumb is a rating, and the caller lacks the scope rate: leave it out, or send it with another key",
            code="forbidden",
            status=403,
            fields={"thumb": "needs the scope rate"},
        )
    return facts, thumb


def _thumb_store(request: Request, done: IngestResult, thumb: str | None) -> None:
    """The thumb of a decision that was stored; sent again it is the same rating."""
    if thumb and done.stored:
        rater = grant_of(request).holder
        rating_submit(
            decision=done.row.pk, rater=rater, thumb=thumb, id=uuid.uuid5(done.row.pk, f"thumb {rater}")
        )


def _bulk(request: Request, items: Sequence[object]) -> Response:
    if not 1 <= len(items) <= MAX_BULK:
        raise RequestRefused(f"expected a list of 1 to {MAX_BULK:,} decisions, found {len(items):,}")
    readable: list[Mapping[str, object]] = []
    thumbs: list[str | None] = []
    answers: list[Mapping[str, object] | None] = []
    for item in items:
        try:
            facts, thumb = _decision_read(request, item)
            readable.append(facts)
            thumbs.append(thumb)
            answers.append(None)
        except RequestRefused as refusal:
            answers.append(_refusal_entry("invalid", str(refusal.detail), refusal.fields))
    ingested = decisions_ingest(readable)
    for one, thumb in zip(ingested, thumbs, strict=True):
        if isinstance(one, IngestResult):
            _thumb_store(request, one, thumb)
    done = iter(ingested)
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


def _result(done: IngestResult | FeedbackRefused) -> dict[str, object]:
    if isinstance(done, FeedbackRefused):
        return _refusal_entry(done.code, str(done), done.fields)
    status = 201 if done.created else 200 if done.stored else 202
    return {"status": status, "id": str(done.row.pk), "stored": done.stored}


def _refusal_entry(code: str, message: str, fields: dict[str, str]) -> dict[str, object]:
    return {"status": 409 if code == "conflict" else 400, **error_body(code, message, fields)}


def _decision_get(pk: uuid.UUID) -> Decision:
    found = decision_get(pk)
    if found is None:
        raise DecisionUnknown(f"no decision {pk}", {"id": "does not exist"})
    return found


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


class WithdrawalSent(WithdrawalSelection):
    ids: Annotated[list[Uuid], Field(max_length=1000)] = []
    reason: Annotated[Storable, Field(max_length=500)] = ""
    """Why, for the record."""
    dry_run: bool = False
    """Count and list; withdraw nothing."""


class WithdrawalShown(Answer):
    id: int
    selection: dict[str, object]
    reason: str
    actor: str
    decisions: int = Field(validation_alias="decisions_count")
    trained_on: dict[str, object]
    created_at: Time
    restored_at: Time | None
    restored_by: str


class WithdrawalRestored(Answer):
    withdrawal: int
    decisions: int


class Withdrawals(ApiView):
    scopes = {"GET": "read", "POST": "operate"}

    @describe(
        "List the withdrawals, newest first",
        {200: ("A page of them", Page[WithdrawalShown])},
        query=PageQuery,
        tag="decisions",
        operation="withdrawals_list",
    )
    def get(self, request: Request) -> Response:
        page = query_read(PageQuery, request)
        return Response(page_of(withdrawals(), request, page, WithdrawalShown.of))

    @describe(
        "Withdraw decisions",
        {201: ("Withdrawn", Withdrawn), 200: ("Nothing to withdraw; or a dry run", Withdrawn)},
        body=WithdrawalSent,
        tag="decisions",
        operation="decisions_withdraw",
        description="Decisions that match all given fields are excluded from datasets, queues, counts and "
        "exports. They stay on record and can be restored. Runs and policies trained on them "
        "are listed and not changed.",
    )
    def post(self, request: Request) -> Response:
        sent = body_read(WithdrawalSent, request.data)
        done = decisions_withdraw(
            sent, actor=grant_of(request).holder, reason=sent.reason, dry_run=sent.dry_run
        )
        return Response(Withdrawn.of(done), status=200 if done.withdrawal is None else 201)


class WithdrawalRestore(ApiView):
    scopes = {"POST": "operate"}

    @describe(
        "Undo a withdrawal",
        {200: ("How many came back", WithdrawalRestored)},
        body=Sent,
        refusals=(404, 409),
        tag="decisions",
        operation="withdrawals_restore",
        description="409 where it was restored already.",
    )
    def post(self, request: Request, pk: int) -> Response:
        body_read(Sent, request.data)
        if pk >= 2**63:
            raise RequestRefused(f"there is no withdrawal {pk}", code="not_found", status=404)
        back = withdrawal_restore(pk, actor=grant_of(request).holder)
        return Response({"withdrawal": pk, "decisions": back})
