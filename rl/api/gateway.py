"""The gateway's endpoints: chat completions, responses and messages, plain and streamed, embeddings, and models."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.utils.crypto import salted_hmac
from drf_spectacular.utils import extend_schema
from pydantic import BaseModel, ConfigDict, Field
from rest_framework.request import Request
from rest_framework.response import Response

from backend.bodies import Query, Sent
from backend.rest.access import grant_of
from backend.rest.errors import RequestRefused, exception_handler, openai_answer, openai_body
from backend.rest.reading import body_read, query_read
from backend.rest.schema import describe
from backend.rest.views import ApiView
from feedback.accounts.feedback_tokens import FEEDBACK_HEADER, feedback_links
from feedback.api.bodies import DecisionFound, FeedbackLinks
from feedback.models import Decision
from feedback.recording.recorder import Storage
from feedback.selectors import decision_get
from feedback.storage.factories import decision_build
from feedback.storage.fields import Name, SentId, ShapedAs, Share, Slug, Text, uuid_read
from feedback.storage.masking import DECISION_TEXTS, masker_of
from feedback.storage.validation import DecisionPending
from rl.agents import AGENTS, get_agent
from rl.agents.base import Agent
from rl.fine_tuning.jobs import model_delete
from rl.serving import metrics
from rl.serving.base import BackendFailed, BrokenOff, Completion, Piece, ServingRefused, StreamItem
from rl.serving.chat_request import ChatRequest, chat_request
from rl.serving.claims import InProgress, KeyReused
from rl.serving.decide import (
    MAX_CANDIDATES,
    ORDER,
    DecideOrder,
    action_of,
    decide,
    order_checked,
    order_hash,
    order_masked,
)
from rl.serving.dialects import from_anthropic, from_responses
from rl.serving.dialects.chat import DONE
from rl.serving.embeddings import embeddings
from rl.serving.fallback import NobodyAnswers
from rl.serving.gateway import (
    RECORDED_HEADER,
    RecordingImpossible,
    complete,
    completion_stream,
)
from rl.serving.routing import (
    BudgetReached,
    ListedModel,
    ModelUnknown,
    models_listed,
    policy_model,
    target_of,
)
from rl.serving.telemetry import span_export

DECISION_HEADER = "X-Ratchet-Decision"
"""Header of a request with a UUID of the client's own, under which its decision is recorded."""

STATUSES: dict[type[ServingRefused], int] = {
    ModelUnknown: 404,
    KeyReused: 409,
    InProgress: 409,
    BudgetReached: 429,
}
"""Refusals that are no 400."""


def openai_handler(error: Exception, context: dict[str, object]) -> Response:
    """Any exception of a view under /v1/ as OpenAI's clients read it."""
    response = _refusal(error, context)
    metrics.REQUESTS.labels("", str(response.status_code)).inc()
    return response


def anthropic_handler(error: Exception, context: dict[str, object]) -> Response:
    """Any exception of `POST /v1/messages` as Anthropic's clients read it."""
    response = openai_handler(error, context)
    error_body = response.data["error"]
    response.data = from_anthropic.error_write(
        response.status_code, error_body["message"], error_body["code"]
    )
    return response


def _refusal(error: Exception, context: dict[str, object]) -> Response:
    if isinstance(error, ServingRefused):
        status = STATUSES.get(type(error), 400)
        wait_s = getattr(error, "retry_after_s", None)
        headers = {} if wait_s is None else {"Retry-After": str(wait_s)}
        body = openai_body(status, str(error), param=error.param, code=error.code)
        return Response(body, status=status, headers=headers)
    if isinstance(error, NobodyAnswers) and error.malformed:
        return Response(openai_body(502, str(error), code="bad_upstream_answer"), status=502)
    if isinstance(error, (NobodyAnswers, RecordingImpossible)):
        error = Unavailable(error)
    response = exception_handler(error, context)
    response.data = openai_answer(response.status_code, response.data)
    return response


class Unavailable(RequestRefused):
    """No model answers now, or no decision can be recorded."""

    def __init__(self, error: NobodyAnswers | RecordingImpossible) -> None:
        self.wait = max(1, math.ceil(error.retry_after_s))
        what = "no model can answer now" if isinstance(error, NobodyAnswers) else "no policy can answer"
        super().__init__(f"{what}: {error}; try again in {self.wait} s", code="unavailable", status=503)


