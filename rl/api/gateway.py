"""The gateway's endpoints: chat completions, responses and messages, plain and streamed, and models."""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
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
from feedback.api.bodies import DecisionFound
from feedback.models import Decision
from feedback.recording.recorder import Storage
from feedback.selectors import decision_get
from feedback.storage.factories import decision_build
from feedback.storage.fields import Name, SentId, ShapedAs, Share, Slug, Text
from rl.agents import AGENTS, get_agent
from rl.agents.base import Agent
from rl.serving import metrics
from rl.serving.base import BackendFailed, Extras, Piece, ServingRefused
from rl.serving.chat_request import ChatRequest, chat_request
from rl.serving.decide import MAX_CANDIDATES, ORDER, DecideOrder, action_of, decide, order_checked, order_hash
from rl.serving.dialects import from_anthropic, from_responses
from rl.serving.fallback import NobodyAnswers
from rl.serving.gateway import (
    RECORDED_HEADER,
    Completion,
    KeyReused,
    RecordingImpossible,
    complete,
    completion_stream,
)
from rl.serving.routing import ListedModel, ModelUnknown, models_listed, policy_model, target_of

STATUSES: dict[type[ServingRefused], int] = {ModelUnknown: 404, KeyReused: 409}
"""Refusals that are no 400."""
NO_EXTRAS = Extras()


def openai_handler(error: Exception, context: dict[str, Any]) -> Response:
    """Any exception of a view under /v1/ as OpenAI's clients read it."""
    response = _refusal(error, context)
    metrics.REQUESTS.labels("", str(response.status_code)).inc()
    return response


def anthropic_handler(error: Exception, context: dict[str, Any]) -> Response:
    """Any exception of `POST /v1/messages` as Anthropic's clients read it."""
    response = openai_handler(error, context)
    response.data = from_anthropic.error_write(response.status_code, response.data["error"])
    return response


def _refusal(error: Exception, context: dict[str, Any]) -> Response:
    if isinstance(error, ServingRefused):
        status = STATUSES.get(type(error), 400)
        return Response(openai_body(status, str(error), param=error.param, code=error.code), status=status)
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


class ChatCompletions(OpenAIView):
    """Chat completions. Other dialects say how their requests are read and what is made of a completion."""

    scopes = {"POST": "ingest"}

    def read(self, body: Any) -> Any:
        return body

    def write(self, completion: dict[str, Any]) -> dict[str, Any]:
        return completion

    def events(self, chunks: Iterator[dict[str, Any]]) -> Iterator[bytes]:
        is_broken = False
        for chunk in chunks:
            is_broken = "error" in chunk
            yield _event(chunk)
        if not is_broken:
            yield b"data: [DONE]\n\n"

    def post(self, request: Request) -> HttpResponseBase:
        began = time.perf_counter()
        chat = chat_request(
            self.read(request.data),
            unit=request.headers.get("X-Ratchet-Unit", ""),
            run_id=request.headers.get("X-Ratchet-Run", ""),
            caller=grant_of(request).ident,
        )
        id = _idempotent(request)
        is_retry = request.headers.get("X-Stainless-Retry-Count", "0") != "0"
        if chat.stream:
            pieces = completion_stream(chat, id=id, retried=is_retry)
            made = next(pieces)  # what goes wrong before the first word still has a status
            assert isinstance(made, Completion)
            return StreamingHttpResponse(
                self.events(_chunks(chat, made, pieces, began)),
                content_type="text/event-stream; charset=utf-8",
                headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **_headers(made)},
            )
        made = complete(chat, id=id, retried=is_retry)
        _count(made, made.usage, began)
        return Response(self.write(completion_represent(made)), headers=_headers(made))


