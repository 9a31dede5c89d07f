"""Answer a request and record the decision: what stands behind /v1/chat/completions and /api/decide/."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db import DatabaseError
from django.utils import timezone

from backend.outages import OutageLog
from feedback.recording.recorder import Recorder, decision_recorded, spool_folder
from feedback.selectors import decision_answered_recently
from rl.agents import get_agent
from rl.models.agent_definitions import agent_served
from rl.serving import fallback, metrics
from rl.serving.base import BASE, Answer, Ask, BackendFailed, Piece, ServingRefused
from rl.serving.chat_request import ChatRequest
from rl.serving.fallback import ServedAnswer
from rl.serving.recording_policy import RecordingImpossible, after_answer, before_answer, refuses
from rl.serving.routing import Target, serving_settings, target_of

logger = logging.getLogger("rl.serving")
outage = OutageLog(logger)

RETRY_MINUTES = 10
"""A retry of a request that was answered so long ago gets the same answer again."""

recorder = Recorder(spool_folder, counted=lambda how: metrics.DECISIONS_RECORDED.labels(how).inc())


class KeyReused(ServingRefused):
    """An Idempotency-Key that was sent before with another request."""

    def __init__(self, decision: uuid.UUID) -> None:
        super().__init__(
            f"this Idempotency-Key was used for another request (decision {decision}): send a new key with "
            "a new request, or the same body with the same key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


@dataclass(frozen=True)
class Completion:
    """An answer that is a decision."""

    id: uuid.UUID
    agent: str
    policy: str
    arm: str
    text: str
    finish_reason: str
    tokens_in: int | None
    tokens_out: int | None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    created: int = field(default_factory=lambda: int(time.time()))
    intended_policy: str = ""
    """The policy that was to answer; `policy` is another where that one failed and somebody stepped in."""

    recorded: bool = True
    """True if the decision outlives this process; of a stream that begins, whether it is expected to."""

    @property
    def stepped_in(self) -> bool:
        """True if another policy answered than the one the request came to."""
        return bool(self.intended_policy) and self.intended_policy != self.policy


def complete(request: ChatRequest, *, id: uuid.UUID | None = None, retried: bool = False) -> Completion:
    """Answer a request and record the decision.

    id: the decision's, where the client's idempotency key says which one it is. retried: the client says it sends this
    once more. Either way what was answered before is given again. Raises ServingRefused (KeyReused where the key came
    with another request), NobodyAnswers, RecordingImpossible.
    """
    target = target_of(request.model, request.unit)
    if (earlier := _earlier(request, target, id, retried)) is not None:
        return earlier
    before_answer(recorder)
    served = fallback.answer(target, ask_of(request, target))
    answer = served.result
    text = _storable(answer.text)
    made = _completion(id or uuid.uuid4(), target, served, text, answer.finish_reason, answer.tool_calls)
    made = dataclasses.replace(made, tokens_in=answer.tokens_in, tokens_out=answer.tokens_out)
    storage = recorder.note(_facts(request, target, served, made, answer), hold=not refuses())
    return dataclasses.replace(made, recorded=after_answer(recorder, storage))


def complete_stream(
    request: ChatRequest, *, id: uuid.UUID | None = None, retried: bool = False
) -> Iterator[Completion | Piece]:
    """Stream a completion: first a Completion without text, then pieces, the last one with the finish reason.

    The decision is recorded before the last piece is given, or when whoever reads leaves, or the backend breaks off
    (then BackendFailed is raised); what was given until then is what is recorded. Where that fails, a Completion with
    `recorded` false comes after the last piece: words that were given cannot be refused. Raises as `complete`.
    """
    target = target_of(request.model, request.unit)
    if (earlier := _earlier(request, target, id, retried)) is not None:
        yield dataclasses.replace(earlier, text="")
        if earlier.text or earlier.tool_calls:
            yield Piece(earlier.text, earlier.tool_calls)
        yield Piece("", (), earlier.finish_reason, earlier.tokens_in, earlier.tokens_out)
        return
    recordable = before_answer(recorder)
    began = time.perf_counter()
    stream = fallback.stream(target, ask_of(request, target))
    completion = dataclasses.replace(
        _completion(id or uuid.uuid4(), target, stream, "", "", ()), recorded=recordable
    )
    texts: list[str] = []
    calls: list[Mapping[str, Any]] = []
    last = Piece(finish_reason="left")

    def record() -> bool:
        answer = Answer(
            text="".join(texts),
            tokens_in=last.tokens_in,
            tokens_out=last.tokens_out,
            latency_ms=1000 * (time.perf_counter() - began),
            finish_reason=last.finish_reason or "stop",
            tool_calls=_calls_joined(calls),
            log_probability=last.log_probability,
            chosen=last.chosen,
        )
        storage = recorder.note(_facts(request, target, stream, completion, answer))
        try:
            return after_answer(recorder, storage)
        except RecordingImpossible:
            return False  # it was given already, and is held in memory

    is_recorded = False
    durable = True
    try:
        yield completion
        for piece in stream.result:
            texts.append(piece.text)
            calls.extend(piece.tool_calls)
            if piece.finish_reason is not None:
                last = piece
                durable = record()
                is_recorded = True
            yield piece
        if not durable:
            yield dataclasses.replace(completion, recorded=False)
    except BackendFailed:
        last = Piece(finish_reason="error")
        raise
    finally:
        if close := getattr(stream.result, "close", None):
            close()
        if not is_recorded:
            record()


def ask_of(request: ChatRequest, target: Target) -> Ask:
    """The question as the agent wants it answered: its schema and its settings where the request does not say."""
    meant, limits = target.models[0], serving_settings(target.agent)
    # what an agent's answers look like is only inferred for its policies: an app's own model answers as it pleases
    agent = get_agent(target.agent) if meant.name == BASE else agent_served(target.agent)
    schema, answers = request.ask.response_schema, agent.answers
    if request.has_format or request.ask.extra.get("tools"):
        answers = ()  # the caller says what an answer looks like
    elif agent.structured:
        schema = agent.response_schema()
    return dataclasses.replace(
        request.ask,
        response_schema=schema,
        answers=answers,
        temperature=request.ask.temperature if request.ask.temperature is not None else limits.temperature,
        max_tokens=request.ask.max_tokens or limits.max_tokens,
    )


def _completion(
    id: uuid.UUID,
    target: Target,
    served: ServedAnswer[Any],
    text: str,
    reason: str,
    calls: Sequence[Mapping[str, Any]],
) -> Completion:
    return Completion(
        id, target.agent, served.model.name, target.arm, text, reason, None, None, calls,
        intended_policy=target.models[0].name,
    )  # fmt: skip


def _facts(
    request: ChatRequest, target: Target, served: ServedAnswer[Any], made: Completion, answer: Answer
) -> dict[str, Any]:
    facts = facts_of(target, served, answer)
    metadata = {**request.metadata, **facts.pop("metadata")}
    metadata["serving"] |= {"requested": request.model, "request": request.body_hash}
    if tools := request.ask.extra.get("tools"):
        metadata["tools"] = tools
    return {
        **facts,
        "id": str(made.id),
        "messages": list(request.ask.messages),
        "unit": request.unit,
        "run_id": request.run_id,
        "metadata": metadata,
        "source": "gateway",
        "propensity": propensity_of(answer, ask_of(request, target)),
    }


def facts_of(target: Target, served: ServedAnswer[Any], answer: Answer) -> dict[str, Any]:
    """Serving facts that every served decision records."""
    metadata: dict[str, Any] = {
        "serving": {
            "backend": served.backend,
            "meant": target.models[0].name,
            "finish_reason": answer.finish_reason,
            "fallbacks": [dataclasses.asdict(attempt) for attempt in served.fallbacks],
        }
    }
    if answer.log_probability is not None:
        metadata["serving"]["log_probability"] = answer.log_probability
    if target.arm_propensity is not None:
        metadata["arm_propensity"] = target.arm_propensity
    response = _storable(answer.text)
    if answer.tool_calls:
        calls = {"role": "assistant", "content": response, "tool_calls": list(answer.tool_calls)}
        response, metadata["response_is"] = json.dumps([calls]), "messages"
    return {
        "agent": target.agent,
        "response": response,
        "policy": served.model.name,
        "arm": target.arm,
        "latency_ms": round(answer.latency_ms, 3),
        "tokens_in": answer.tokens_in,
        "tokens_out": answer.tokens_out,
        "metadata": metadata,
        "created_at": timezone.now().isoformat(),
    }


def propensity_of(answer: Answer, ask: Ask) -> float | None:
    """Probability of a written answer within a schema or a closed set, where a choice is what it comes to.

    None where the backend does not tell, where it was cut, and of free words: the probability of a page of text says
    how long it is. (`metadata.serving.log_probability` has it nevertheless.)
    """
    free = ask.response_schema is None and answer.text not in ask.answers and not answer.chosen
    if answer.log_probability is None or answer.finish_reason != "stop" or free:
        return None
    return math.exp(answer.log_probability) or None


def _storable(text: str) -> str:
    """A model may write what no database keeps: NUL characters, halves of surrogate pairs."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _calls_joined(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls out of their streamed parts: arguments joined, by index."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        call = calls.setdefault(
            int(part.get("index") or 0), {"type": "function", "function": {"arguments": ""}}
        )
        call |= {key: value for key, value in part.items() if key not in ("index", "function") and value}
        for key, value in (part.get("function") or {}).items():
            if key == "arguments":
                call["function"]["arguments"] += value or ""
            elif value:
                call["function"][key] = value
    return [calls[index] for index in sorted(calls)]


