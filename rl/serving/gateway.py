"""Answer a request and record the decision: what stands behind /v1/chat/completions and /api/decide/."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from django.conf import settings
from django.db import DatabaseError

from backend import notifications
from backend.logs import OutageLog
from feedback.models import SHADOW, shadow_id
from feedback.recording.recorder import Recorder, Storage, decision_id_new, decision_recorded, spool_folder
from feedback.selectors import decision_answered_recently
from feedback.storage.masking import DECISION_TEXTS, Masker, facts_masked, masker_of
from rl.serving import fallback, metrics
from rl.serving.assembly import Restorer, answer_of, delta_indexed
from rl.serving.base import Answer, Ask, BackendFailed, Completion, Extras, Piece, text_length
from rl.serving.chat_request import ChatRequest
from rl.serving.claims import Claim, KeyReused, claimed
from rl.serving.decision_facts import (
    answer_storable,
    facts_of,
    message_again,
    propensity_of,
    token_counts,
    usage_of,
)
from rl.serving.fallback import OwnAnswer, ServedAnswer
from rl.serving.routing import Target, serving_settings, target_of

T = TypeVar("T")

logger = logging.getLogger("rl.serving")
outage = OutageLog(logger)


CHARACTERS_PER_TOKEN = 4
"""About: of a text whose tokens nobody counted."""

RETRY_MINUTES = 10
"""A retry of a request that was answered so long ago gets the same answer again."""

recorder = Recorder(spool_folder, counted=lambda how: metrics.DECISIONS_RECORDED.labels(how).inc())


RECORDED_HEADER = "X-Ratchet-Recorded"
"""Header of an answer whose decision is not recorded; its value is then `no`."""
RETRY_AFTER_S = 5.0


class RecordingImpossible(RuntimeError):
    """An answer that is refused because its decision cannot be recorded, and policy says `refuse`."""

    retry_after_s = RETRY_AFTER_S

    def __init__(self) -> None:
        super().__init__(
            "the decision cannot be recorded, neither in the database nor on disk, and "
            "GATEWAY_WITHOUT_RECORDING is `refuse`"
        )


class Outage:
    """One stretch of time in which decisions cannot be recorded. Tells people when it begins, and when it is over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._standing = False

    def tell(self, folder: object) -> None:
        """Say once that decisions are not recorded."""
        with self._lock:
            first, self._standing = not self._standing, True
        if first:
            consequence = "answers are refused" if refuses() else "answers are given without being recorded"
            text = (
                f"Decisions cannot be recorded, neither in the database nor in {folder}, and {consequence} "
                "(GATEWAY_WITHOUT_RECORDING). Free the disk or make it writable, and see that the database "
                "answers."
            )
            logger.error(text)
            # who asks for an answer does not wait for a mail server
            threading.Thread(
                target=notifications.notify,
                args=("recording_impossible", text),
                name="ratchet-notice",
                daemon=True,
            ).start()

    def recover(self) -> None:
        """Say that decisions are recorded again, where it was said that they are not."""
        if not self._standing:
            return
        with self._lock:
            stood, self._standing = self._standing, False
        if stood:
            logger.warning("decisions are recorded again")


recording_outage = Outage()


def refuses() -> bool:
    """True if an answer that cannot be recorded is refused."""
    return bool(settings.GATEWAY_WITHOUT_RECORDING == "refuse")


def before_answer(recorder: Recorder) -> bool:
    """True if the decision can be recorded, as far as is known before a model works for it.

    Raises RecordingImpossible where it cannot and policy refuses.
    """
    if recorder.recordable():
        return True
    recording_outage.tell(recorder.outbox.folder)
    if refuses():
        raise RecordingImpossible
    return False


def after_answer(recorder: Recorder, storage: Storage) -> bool:
    """True if the decision was recorded, from where it lies. Raises RecordingImpossible as
    `before_answer`."""
    if storage.durable:
        recording_outage.recover()
        return True
    recording_outage.tell(recorder.outbox.folder)
    if refuses():
        raise RecordingImpossible
    return False


def complete(request: ChatRequest, *, id: uuid.UUID | None = None, retried: bool = False) -> Completion:
    """Answer a request and record the decision. As `completion_stream`, of which this is the last item."""
    *_, made = completion_stream(request, id=id, retried=retried)
    assert isinstance(made, Completion)
    return made