class NamedEvents(ChatCompletions):
    """A dialect whose events have names."""

    def named(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    def events(self, chunks: Iterator[dict[str, Any]]) -> Iterator[bytes]:
        for event in self.named(chunks):
            yield f"event: {event['type']}\n".encode() + _event(event)


class ResponsesCreate(NamedEvents):
    """OpenAI responses."""

    def read(self, body: Any) -> Any:
        return from_responses.request_read(body)

    def write(self, completion: dict[str, Any]) -> dict[str, Any]:
        return from_responses.answer_write(completion)

    def named(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return from_responses.events_write(chunks)


class MessagesCreate(NamedEvents):
    """Anthropic messages; the key may come as `x-api-key`."""

    def read(self, body: Any) -> Any:
        return from_anthropic.request_read(body)

    def write(self, completion: dict[str, Any]) -> dict[str, Any]:
        return from_anthropic.answer_write(completion)

    def named(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return from_anthropic.events_write(chunks)

    def get_exception_handler(self) -> Callable[..., Response]:
        return anthropic_handler


def completion_represent(made: Completion) -> dict[str, Any]:
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
        "ratchet": _routing_represent(made, made.extras),
    }


def _routing_represent(made: Completion, extras: Extras = NO_EXTRAS) -> dict[str, Any]:
    """Routing of a request (policies asked and the one that answered), as an object of our own beside
    OpenAI's fields; with the server's own names of its answer, and choices that nobody asked for."""
    return {
        "agent": made.agent,
        "policy": made.policy,
        "intended": made.intended_policy,
        "stepped_in": made.stepped_in,
        "arm": made.arm,
        "recorded": made.recorded,
        **({"upstream": dict(extras.source)} if extras.source else {}),
        **({"other_choices": list(extras.choices)} if extras.choices else {}),
        **({"left_out": list(extras.left_out)} if extras.left_out else {}),
    }


def _chunks(
    asked: ChatRequest, completion: Completion, pieces: Iterator[Completion | Piece], began: float
) -> Iterator[dict[str, Any]]:
    """The chunks of a stream: each under the decision's id, the first with the role, the last with the reason. An error
    is the last one where the answer broke off."""
    head = {
        "id": str(completion.id),
        "object": "chat.completion.chunk",
        "created": completion.created,
        "model": completion.policy,
    }
    more = {"usage": None} if asked.include_usage else {}

    def chunk(piece: Piece, reason: str | None = None, **own: Any) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": piece.delta,
            "logprobs": None,
            **piece.choice,
            "finish_reason": reason,
        }
        return {**piece.body, **head, "choices": [choice], **more, **own}

    yield chunk(Piece({"role": "assistant", "content": ""}), ratchet=_routing_represent(completion))
    last = Piece(end=True)
    try:
        for piece in pieces:
            if isinstance(piece, Completion):
                completion = piece
            elif piece.end:
                last = piece
            elif piece.delta or piece.choice or piece.body:
                yield chunk(piece)
    except BackendFailed as failure:
        # the status is long sent: the clients raise what they find here
        yield openai_body(503, f"the answer broke off: {failure}", code="unavailable")
        return
    extras = completion.extras
    routed = not completion.recorded or extras.source or extras.choices or extras.left_out
    own = {"ratchet": _routing_represent(completion, extras)} if routed else {}
    yield chunk(last, last.finish_reason, **own)
    if asked.include_usage and completion.usage is not None:
        yield {**head, "choices": [], "usage": completion.usage}
    _count(completion, completion.usage, began)


def _event(body: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(body)}\n\n".encode()


def _headers(made: Completion) -> dict[str, str]:
    named = {"X-Request-Id": str(made.id), "X-Ratchet-Agent": made.agent, "X-Ratchet-Policy": made.policy}
    named |= {"X-Ratchet-Intended": made.intended_policy} if made.stepped_in else {}
    return named | ({} if made.recorded else {RECORDED_HEADER: "no"})


def _idempotent(request: Request) -> uuid.UUID | None:
    """The decision's id where the client sends an Idempotency-Key: the same key of the same caller, the same id.

    Nobody else can work the id out, and so put an answer of their own under it first.
    """
    key = request.headers.get("Idempotency-Key", "")
    if not key:
        return None
    digest = salted_hmac(__name__, f"{grant_of(request).ident}\n{key}", algorithm="sha256").digest()
    return uuid.UUID(bytes=digest[:16], version=5)


def _count(made: Completion, usage: Mapping[str, Any] | None, began: float) -> None:
    """Agents nobody has set up are counted together: a client may name as many as it likes."""
    known = made.agent in AGENTS or policy_model(made.policy) is not None
    agent = made.agent if known else "other"
    metrics.REQUESTS.labels(agent, "200").inc()
    metrics.SECONDS.labels(agent).observe(time.perf_counter() - began)
    for direction, name in (("in", "prompt_tokens"), ("out", "completion_tokens")):
        count = (usage or {}).get(name)
        if isinstance(count, (int, float)) and count > 0:
            metrics.TOKENS.labels(agent, direction).inc(count)


class Models(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request) -> Response:
        query_read(Query, request)
        return Response({"object": "list", "data": [_model_represent(found) for found in models_listed()]})


class ModelOne(OpenAIView):
    scopes = {"GET": "read"}

    def get(self, request: Request, name: str) -> Response:
        query_read(Query, request)
        listed = {found.id: found for found in models_listed()}
        if name not in listed:
            target = target_of(name)  # refuses what cannot be asked for
            return Response(_model_represent(ListedModel(name, 0, target.agent)))
        return Response(_model_represent(listed[name]))


def _model_represent(found: ListedModel) -> dict[str, Any]:
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
    content: str | list[Any] | None = None
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
    metadata: dict[str, Any] = {}
    id: SentId | None = None


class DecisionMade(DecisionFound):  # type: ignore[misc, valid-type]
    action: dict[str, Any] | None
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
        order = _order(body_read(DecideSent, request.data))
        agent = get_agent(order.agent)
        if order.id is not None and (before := decision_get(order.id)) is not None:
            _check_request(agent, order)
            if before.agent != order.agent or _order_of(before) not in (None, order_hash(order)):
                raise RequestRefused(
                    f"the id {order.id} was used before with a different body; send a new id",
                    code="conflict",
                    fields={"id": "already used for another write"},
                )
            action = action_of(agent, before.response, before.state)
            return Response(DecisionMade.of(before, action=action, stored=True, recorded=True))
        try:
            decision = decide(order)
        except ServingRefused as refusal:
            raise _decide_refusal(refusal) from refusal
        except (NobodyAnswers, RecordingImpossible) as error:
            raise Unavailable(error) from error
        body = DecisionMade.of(
            decision_build(**decision.facts, reserved=True),
            action=decision.action,
            stored=decision.storage is Storage.DATABASE,
            recorded=decision.recorded,
        )
        return Response(body, status=201, headers={} if decision.recorded else {RECORDED_HEADER: "no"})


def _check_request(agent: Agent, order: DecideOrder) -> None:
    try:
        order_checked(agent, order)
    except ServingRefused as refusal:
        raise _decide_refusal(refusal) from refusal


def _decide_refusal(refusal: ServingRefused) -> RequestRefused:
    field = refusal.param.partition("[")[0] or "agent"
    status = 404 if isinstance(refusal, ModelUnknown) else 400
    return RequestRefused(str(refusal), status=status, fields={field: str(refusal)})


def _order_of(decision: Decision) -> str | None:
    """The hash of the order a decision was made for; None where it was recorded before these were kept.

    What was not decided here at all was no order, and has the hash of none.
    """
    serving = decision.metadata.get("serving")
    order_digest = serving.get(ORDER) if isinstance(serving, dict) else None
    return order_digest if isinstance(order_digest, str) or decision.source == "decide" else ""


def _order(sent: DecideSent) -> DecideOrder:
    if not sent.model_fields_set & {"state", "messages"}:
        raise RequestRefused(
            "expected state or messages", fields={"state": "required where there are no messages"}
        )
    return DecideOrder(**dict(sent))
