"""Answer a request and record the decision: what stands behind /v1/chat/completions and /api/decide/."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import DatabaseError
from django.utils import timezone

from backend import limits
from backend.outages import OutageLog
from feedback.messages import response_of
from feedback.recording.recorder import Recorder, decision_recorded, spool_folder
from feedback.selectors import decision_answered_recently
from feedback.storage.responses import completion_read, completion_stored
from feedback.storage.validation import Check
from rl.agents import get_agent
from rl.models.agent_definitions import agent_served
from rl.serving import fallback, metrics
from rl.serving.assembly import answer_of, delta_indexed
from rl.serving.base import Answer, Ask, BackendFailed, Extras, Piece, ServingRefused
from rl.serving.chat_request import ChatRequest
from rl.serving.costs import cost_usd
from rl.serving.fallback import ServedAnswer
from rl.serving.recording_policy import RecordingImpossible, after_answer, before_answer, refuses
from rl.serving.routing import Target, serving_settings, target_of

T = TypeVar("T")

logger = logging.getLogger("rl.serving")
outage = OutageLog(logger)

KEPT_CHARACTERS = 50_000
"""Most of one field of a server's answer that is kept in a decision's metadata, as JSON."""

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
    message: Mapping[str, Any] = field(default_factory=dict)
    """The answer as the client gets it; empty where a stream begins."""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    """Token counts as they came, with their details; None: unknown."""
    extras: Extras = field(default_factory=Extras)
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
    made = _completion(id or uuid.uuid4(), target, served)
    made = dataclasses.replace(
        made,
        message=storable(answer.said),
        finish_reason=answer.finish_reason,
        usage=storable(usage_of(answer)),
        extras=_extras_storable(answer.extras),
    )
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
        yield dataclasses.replace(earlier, message={})
        yield from _pieces_again(earlier)
        return
    recordable = before_answer(recorder)
    began = time.perf_counter()
    stream = fallback.stream(target, ask_of(request, target))
    completion = dataclasses.replace(_completion(id or uuid.uuid4(), target, stream), recorded=recordable)
    pieces: list[Piece] = []
    error = ""

    def record() -> bool:
        answer = answer_of(pieces, 1000 * (time.perf_counter() - began))
        facts = _facts(request, target, stream, completion, answer)
        if error:
            facts["metadata"]["serving"] |= {"finish_reason": "error", "error": error[:1000]}
        storage = recorder.note(facts)
        try:
            return after_answer(recorder, storage)
        except RecordingImpossible:
            return False  # it was given already, and is held in memory

    is_recorded = False
    durable = True
    try:
        yield completion
        for piece in stream.result:
            pieces.append(piece)
            if piece.end:
                durable = record()
                is_recorded = True
            yield piece
        if not durable:
            yield dataclasses.replace(completion, recorded=False)
    except BackendFailed as failure:
        error = str(failure)
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
    agent = get_agent(target.agent) if meant.is_the_apps else agent_served(target.agent)
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


def _completion(id: uuid.UUID, target: Target, served: ServedAnswer[Any]) -> Completion:
    return Completion(id, target.agent, served.model.name, target.arm, intended_policy=target.meant)


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
            "meant": target.meant,
            "finish_reason": answer.finish_reason,
            "fallbacks": [dataclasses.asdict(attempt) for attempt in served.fallbacks],
        }
    }
    if answer.log_probability is not None:
        metadata["serving"]["log_probability"] = answer.log_probability
    if target.arm_propensity is not None:
        metadata["arm_propensity"] = target.arm_propensity
    if (cost := cost_usd(answer, served.model)) is not None:
        metadata["serving"]["cost_usd"] = cost
    response = response_of([answer.message])
    text, metadata = completion_stored(storable(response.value), metadata)
    if len(text) > limits.TEXT_CHARACTERS:
        text = text[: limits.TEXT_CHARACTERS]
        metadata.pop("response_is", None)
        metadata["serving"]["cut_at"] = limits.TEXT_CHARACTERS
    if response.is_refusal:
        metadata["refusal"] = True
    reasoning = storable(response.reasoning)[: limits.TEXT_CHARACTERS]
    metadata["serving"] |= _serving_extras(answer, text, reasoning, metadata)
    return {
        "agent": target.agent,
        "response": text,
        "reasoning": reasoning,
        "policy": served.model.name,
        "arm": target.arm,
        "latency_ms": round(answer.latency_ms, 3),
        "tokens_in": answer.tokens_in,
        "tokens_out": answer.tokens_out,
        "metadata": metadata,
        "created_at": timezone.now().isoformat(),
    }


def _serving_extras(answer: Answer, text: str, reasoning: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What a server said beside the text, for the decision's metadata: each field up to KEPT_CHARACTERS."""
    extras = answer.extras
    facts = {
        "upstream": dict(extras.source),
        "usage": extras.usage,
        "choice": dict(extras.choice),
        "completion": dict(extras.body),
        "other_choices": list(extras.choices),
        "left_out_of_request": list(extras.left_out),
    }
    said = storable(dict(answer.said))
    if said != _message_again(text, reasoning, metadata):
        facts["message"] = said
    found: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    for name, value in facts.items():
        if not value:
            continue
        length = len(json.dumps(value))
        if length > KEPT_CHARACTERS or _is_deep(value):
            left_out[name] = f"{length:,} characters"
        else:
            found[name] = storable(value)
    return found | ({"left_out": left_out} if left_out else {})


