"""Decide for an agent: choose among what is listed, else have an answer written; record it."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from django.utils import timezone

from backend import limits
from feedback.recording.recorder import Storage, decision_id_new
from feedback.storage.fields import Candidates, Json, JsonObject, Messages, Name
from feedback.storage.masking import DECISION_TEXTS, Masker, facts_masked, masker_of
from feedback.storage.validation import Check
from rl.agents.base import UNREADABLE, Agent, InvalidResponse
from rl.decoding.unique_items import items_repeated
from rl.serving import fallback
from rl.serving.assembly import answer_of
from rl.serving.base import Answer, Ask, BackendUnable, ServingRefused
from rl.serving.chat_request import check_metadata, read_messages
from rl.serving.claims import claimed
from rl.serving.decision_facts import answer_storable, facts_of, propensity_of
from rl.serving.fallback import ServedAnswer
from rl.serving.gateway import after_answer, before_answer, outage, recorder, refuses
from rl.serving.linear import LINEAR, choose, listed_answers
from rl.serving.routing import Target, serving_settings, target_of

MAX_CANDIDATES = limits.CANDIDATES
ORDER = "order"
"""Key of `order_hash` in a decision's serving metadata."""


@dataclass(frozen=True)
class DecideOrder:
    """Order of a decision: a state the agent renders, or messages; among listed responses, or in free words."""

    agent: str
    state: Any = None
    messages: Any = None
    candidates: Sequence[Any] | None = None
    unit: str = ""
    run_id: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    id: uuid.UUID | None = None
    caller: str = ""
    """Whose order it is, such as key:3."""


@dataclass(frozen=True)
class RecordedChoice:
    """A decision: its facts as they are recorded, and the action its response stands for."""

    facts: dict[str, Any]
    action: Mapping[str, object] | None
    storage: Storage
    """Storage that holds it now."""
    recorded: bool
    """True if it outlives this process."""


def decide(order: DecideOrder) -> RecordedChoice:
    """Assign, answer, record.

    Raises ServingRefused (a fault of the order, or KeyReused or InProgress for its id), NobodyAnswers,
    RecordingImpossible.
    """
    with claimed(order.id, order_hash(order), outage) as claim:
        made = _decided(order)
        claim.kept = made.recorded
    return made


def _decided(order: DecideOrder) -> RecordedChoice:
    target = target_of(order.agent, order.unit, order.caller)
    before_answer(recorder)
    masker = masker_of(target.agent)
    agent, facts = facts_decided(target, order_masked(order, masker))
    facts |= {"id": str(order.id or decision_id_new()), "source": "decide"}
    facts["metadata"]["serving"] |= {ORDER: order_hash(order)}
    if order.caller:
        facts["metadata"]["serving"]["caller"] = order.caller
    storage = recorder.record(facts_masked(facts, *DECISION_TEXTS), hold=not refuses())
    facts = masker.restored(facts)
    action = action_of(agent, facts["response"], order.state)
    return RecordedChoice(facts, action, storage, after_answer(recorder, storage))


def facts_decided(target: Target, order: DecideOrder) -> tuple[Agent, dict[str, Any]]:
    """The agent, and a decision's facts but for its id and source. Raises ServingRefused, NobodyAnswers."""
    began = time.perf_counter()
    agent = target.definition
    messages, listed = order_checked(agent, order)
    if not listed and target.models[0].kind == LINEAR:
        # what it may answer is known, so that its answer has a propensity as one out of a list has
        known = listed_answers(target.models[0], messages)
        listed = [answer for answer in known if agent.is_valid(answer, _state(order))]
    if listed:
        facts = _sample_choice(agent, target, order, messages, listed, began)
    else:
        facts = _generate_response(agent, target, order, messages)
    facts |= {
        "messages": messages,
        "state": order.state,
        "unit": order.unit,
        "run_id": order.run_id,
        "metadata": {**order.metadata, **facts["metadata"]},
        "created_at": timezone.now().isoformat(),
    }
    return agent, facts


def order_masked(order: DecideOrder, masker: Masker) -> DecideOrder:
    """The order as a model and the log see it."""
    names = ("state", "messages", "candidates", "metadata")
    return replace(order, **{name: masker.masked(getattr(order, name)) for name in names})


def order_checked(agent: Agent, order: DecideOrder) -> tuple[list[dict[str, object]], list[object]]:
    """The messages an order comes to, and its listed candidates. Raises ServingRefused."""
    messages, listed = _messages(agent, order), _candidate_list(agent, order)
    _storable(order)
    return messages, listed


