"""Rows of feedback from what was sent: checked field by field, hashed, and not yet stored."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from django.utils import timezone

from feedback.messages import MessageError, messages_read, reasoning_split, response_of
from feedback.models import (
    SHADOW,
    Comparison,
    Decision,
    Outcome,
    Rating,
    Trace,
    prompt_hash,
)
from feedback.storage.facts import COMPARISON, DECISION, OUTCOME, RATING, RATING_CONTENT
from feedback.storage.fields import Json, MaybeTime, uuid_read
from feedback.storage.masking import DECISION_TEXTS, RATING_TEXTS, facts_masked
from feedback.storage.responses import RESERVED_KEYS, completion_stored, metadata_fault
from feedback.storage.sampling import policy_uncertainty, rating_target
from feedback.storage.validation import Check, FeedbackRefused


def identity_of(value: uuid.UUID | str | None, name: str = "id") -> uuid.UUID:
    """The id that a field names: the client's, or a new one. Raises FeedbackRefused where it is no UUID."""
    try:
        return uuid.uuid4() if value is None else uuid_read(value)
    except ValueError as error:
        raise FeedbackRefused(f"{name} refused: expected a UUID", {name: str(error)}) from error


_encode = json.JSONEncoder(sort_keys=True, default=str, separators=(",", ":")).encode


def body_hash(body: Mapping[str, object]) -> str:
    """SHA-256 of what a write says: tells a retry from a clash of ids."""
    return hashlib.sha256(_encode(body).encode()).hexdigest()


def decision_build(
    *,
    id: uuid.UUID | str | None = None,
    trace: Trace | None = None,
    created_at: datetime | str | None = None,
    reserved: bool = False,
    mask: bool = True,
    **facts: Any,
) -> Decision:
    """A decision, not yet stored. facts: fields of `DecisionFacts`. Raises FeedbackRefused.

    reserved: the metadata may hold the keys that only Ratchet writes, as far as they can be read back. mask: False for
    a row that is shown to who sent it, and never stored.
    """
    if mask:
        facts = facts_masked(facts, *DECISION_TEXTS)
    check = Check()
    key = identity_of(id)
    stored: dict[str, object] = {}
    if isinstance(facts.get("response"), (list, Mapping)) and not reserved:
        facts, stored = _messages_response(check, facts)
    if isinstance(facts.get("response"), str) and facts.get("reasoning", "") in ("", None):
        facts["response"], facts["reasoning"] = reasoning_split(facts["response"])
    values = DECISION.validate(check, facts)
    time = check.value("created_at", MaybeTime, created_at)
    if values:
        check.propensity_of_choice(values["candidates"], facts["response"], values["propensity"])
        check_reserved(check, facts["response"], values["metadata"], reserved)
    check.raise_faults("decision")
    values["metadata"] = {**values["metadata"], **stored}
    prompt_digest = prompt_hash(values["agent"], values["messages"])
    return Decision(
        id=key,
        **values,
        trace_id=trace.pk if trace else None,
        prompt_hash=prompt_digest,
        # the prompt, by far the longest of it, is in there already
        body_hash=body_hash({**DECISION.hash_values(values), "messages": prompt_digest}),
        # people judge shadow answers in judging rounds, blind, beside the user's answer
        ratings_wanted=0 if values["source"] == SHADOW else rating_target(values["agent"], key),
        annotation_priority=policy_uncertainty(values["candidates"], values["propensity"]),
        created_at=time or timezone.now(),
    )