@extend_schema(exclude=True)
class OpenAIView(ApiView):
    """An endpoint whose refusals have OpenAI's shape; its description is OpenAI's own."""

    def get_exception_handler(self) -> Callable[..., Response]:
        return openai_handler


class EmbeddingsSent(Sent):
    """The fields that are looked at; all others go to the upstream as they are."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1)]
    input: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[str] | list[int] | list[list[int]], Field(min_length=1)]
    )
    user: str | None = None


class Embeddings(OpenAIView):
    """Passed on to an upstream; no decision is recorded."""

    scopes = {"POST": "ingest"}

    def post(self, request: Request) -> Response:
        began = time.perf_counter()
        found = embeddings(body_read(EmbeddingsSent, request.data).model_dump(exclude_unset=True))
        metrics.REQUESTS.labels("", "200").inc()
        metrics.SECONDS.labels("").observe(time.perf_counter() - began)
        return Response(found)


def completion_write(made: Completion) -> dict[str, object]:
    message = {"role": "assistant", **made.message}
    if message.get("content") is None and len(message) <= 2:
        message["content"] = ""
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        **made.extras.choice,
        "finish_reason": made.finish_reason,
    }
    return {
        **made.extras.body,
        "id": str(made.id),
        "object": "chat.completion",
        "created": made.created,
        "model": made.policy,
        "choices": [choice],
        "usage": made.usage,
        "ratchet": made.routing,
    }


def chunks_write(
    begun: Completion, items: Iterable[StreamItem], include_usage: bool
) -> Iterator[Mapping[str, object]]:
    """The chunks of a stream: each under the decision's id, the first with the role, the last with the reason. An error
    is the last one where the answer broke off."""
    head = {
        "id": str(begun.id),
        "object": "chat.completion.chunk",
        "created": begun.created,
        "model": begun.policy,
    }
    more = {"usage": None} if include_usage else {}

    def chunk(piece: Piece, reason: str | None = None, **own: object) -> dict[str, object]:
        choice = {
            "index": 0,
            "delta": piece.delta,
            "logprobs": None,
            **piece.choice,
            "finish_reason": reason,
        }
        return {**piece.body, **head, "choices": [choice], **more, **own}

    yield chunk(Piece({"role": "assistant", "content": ""}), ratchet=begun.routing)
    last = Piece(end=True)
    for item in items:
        if isinstance(item, BrokenOff):
            yield openai_body(503, item.message, code=item.code)
            return
        if isinstance(item, Completion):
            yield chunk(last, last.finish_reason, ratchet=item.routing)
            if include_usage and item.usage is not None:
                yield {**head, "choices": [], "usage": item.usage}
        elif item.end:
            last = item
        elif item.delta or item.choice or item.body:
            yield chunk(item)
    yield DONE


class ChatCompletions(OpenAIView):
    """Chat completions. Other dialects name how their requests are read, and their answers and streams written."""

    scopes = {"POST": "ingest"}
    read: Callable[[object], object] = staticmethod(lambda body: body)
    write = staticmethod(completion_write)
    events = staticmethod(chunks_write)

    def post(self, request: Request) -> HttpResponseBase:
        began = time.perf_counter()
        chat = chat_request(
            self.read(request.data),
            unit=request.headers.get("X-Ratchet-Unit", ""),
            run_id=request.headers.get("X-Ratchet-Run", ""),
            caller=grant_of(request).ident,
        )
        id = _id_sent(request)
        is_retry = request.headers.get("X-Stainless-Retry-Count", "0") != "0"
        if chat.stream:
            pieces = completion_stream(chat, id=id, retried=is_retry)
            begun = next(pieces)  # what goes wrong before the first word still has a status
            assert isinstance(begun, Completion)
            items = _items(pieces, began, request, chat)
            events = self.events(begun, items, chat.include_usage)
            return StreamingHttpResponse(
                map(_event, events),
                content_type="text/event-stream; charset=utf-8",
                headers={
                    "Cache-Control": "no-cache",
                    "X-Accel-Buffering": "no",
                    **_headers(_with_links(begun, request)),
                },
            )
        made = _with_links(complete(chat, id=id, retried=is_retry), request)
        _count(made, began)
        span_export(chat, made, began, request.headers)
        return Response(self.write(made), headers=_headers(made))


class ResponsesCreate(ChatCompletions):
    """OpenAI responses."""

    read = staticmethod(from_responses.request_read)
    write = staticmethod(from_responses.answer_write)
    events = staticmethod(from_responses.events_write)


class MessagesCreate(ChatCompletions):
    """Anthropic messages; the key may come as `x-api-key`."""

    read = staticmethod(from_anthropic.request_read)
    write = staticmethod(from_anthropic.answer_write)
    events = staticmethod(from_anthropic.events_write)

    def get_exception_handler(self) -> Callable[..., Response]:
        return anthropic_handler


def _with_links(made: Completion, request: Request) -> Completion:
    """The completion with the token by which its decision can be rated, if that is recorded."""
    return dataclasses.replace(made, feedback=feedback_links(request, made.id)) if made.recorded else made


def _items(
    pieces: Iterable[Completion | Piece], began: float, request: Request, chat: ChatRequest
) -> Iterator[StreamItem]:
    try:
        for item in pieces:
            if isinstance(item, Completion):
                _count(item, began)
                span_export(chat, item, began, request.headers)
                item = _with_links(item, request)
            yield item
    except BackendFailed as failure:
        # the status is long sent: the clients raise what they find here
        yield BrokenOff(f"the answer broke off: {failure}")


def _event(body: Mapping[str, object]) -> bytes:
    if body is DONE:
        return b"data: [DONE]\n\n"
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body)}\n\n".encode()


def _headers(made: Completion) -> dict[str, str]:
    named = {"X-Request-Id": str(made.id), "X-Ratchet-Agent": made.agent, "X-Ratchet-Policy": made.policy}
    named |= {"X-Ratchet-Intended": made.intended_policy} if made.stepped_in else {}
    named |= {FEEDBACK_HEADER: made.feedback["feedback_token"]} if made.feedback else {}
    return named | ({} if made.recorded else {RECORDED_HEADER: "no"})


def _id_sent(request: Request) -> uuid.UUID | None:
    """The decision's id: the one that the client chose, or the one that its Idempotency-Key stands for.

    Nobody else can work out the id of a key, and so put an answer of their own under it first.
    """
    if chosen := request.headers.get(DECISION_HEADER, ""):
        try:
            return uuid_read(chosen)
        except ValueError as error:
            raise ServingRefused(f"{DECISION_HEADER}: {error}", param=DECISION_HEADER) from error
    key = request.headers.get("Idempotency-Key", "")
    if not key:
        return None
    digest = salted_hmac(__name__, f"{grant_of(request).ident}\n{key}", algorithm="sha256").digest()
    return uuid.UUID(bytes=digest[:16], version=5)


def _count(made: Completion, began: float) -> None:
    """Agents nobody has set up are counted together: a client may name as many as it likes."""
    known = made.agent in AGENTS or policy_model(made.policy) is not None
    agent = made.agent if known else "other"
    metrics.REQUESTS.labels(agent, "200").inc()
    metrics.SECONDS.labels(agent).observe(time.perf_counter() - began)
    for direction, name in (("in", "prompt_tokens"), ("out", "completion_tokens")):
        count = (made.usage or {}).get(name)
        if isinstance(count, (int, float)) and count > 0:
            metrics.TOKENS.labels(agent, direction).inc(count)


class Models(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request) -> Response:
        query_read(Query, request)
        return Response({"object": "list", "data": [_model_represent(found) for found in models_listed()]})


class ModelOne(OpenAIView):
    scopes = {"GET": "read", "DELETE": "operate"}

    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        listed = {found.id: found for found in models_listed()}
        if name not in listed:
            target = target_of(name)  # refuses what cannot be asked for
            return Response(_model_represent(ListedModel(name, 0, target.agent)))
        return Response(_model_represent(listed[name]))

    def delete(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        model_delete(name, actor=grant_of(request).holder)
        return Response({"id": name, "object": "model", "deleted": True})


def _model_represent(found: ListedModel) -> dict[str, object]:
    return {"id": found.id, "object": "model", "created": found.created, "owned_by": found.owner}


# --- POST /api/decide/ -----------------------------------------------------------------------------------------


class SentCandidate(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    response: Annotated[str, Field(min_length=1)]
    score: Share | None = None


class SentTurn(BaseModel):
    """One message of a chat."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[object] | None = None
    """A text, or a list of text parts. An answer may be a refusal, calls, or nothing."""