def order_hash(order: DecideOrder) -> str:
    """SHA-256 of what an order says: tells a retry from another order under the same id."""
    content = {
        field.name: getattr(order, field.name)
        for field in fields(order)
        if field.name not in ("id", "caller")
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def action_of(agent: Agent, response: str, state: object) -> dict[str, object] | None:
    """Action that a response stands for; None where the agent cannot act on it."""
    try:
        return agent.parse(response, state if isinstance(state, Mapping) else None)
    except (InvalidResponse, ValueError):
        return None


def _messages(agent: Agent, order: DecideOrder) -> list[dict[str, object]]:
    if order.messages is not None:
        sent = order.messages
        return read_messages([{"role": "user", "content": sent}] if isinstance(sent, str) else sent)
    if not isinstance(order.state, Mapping):
        raise ServingRefused("state: expected an object, or messages instead of it", param="state")
    try:
        return [dict(message) for message in agent.render(order.state)]
    except UNREADABLE as error:
        raise ServingRefused(f"state: {error}", param="state") from error


def _candidate_list(agent: Agent, order: DecideOrder) -> list[object]:
    """The candidates as they were sent, the agent's closed set of answers, or those it finds in the state; empty for
    free words."""
    if order.candidates is None:
        if agent.answers:
            return list(agent.answers)
        if not isinstance(order.state, Mapping):
            return []
        try:
            # one that it could not act on is none to choose
            found = agent.candidates(order.state)
            return [answer for answer in found if agent.is_valid(answer, order.state)]
        except UNREADABLE as error:
            if order.messages is not None:
                return []  # a state that only goes with the messages, to be kept
            raise ServingRefused(f"state: {error}", param="state") from error
    # the count first: a body may list a hundred thousand
    texts = [_response_of(candidate) for candidate in order.candidates[: MAX_CANDIDATES + 1]]
    if not 1 <= len(texts) <= MAX_CANDIDATES or len(set(texts)) != len(texts):
        raise ServingRefused(
            f"candidates: expected 1 to {MAX_CANDIDATES:,} responses, all different", param="candidates"
        )
    schema = agent.response_schema()
    for number, text in enumerate(texts):
        if repeated := items_repeated(schema, text):
            raise ServingRefused(f"candidates[{number}]: {repeated}", param="candidates")
    return list(order.candidates)


def _response_of(candidate: object) -> str:
    if isinstance(candidate, Mapping):
        candidate = candidate.get("response")
    if not isinstance(candidate, str) or not candidate:
        raise ServingRefused("candidates: expected texts, or {response, score?}", param="candidates")
    return candidate


def _storable(order: DecideOrder) -> None:
    check = Check()
    check.value("unit", Name, order.unit)
    check.value("run_id", Name, order.run_id)
    check.value("state", Json, order.state)
    check.value("metadata", JsonObject, order.metadata)
    if order.messages is not None:
        check.value("messages", Messages, order.messages)
    if order.candidates is not None:
        check.value("candidates", Candidates, list(order.candidates))
    for name, fault in check.fields.items():
        raise ServingRefused(f"{name}: {fault}", param=name.partition("[")[0])
    check_metadata(order.metadata)


def _sample_choice(
    agent: Agent,
    target: Target,
    order: DecideOrder,
    messages: list[dict[str, object]],
    listed: list[object],
    began: float,
) -> dict[str, Any]:
    """One of the listed responses, drawn from a distribution that is recorded whole."""
    texts = [_response_of(candidate) for candidate in listed]
    settings = serving_settings(target.agent)
    try:
        scores = fallback.log_probabilities(target, messages, texts)
    except BackendUnable:
        narrowed = agent.answers or agent.response_schema(_state(order)) is not None
        if not narrowed or order.candidates is not None:
            raise
        # a server that tells no probabilities still answers within the schema, with what is listed; how likely that
        # answer was stays unknown
        return _generate_response(agent, target, order, messages)
    choice = choose(scores.result, temperature=settings.choose_temperature, epsilon=settings.epsilon)
    answer = Answer.of_text(texts[choice.index], 1000 * (time.perf_counter() - began))
    facts = facts_of(target, ServedAnswer(answer, scores.model, scores.backend, scores.fallbacks), answer)
    facts["metadata"]["serving"] |= {
        "choose_temperature": settings.choose_temperature,
        "epsilon": settings.epsilon,
    }
    # under a name of its own: a candidate's `score` is what the app thinks of it, and pairs are made of that
    facts["candidates"] = [
        {
            **(dict(candidate) if isinstance(candidate, Mapping) else {"response": candidate}),
            "probability": probability,
            "log_probability": logp,
        }
        for candidate, probability, logp in zip(listed, choice.probabilities, scores.result, strict=True)
    ]
    facts["propensity"] = choice.propensity
    return facts


def _state(order: DecideOrder) -> Mapping[str, object] | None:
    return order.state if isinstance(order.state, Mapping) and order.messages is None else None


def _generate_response(
    agent: Agent, target: Target, order: DecideOrder, messages: list[dict[str, object]]
) -> dict[str, object]:
    wanted = serving_settings(target.agent)
    schema = agent.response_schema(_state(order)) if agent.structured else None
    # a hosted model may reason before it answers, which takes tokens of the same limit
    most = None if target.models[0].endpoint is not None else agent.max_new_tokens
    ask = Ask(
        messages,
        wanted.max_tokens or most,
        temperature=wanted.temperature,
        response_schema=schema,
        answers=agent.answers,
    )
    served = fallback.pieces(target, ask)
    answer = answer_storable(answer_of(served.result, served.latency_ms))
    facts = facts_of(target, served, answer)
    facts["propensity"] = propensity_of(answer, ask)
    return facts
