"""Answer a request and record the decision: what stands behind /v1/chat/completions and /api/decide/."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from django.db import DatabaseError
from django.utils import timezone

from backend import limits
from backend.logs import OutageLog
from feedback.messages import response_of
from feedback.recording.recorder import Recorder, decision_recorded, spool_folder
from feedback.selectors import decision_answered_recently
from feedback.storage.fields import Json
from feedback.storage.responses import completion_read, completion_stored
from feedback.storage.validation import Check
from rl.agents import get_agent
from rl.models.agent_definitions import agent_served
from rl.serving import fallback, metrics
from rl.serving.assembly import answer_of, delta_indexed
from rl.serving.base import Answer, Ask, BackendFailed, Extras, Piece, ServingRefused, text_length
from rl.serving.chat_request import ChatRequest
from rl.serving.costs import cost_usd
from rl.serving.fallback import ServedAnswer
from rl.serving.recording_policy import RecordingImpossible, after_answer, before_answer, refuses
from rl.serving.routing import Target, serving_settings, target_of

T = TypeVar("T")

logger = logging.getLogger("rl.serving")
outage = OutageLog(logger)

UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
"""NUL, and the halves of surrogate pairs."""

KEPT_CHARACTERS = 50_000
"""Most of one field of a server's answer that is kept in a decision's metadata, as JSON."""

CHARACTERS_PER_TOKEN = 4
"""About: of a text whose tokens nobody counted."""

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
    """Answer a request and record the decision. As `completion_stream`, of which this is the last item."""
    *_, made = completion_stream(request, id=id, retried=retried)
    assert isinstance(made, Completion)
    return made


def completion_stream(
    request: ChatRequest, *, id: uuid.UUID | None = None, retried: bool = False
) -> Iterator[Completion | Piece]:
    """Answer a request, in pieces where it asks for a stream, and record the decision.

    id: the decision's, where the client's idempotency key says which one it is. retried: the client says it sends this
    once more. Either way what was answered before is given again.

    First comes a Completion without a message, then the pieces (one and a last one of a whole answer), then the
    Completion as it is recorded. The decision is recorded before the last piece is given, or when whoever reads leaves,
    or the backend breaks off (then BackendFailed is raised); what was given until then is what is recorded. A stream
    that cannot be recorded ends with `recorded` false: words that were given cannot be refused.

    Raises ServingRefused (KeyReused where the key came with another request), NobodyAnswers, RecordingImpossible.
    """
    target = target_of(request.model, request.unit)
    if (earlier := _earlier(request, target, id, retried)) is not None:
        yield dataclasses.replace(earlier, message={})
        yield from _pieces_again(earlier)
        yield earlier
        return
    recordable, ask = before_answer(recorder), ask_of(request, target)
    served = fallback.pieces(target, ask)
    begun = Completion(
        id or uuid.uuid4(),
        target.agent,
        served.model.name,
        target.arm,
        intended_policy=target.meant,
        recorded=recordable,
    )
    given: list[Piece] = []
    made: Completion | None = None
    error = ""
    try:
        yield begun
        for piece in served.result:
            given.append(piece)
            if piece.end:
                made = begun  # whatever comes of recording it, it is not tried twice
                made = _recorded(begun, request, target, served, ask, given)
            yield piece
        if made is not None:
            yield made
    except BackendFailed as failure:
        error = str(failure)
        raise
    finally:
        if close := getattr(served.result, "close", None):
            close()
        if made is None:
            _recorded(begun, request, target, served, ask, given, error)


def _recorded(
    begun: Completion,
    request: ChatRequest,
    target: Target,
    served: ServedAnswer[Any],
    ask: Ask,
    given: Sequence[Piece],
    error: str = "",
) -> Completion:
    """The completion that the pieces come to, whose decision is recorded. error: why it broke off.

    Raises RecordingImpossible for a whole answer that is refused then.
    """
    answer = answer_storable(answer_of(given, served.latency_ms))
    is_whole = bool(given) and given[-1].end
    answer = answer if is_whole else _tokens_estimated(answer, ask)
    facts = _facts(request, target, served, begun.id, answer, ask)
    if not is_whole:
        facts["metadata"]["serving"]["tokens_estimated"] = True
    if error:
        facts["metadata"]["serving"] |= {"finish_reason": "error", "error": error[:1000]}
    storage = recorder.note(facts, hold=request.stream or not refuses())
    try:
        is_recorded = after_answer(recorder, storage)
    except RecordingImpossible:
        if not request.stream:
            raise
        is_recorded = False  # it was given already, and is held in memory
    return dataclasses.replace(
        begun,
        message=answer.said,
        finish_reason=answer.finish_reason,
        usage=usage_of(answer),
        extras=answer.extras,
        recorded=is_recorded,
    )


def _tokens_estimated(answer: Answer, ask: Ask) -> Answer:
    """An answer that broke off, with about as many tokens as it has: a provider counts them at the end, and bills them
    all the same."""
    written = len(answer.text) + len(answer.message.reasoning)
    read = answer.tokens_in
    return dataclasses.replace(
        answer,
        tokens_in=text_length(ask.messages) // CHARACTERS_PER_TOKEN if read is None else read,
        tokens_out=max(answer.tokens_out or 0, math.ceil(written / CHARACTERS_PER_TOKEN)),
    )


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
        stream=request.stream,
        response_schema=schema,
        answers=answers,
        temperature=request.ask.temperature if request.ask.temperature is not None else limits.temperature,
        max_tokens=request.ask.max_tokens or limits.max_tokens,
    )


def _facts(
    request: ChatRequest, target: Target, served: ServedAnswer[Any], id: uuid.UUID, answer: Answer, ask: Ask
) -> dict[str, Any]:
    facts = facts_of(target, served, answer)
    metadata = {**request.metadata, **facts.pop("metadata")}
    metadata["serving"] |= {"requested": request.model, "request": request.body_hash}
    if tools := request.ask.extra.get("tools"):
        metadata["tools"] = tools
    return {
        **facts,
        "id": str(id),
        "messages": list(request.ask.messages),
        "unit": request.unit,
        "run_id": request.run_id,
        "metadata": metadata,
        "source": "gateway",
        "propensity": propensity_of(answer, ask),
    }


def facts_of(target: Target, served: ServedAnswer[Any], answer: Answer) -> dict[str, Any]:
    """Serving facts that every served decision records. answer: as `answer_storable` returns it."""
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
    said = dict(answer.said)
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
            found[name] = value
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
        if not UNSTORABLE.search(value):
            return value
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


def answer_storable(answer: Answer) -> Answer:
    """An answer as a database keeps it and a client gets it."""
    extras = {one.name: storable(getattr(answer.extras, one.name)) for one in dataclasses.fields(Extras)}
    return dataclasses.replace(answer, said=storable(answer.said), extras=Extras(**extras))


def _is_deep(value: Any) -> bool:
    """True for JSON too deep to be stored within a decision's metadata."""
    check = Check()
    check.value("", Json, [[[value]]])
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