def _messages_response(check: Check, facts: dict[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Facts whose response was sent as messages, as they are stored, and the metadata that says how to read it.

    A message that a text says whole becomes that text; reasoning goes to its own field.
    """
    sent = facts["response"]
    if check.value("response", Json, sent) is None:
        return {**facts, "response": ""}, {}
    try:
        read = messages_read([sent] if isinstance(sent, Mapping) else sent, "response")
        if not read or read[0].role != "assistant":
            raise MessageError("response: expected a text, or messages that begin with the assistant's")
    except MessageError as error:
        check.fields["response"] = str(error)
        return {**facts, "response": ""}, {}
    found = response_of(read)
    text, stored = completion_stored(found.value, {"refusal": True} if found.is_refusal else {})
    return {**facts, "response": text, "reasoning": facts.get("reasoning") or found.reasoning}, stored


def check_reserved(check: Check, response: object, metadata: Mapping[str, object], reserved: bool) -> None:
    """Refuse the keys of metadata that only Ratchet writes; `reserved`: only where they cannot be read back."""
    if reserved:
        if fault := metadata_fault(response, metadata):
            check.fields["metadata"] = fault
        return
    if found := [name for name in RESERVED_KEYS if name in metadata]:
        check.fields["metadata"] = (
            f"expected other keys than {' and '.join(RESERVED_KEYS)}, which only Ratchet writes; found "
            f"{', '.join(found)}: send it under another name"
        )


class Subject(NamedTuple):
    """Columns of the decision that a write is about; the rest of it may be a megabyte."""

    pk: uuid.UUID
    agent: str
    prompt_hash: str


def rating_build(
    *,
    decision: uuid.UUID,
    rater: str,
    id: uuid.UUID | str | None = None,
    created_at: datetime | None = None,
    agent: str = "",
    **facts: object,
) -> Rating:
    """A rating, not yet stored and in no chain. facts: fields of `RatingFacts`. agent: whose masks hold. Raises
    FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    facts = facts_masked(facts, *RATING_TEXTS, agent=agent)
    values = RATING.validate(check, {"rater": rater, **facts})
    # what was sent and is wrong has its own fault
    if values and all(RATING[name].says_nothing(values[name]) for name in RATING_CONTENT):
        check.fields["thumb"] = f"expected at least one of {', '.join(RATING_CONTENT)}"
    check.raise_faults("rating")
    return Rating(
        id=key,
        decision_id=decision,
        **values,
        body_hash=body_hash({"decision": str(decision), **RATING.hash_values(values)}),
        created_at=created_at or timezone.now(),
    )


W = TypeVar("W", bound=Rating | Comparison)


def withdrawal_build(said: W, id: uuid.UUID | str | None, created_at: datetime | None) -> W:
    """The row that takes another one back, not yet stored."""
    row = type(said)()
    for name in ("decision_id",) if isinstance(said, Rating) else ("left_id", "right_id"):
        setattr(row, name, getattr(said, name))
    row.id = identity_of(id)
    row.rater, row.rater_kind = said.rater, said.rater_kind
    row.withdrawn = True
    row.supersedes_id = said.pk
    row.created_at = created_at or timezone.now()
    row.body_hash = body_hash({"withdraws": str(said.pk)})
    return row


def comparison_build(
    *,
    left: Subject,
    right: Subject,
    id: uuid.UUID | str | None = None,
    created_at: datetime | None = None,
    **facts: object,
) -> Comparison:
    """A comparison, not yet stored and in no chain. facts: fields of `ComparisonFacts`. Raises FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    if left.pk == right.pk:
        check.fields["right"] = "expected another decision than left"
    elif left.agent != right.agent or left.prompt_hash != right.prompt_hash:
        check.fields["right"] = "expected a decision of the same agent on the same prompt as left"
    values = COMPARISON.validate(check, facts_masked(facts, *RATING_TEXTS, agent=left.agent))
    check.raise_faults("comparison")
    return Comparison(
        id=key,
        left_id=left.pk,
        right_id=right.pk,
        **values,
        body_hash=body_hash({"left": str(left.pk), "right": str(right.pk), **COMPARISON.hash_values(values)}),
        created_at=created_at or timezone.now(),
    )


def outcome_build(
    *,
    decision: uuid.UUID,
    id: uuid.UUID | str | None = None,
    created_at: datetime | None = None,
    **facts: object,
) -> Outcome:
    """An outcome, not yet stored. facts: fields of `OutcomeFacts`. Raises FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    values = OUTCOME.validate(check, facts)
    check.raise_faults("outcome")
    now = timezone.now()
    return Outcome(
        id=key,
        decision_id=decision,
        **{**values, "at": values["at"] or now},
        body_hash=body_hash({"decision": str(decision), **OUTCOME.hash_values(values)}),
        created_at=created_at or now,
    )