def _message_again(text: str, reasoning: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The message of a recorded answer, where metadata.serving.message has none of its own."""
    serving = metadata.get("serving") or {}
    if isinstance(message := serving.get("message"), Mapping):
        return dict(message)
    more = {"reasoning_content": reasoning} if reasoning else {}
    try:
        response = completion_read(text, metadata)
    except ValueError:
        response = text
    if isinstance(response, list):
        first = response[0]
        return {**first, "content": first.get("content") or None, **more}
    if metadata.get("refusal") is True:
        return {"role": "assistant", "content": None, "refusal": response, **more}
    return {"role": "assistant", "content": response, **more}


def usage_of(answer: Answer) -> Mapping[str, Any] | None:
    """Token counts as OpenAI has them: the server's own, else those of this process; None: unknown."""
    return answer.extras.usage or _counts(answer.tokens_in, answer.tokens_out)


def _counts(read: int | None, written: int | None) -> Mapping[str, Any] | None:
    if read is None or written is None:
        return None
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def propensity_of(answer: Answer, ask: Ask) -> float | None:
    """Probability of a written answer within a schema or a closed set, where a choice is what it comes to.

    None where the backend does not tell, where it was cut, and of free words: the probability of a page of text says
    how long it is. (`metadata.serving.log_probability` has it nevertheless.)
    """
    free = ask.response_schema is None and answer.text not in ask.answers and not answer.chosen
    if answer.log_probability is None or answer.finish_reason != "stop" or free:
        return None
    return math.exp(answer.log_probability) or None


def storable(value: T) -> T:
    """A value without what no database keeps: NUL characters, halves of surrogate pairs, numbers that are none."""
    found: Any = value
    if isinstance(value, str):
        # the halves of a pair may have come in two pieces
        whole = value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        found = whole.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
    elif isinstance(value, Mapping):
        found = {storable(str(key)): storable(item) for key, item in value.items()}
    elif isinstance(value, list):
        found = [storable(item) for item in value]
    elif isinstance(value, float) and not math.isfinite(value):
        found = None
    return found


def _extras_storable(extras: Extras) -> Extras:
    return Extras(**{one.name: storable(getattr(extras, one.name)) for one in dataclasses.fields(extras)})


def _is_deep(value: Any) -> bool:
    """True for JSON too deep to be stored within a decision's metadata."""
    check = Check()
    check.json("", [[[storable(value)]]])
    return bool(check.fields)


def _pieces_again(earlier: Completion) -> Iterator[Piece]:
    """A recorded answer as a stream."""
    yield Piece(delta_indexed(earlier.message), earlier.extras.choice, earlier.extras.body)
    yield Piece(end=True, finish_reason=earlier.finish_reason, extras=earlier.extras)


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
    serving = row.metadata.get("serving", {})
    usage = serving.get("usage") or _counts(row.tokens_in, row.tokens_out)
    return Completion(
        id=row.pk,
        agent=row.agent,
        policy=row.policy,
        arm=row.arm,
        message=_message_again(row.response, row.reasoning, row.metadata),
        finish_reason=serving.get("finish_reason"),
        usage=usage,
        extras=Extras(
            serving.get("upstream", {}),
            usage,
            serving.get("choice", {}),
            serving.get("completion", {}),
            serving.get("other_choices", ()),
        ),
        created=int(row.created_at.timestamp()),
        intended_policy=serving.get("meant", ""),
    )