class DecideSent(Sent):
    agent: Slug
    state: Any = None
    """What the agent decides about; its keys are the agent's own."""
    messages: Annotated[Any, ShapedAs(Text | Annotated[list[SentTurn], Field(min_length=1)])] = None
    """Chat messages instead of a state."""
    candidates: (
        Annotated[
            list[Any],
            ShapedAs(
                Annotated[
                    list[Annotated[str, Field(min_length=1)] | SentCandidate],
                    Field(min_length=1, max_length=MAX_CANDIDATES),
                ]
            ),
        ]
        | None
    ) = None
    """Responses to choose among, all different; default: those the agent finds in the state."""
    unit: Name = ""
    """User or session that is assigned to an arm and stays there."""
    run_id: Name = ""
    metadata: dict[str, object] = {}
    id: SentId | None = None


class DecisionMade(FeedbackLinks, DecisionFound):  # type: ignore[misc, valid-type]
    action: dict[str, object] | None
    """Parsed response; null if it is not valid for the agent."""
    stored: bool
    """false: not in the database yet."""
    recorded: bool
    """false: neither the database nor the disk could store it (`GATEWAY_WITHOUT_RECORDING`)."""


class Decide(ApiView):
    scopes = {"POST": "ingest"}

    @describe(
        "Decide: assign, answer, record",
        {
            201: ("The decision", DecisionMade),
            200: ("Decided before: the result of the same id", DecisionMade),
        },
        body=DecideSent,
        refusals=(404, 409),
        tag="decisions",
        operation="decisions_decide",
        description="With candidates, sent or found in the state, one is sampled and the whole "
        "distribution is recorded; otherwise the answer is generated as text. Give `state` or "
        "`messages`.",
    )
    def post(self, request: Request) -> Response:
        order = _order(body_read(DecideSent, request.data), grant_of(request).ident)
        agent = get_agent(order.agent)
        if order.id is not None and (before := decision_get(order.id)) is not None:
            _check_request(agent, order)
            if before.agent != order.agent or _order_of(before) not in (None, order_hash(order)):
                raise _id_reused(order.id)
            masker = masker_of(order.agent)
            order_masked(order, masker)  # it knows the words then
            for name in (*DECISION_TEXTS, "metadata"):
                setattr(before, name, masker.restored(getattr(before, name)))
            action = action_of(agent, before.response, before.state)
            links = feedback_links(request, before.pk)
            return Response(DecisionMade.of(before, action=action, stored=True, recorded=True, **links))
        try:
            decision = decide(order)
        except KeyReused as refusal:
            raise _id_reused(order.id) from refusal
        except InProgress as refusal:
            raise DecisionPending(str(refusal)) from refusal
        except ServingRefused as refusal:
            raise _decide_refusal(refusal) from refusal
        except (NobodyAnswers, RecordingImpossible) as error:
            raise Unavailable(error) from error
        row = decision_build(**decision.facts, reserved=True, mask=False)
        body = DecisionMade.of(
            row,
            action=decision.action,
            stored=decision.storage is Storage.DATABASE,
            recorded=decision.recorded,
            **feedback_links(request, row.pk),
        )
        return Response(body, status=201, headers={} if decision.recorded else {RECORDED_HEADER: "no"})