def completion_stream(
    request: ChatRequest, *, id: uuid.UUID | None = None, retried: bool = False
) -> Iterator[Completion | Piece]:
    """Answer a request, in pieces where it asks for a stream, and record the decision.

    id: the decision's, where the client's header says which one it is. retried: the client says it sends this
    once more. Either way what was answered before is given again.

    First comes a Completion without a message, then the pieces (one and a last one of a whole answer), then the
    Completion as it is recorded. The decision is recorded before the last piece is given, or when whoever reads leaves,
    or the backend breaks off (then BackendFailed is raised); what was given until then is what is recorded. A stream
    that cannot be recorded ends with `recorded` false: words that were given cannot be refused.

    Raises ServingRefused (KeyReused where the id came with another request, InProgress where this one is being
    answered), NobodyAnswers, RecordingImpossible.
    """
    target = target_of(request.model, request.unit, request.caller)
    masker = masker_of(target.agent)
    request = _masked(request, masker)
    if (earlier := _earlier(request, target, id, retried)) is not None:
        earlier = _restored(earlier, masker)
        yield dataclasses.replace(earlier, message={}, extras=Extras())
        yield from _pieces_again(earlier)
        yield earlier
        return
    with claimed(id, request.body_hash, outage) as claim:
        yield from _answered(request, target, masker, id, claim)


def _answered(
    request: ChatRequest, target: Target, masker: Masker, id: uuid.UUID | None, claim: Claim
) -> Iterator[Completion | Piece]:
    """The items of `completion_stream` for a request that was not answered before."""
    recordable = before_answer(recorder)
    target, ask, served = fallback.routed(target, partial(ask_of, request))
    begun = Completion(
        id or decision_id_new(),
        target.agent,
        served.model.name,
        target.arm,
        intended_policy=target.meant,
        recorded=recordable,
    )
    given: list[Piece] = []
    made: Completion | None = None
    restorer, error = Restorer(masker), ""
    try:
        yield begun
        for piece in served.result:
            given.append(piece)
            if piece.end:
                made = begun  # whatever comes of recording it, it is not tried twice
                made = _recorded(begun, request, target, served, ask, given)
                claim.kept = made.recorded
            yield from restorer.pieces(piece)
        if made is not None:
            yield _restored(made, masker)
    except BackendFailed as failure:
        error = str(failure)
        raise
    finally:
        if close := getattr(served.result, "close", None):
            close()
        if made is None:
            claim.kept = _recorded(begun, request, target, served, ask, given, error).recorded


def _recorded(
    begun: Completion,
    request: ChatRequest,
    target: Target,
    served: ServedAnswer[T],
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
    if served.own is not None:
        recorder.note(_shadow_facts(request, begun.id, served.own))
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


def _masked(request: ChatRequest, masker: Masker) -> ChatRequest:
    """The request as a model and the log see it."""
    messages, extra = masker.masked(request.ask.messages), masker.masked(request.ask.extra)
    ask = dataclasses.replace(request.ask, messages=messages, extra=extra)
    return dataclasses.replace(request, ask=ask, metadata=masker.masked(request.metadata))


def _restored(made: Completion, masker: Masker) -> Completion:
    """The completion as the caller sees it, choices beside the first included."""
    extras = Extras(**masker.restored(vars(made.extras)))
    return dataclasses.replace(made, message=masker.restored(made.message), extras=extras)


def _shadow_facts(request: ChatRequest, decision: uuid.UUID, own: OwnAnswer) -> dict[str, Any]:
    """The facts of an answer beside a decision."""
    answer = answer_storable(answer_of(own.pieces, own.latency_ms))
    facts = _facts(request, own.target, own.served, shadow_id(decision), answer, own.ask)
    facts["metadata"]["serving"] |= {"shadow": {"of": str(decision), "experiment": ""}}
    return facts | {"source": SHADOW}


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
    agent, limits = target.definition, serving_settings(target.agent)
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
    request: ChatRequest,
    target: Target,
    served: ServedAnswer[T],
    id: uuid.UUID,
    answer: Answer,
    ask: Ask,
) -> dict[str, Any]:
    facts = facts_of(target, served, answer)
    metadata = {**request.metadata, **facts.pop("metadata")}
    metadata["serving"] |= {"requested": request.model, "request": request.body_hash}
    if request.caller:
        metadata["serving"]["caller"] = request.caller
    if tools := request.ask.extra.get("tools"):
        metadata["tools"] = tools
    found = {
        **facts,
        "id": str(id),
        "messages": list(request.ask.messages),
        "unit": request.unit,
        "run_id": request.run_id,
        "metadata": metadata,
        "source": "gateway",
        "propensity": propensity_of(answer, ask),
    }
    return facts_masked(found, *DECISION_TEXTS)


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
    usage = serving.get("usage") or token_counts(row.tokens_in, row.tokens_out)
    return Completion(
        id=row.pk,
        agent=row.agent,
        policy=row.policy,
        arm=row.arm,
        message=message_again(row.response, row.reasoning, row.metadata),
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
