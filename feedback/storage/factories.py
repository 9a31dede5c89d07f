"""Rows of feedback from what was sent: checked field by field, hashed, and not yet stored."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from django.utils import timezone

from feedback.models import (
    Comparison,
    Decision,
    Outcome,
    Preference,
    RaterKind,
    Rating,
    Thumb,
    Trace,
)
from feedback.storage.agent_names import name_hashed, prompt_hash
from feedback.storage.annotation_priority import policy_doubt
from feedback.storage.responses import RESERVED, metadata_fault
from feedback.storage.sampling import ratings_wanted
from feedback.storage.validation import Check, FeedbackRefused, shown


def identity_of(value: uuid.UUID | str | None, name: str = "id") -> uuid.UUID:
    """The id that a field names: the client's, or a new one. Raises FeedbackRefused where it is no UUID."""
    if value is None:
        return uuid.uuid4()
    if isinstance(value, uuid.UUID):
        return value
    try:
        return uuid.UUID(value)
    except (ValueError, AttributeError, TypeError) as error:
        raise FeedbackRefused(
            f"{name} refused: expected a UUID", {name: f"expected a UUID, found {shown(value)}"}
        ) from error


_encode = json.JSONEncoder(sort_keys=True, default=str, separators=(",", ":")).encode


def body_hash(body: Mapping[str, Any]) -> str:
    """SHA-256 of what a write says: tells a retry from a clash of ids."""
    return hashlib.sha256(_encode(body).encode()).hexdigest()


def decision_build(
    *,
    agent: str,
    messages: Any,
    response: str,
    id: uuid.UUID | str | None = None,
    state: Any = None,
    candidates: Any = None,
    policy: str = "",
    unit: str = "",
    arm: str = "",
    propensity: float | None = None,
    run_id: str = "",
    latency_ms: float | None = None,
    tokens_in: int | None = None,
    tokens_out: int | None = None,
    tags: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    trace: Trace | None = None,
    source: str = "app",
    created_at: datetime | str | None = None,
    reserved: bool = False,
) -> Decision:
    """A decision from its facts, as `decision_record` takes them, not yet stored. Raises FeedbackRefused.

    reserved: the metadata may hold the keys that only Ratchet writes, as far as they can be read back.
    """
    check = Check()
    key = identity_of(id)
    values: dict[str, Any] = {
        "agent": check.agent(agent),
        "messages": check.messages(messages),
        "response": check.text("response", response),
        "state": None if state is None else check.json("state", state),
        "candidates": None if candidates is None else check.candidates(candidates),
        "policy": check.text("policy", policy, limit=200),
        "unit": check.text("unit", unit, limit=200),
        "arm": check.text("arm", arm, limit=200),
        "propensity": check.number("propensity", propensity, 0.0, 1.0, open_low=True),
        "run_id": check.text("run_id", run_id, limit=200),
        "latency_ms": check.number("latency_ms", latency_ms, 0.0, 1e12),
        "tokens_in": check.whole("tokens_in", tokens_in, 0, 2**31 - 1),
        "tokens_out": check.whole("tokens_out", tokens_out, 0, 2**31 - 1),
        "tags": check.names("tags", tags),
        "metadata": check.mapping("metadata", metadata),
        "source": check.text("source", source, limit=40),
    }
    check.drawn(values["candidates"], response, values["propensity"])
    at = check.time("created_at", created_at)
    # None where it is refused already, as deeper than can be read
    check_reserved(check, response, values["metadata"] or {}, reserved)
    check.done("decision")
    asked = prompt_hash(values["agent"], values["messages"])
    return Decision(
        id=key,
        **values,
        trace_id=trace.pk if trace else None,
        prompt_hash=asked,
        # the prompt, by far the longest of it, is in there already
        body_hash=body_hash({**values, "agent": name_hashed(values["agent"]), "messages": asked}),
        ratings_wanted=ratings_wanted(values["agent"], key),
        asking_worth=policy_doubt(values["candidates"], values["propensity"]),
        created_at=at or timezone.now(),
    )