def _check_request(agent: Agent, order: DecideOrder) -> None:
    try:
        order_checked(agent, order)
    except ServingRefused as refusal:
        raise _decide_refusal(refusal) from refusal


def _id_reused(id: uuid.UUID | None) -> RequestRefused:
    return RequestRefused(
        f"the id {id} was used before with a different body; send a new id",
        code="conflict",
        fields={"id": "already used for another write"},
    )


def _decide_refusal(refusal: ServingRefused) -> RequestRefused:
    field = refusal.param.partition("[")[0] or "agent"
    status = STATUSES.get(type(refusal), 400)
    return RequestRefused(str(refusal), status=status, fields={field: str(refusal)})


def _order_of(decision: Decision) -> str | None:
    """The hash of the order a decision was made for; None where it was recorded before these were kept.

    What was not decided here at all was no order, and has the hash of none.
    """
    serving = decision.metadata.get("serving")
    order_digest = serving.get(ORDER) if isinstance(serving, dict) else None
    return order_digest if isinstance(order_digest, str) or decision.source == "decide" else ""


def _order(sent: DecideSent, caller: str) -> DecideOrder:
    if not sent.model_fields_set & {"state", "messages"}:
        raise RequestRefused(
            "expected state or messages", fields={"state": "required where there are no messages"}
        )
    return DecideOrder(**dict(sent), caller=caller)