def _earlier(request: ChatRequest, target: Target, id: uuid.UUID | None, retried: bool) -> Completion | None:
    """Completion given to this very request before, where the client says that it may be a retry."""
    if id is None and not retried:
        return None
    try:
        row = (
            decision_recorded(id)
            if id is not None
            else decision_answered_recently(
                target.agent,
                [dict(message) for message in request.ask.messages],
                request.body_hash,
                minutes=RETRY_MINUTES,
            )
        )
    except DatabaseError as error:
        outage.report("a retry is answered again, as the database cannot be reached", error)
        return None
    if row is None:
        return None
    if id is not None and row.metadata.get("serving", {}).get("request") != request.body_hash:
        raise KeyReused(row.pk)
    message = json.loads(row.response)[0] if row.metadata.get("response_is") == "messages" else {}
    return Completion(
        id=row.pk,
        agent=row.agent,
        policy=row.policy,
        arm=row.arm,
        text=message.get("content", row.response),
        finish_reason=row.metadata.get("serving", {}).get("finish_reason", "stop"),
        tokens_in=row.tokens_in,
        tokens_out=row.tokens_out,
        tool_calls=message.get("tool_calls", ()),
        created=int(row.created_at.timestamp()),
        intended_policy=row.metadata.get("serving", {}).get("meant", ""),
    )