def check_reserved(check: Check, response: Any, metadata: Mapping[str, Any], reserved: bool) -> None:
    """Refuse the keys of metadata that only Ratchet writes; `reserved`: only where they cannot be read back."""
    if reserved:
        if fault := metadata_fault(response, metadata):
            check.fields["metadata"] = fault
        return
    if found := [name for name in RESERVED if name in metadata]:
        check.fields["metadata"] = (
            f"expected other keys than {' and '.join(RESERVED)}, which only Ratchet writes; found "
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
    thumb: str = "",
    stars: int | None = None,
    score: float | None = None,
    correction: str | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    rater_kind: str = RaterKind.HUMAN,
    created_at: datetime | None = None,
) -> Rating:
    """A rating from what `rating_submit` takes, not yet stored and in no chain. Raises FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    values: dict[str, Any] = {
        "rater": check.text("rater", rater, limit=200, required=True),
        "rater_kind": check.choice("rater_kind", rater_kind, RaterKind.values),
        "thumb": check.choice("thumb", thumb, ["", *Thumb.values]),
        "stars": check.whole("stars", stars, 1, 5),
        "score": check.number("score", score, 0.0, 1.0),
        "correction": None if correction is None else check.text("correction", correction, required=True),
        "tags": check.names("tags", tags),
        "notes": check.text("notes", notes, limit=20_000),
    }
    said = [values["thumb"], values["tags"], values["notes"]]
    # what was sent and is wrong is no silence: it has its own fault
    if not any(said) and (stars, score, correction) == (None, None, None):
        check.fields.setdefault(
            "thumb", "expected at least one of thumb, stars, score, correction, tags, notes"
        )
    check.done("rating")
    return Rating(
        id=key,
        decision_id=decision,
        **values,
        body_hash=body_hash({"decision": str(decision), **values}),
        created_at=created_at or timezone.now(),
    )


def withdrawal_build(
    said: Rating | Comparison, id: uuid.UUID | str | None, created_at: datetime | None
) -> Rating | Comparison:
    """The row that takes another one back, not yet stored."""
    row: Rating | Comparison
    if isinstance(said, Rating):
        row = Rating(decision_id=said.decision_id)
    else:
        row = Comparison(left_id=said.left_id, right_id=said.right_id)
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
    preference: str,
    rater: str,
    id: uuid.UUID | str | None,
    tags: Sequence[str],
    notes: str,
    rater_kind: str,
    created_at: datetime | None,
) -> Comparison:
    """A comparison from what `comparison_submit` takes, not yet stored and in no chain. Raises FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    if left.pk == right.pk:
        check.fields["right"] = "expected another decision than left"
    elif left.agent != right.agent or left.prompt_hash != right.prompt_hash:
        check.fields["right"] = "expected a decision of the same agent on the same prompt as left"
    values: dict[str, Any] = {
        "preference": check.choice("preference", preference, Preference.values),
        "rater": check.text("rater", rater, limit=200, required=True),
        "rater_kind": check.choice("rater_kind", rater_kind, RaterKind.values),
        "tags": check.names("tags", tags),
        "notes": check.text("notes", notes, limit=20_000),
    }
    check.done("comparison")
    return Comparison(
        id=key,
        left_id=left.pk,
        right_id=right.pk,
        **values,
        body_hash=body_hash({"left": str(left.pk), "right": str(right.pk), **values}),
        created_at=created_at or timezone.now(),
    )


def outcome_build(
    *,
    decision: uuid.UUID,
    name: str,
    value: float | bool,
    at: datetime | str | None,
    id: uuid.UUID | str | None,
    created_at: datetime | None,
) -> Outcome:
    """An outcome from what `outcome_record` takes, not yet stored. Raises FeedbackRefused."""
    check = Check()
    key = identity_of(id)
    slug = check.slug("name", name, "ticket_reopened")
    number = check.number("value", float(value) if isinstance(value, bool) else value, -1e308, 1e308)
    if number is None and "value" not in check.fields:
        check.fields["value"] = "expected a number, found nothing"
    happened = check.time("at", at)
    check.done("outcome")
    assert number is not None  # refused above otherwise
    body = {"decision": str(decision), "name": slug, "value": number, "at": happened}
    return Outcome(
        id=key,
        decision_id=decision,
        name=slug,
        value=number,
        at=happened or timezone.now(),
        body_hash=body_hash(body),
        created_at=created_at or timezone.now(),
    )
