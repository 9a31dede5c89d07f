"""The only writers of feedback: decision_record, rating_submit, comparison_submit, outcome_record, and withdrawals."""

from __future__ import annotations

import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from feedback.models import (
    SLUG_PATTERN,
    Comparison,
    Decision,
    Outcome,
    Preference,
    RaterKind,
    Rating,
    Thumb,
    prompt_hash,
)

MAX_TEXT = 1_000_000
"""Longest response, correction or prompt accepted, in characters."""
MAX_TAGS = 50
BULK_BATCH = 1000
"""Rows per INSERT when many decisions are written at once."""


class FeedbackRefused(ValueError):
    """A write that cannot be accepted; `fields` says per field what was expected and what was found."""

    code = "invalid"

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


class FeedbackConflict(FeedbackRefused):
    """The same id was sent before with a different body."""

    code = "conflict"


class DecisionUnknown(FeedbackRefused):
    """The decision that was named does not exist."""

    code = "not_found"


@dataclass(frozen=True)
class Written:
    """A stored row and whether this call made it (False: the same write had arrived before)."""

    row: Any
    created: bool


@dataclass
class _Check:
    """Collects what is wrong with a write, so that a caller sees every fault at once."""

    fields: dict[str, str] = field(default_factory=dict)

    def text(self, name: str, value: Any, *, limit: int = MAX_TEXT, required: bool = False) -> str:
        if not isinstance(value, str):
            self.fields[name] = f"expected text, found {type(value).__name__}"
            return ""
        if "\x00" in value:
            # PostgreSQL cannot store it and SQLite would cut the text there
            self.fields[name] = "expected text without NUL characters"
        elif len(value) > limit:
            self.fields[name] = f"expected at most {limit:,} characters, found {len(value):,}"
        elif required and not value.strip():
            self.fields[name] = "expected text, found nothing"
        else:
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                self.fields[name] = (
                    f"expected valid Unicode, found a lone surrogate at character {error.start}"
                )
        return value

    def number(
        self, name: str, value: Any, low: float, high: float, *, open_low: bool = False
    ) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.fields[name] = f"expected a number, found {value!r}"
            return None
        if value < low or value > high or (open_low and value == low):
            self.fields[name] = (
                f"expected a number in {'(' if open_low else '['}{low:g}, {high:g}], found {value!r}"
            )
        return float(value)

    def whole(self, name: str, value: Any, low: int, high: int) -> int | None:
        number = self.number(name, value, low, high)
        if number is not None and number != int(number):
            self.fields[name] = f"expected a whole number, found {value!r}"
        return None if number is None else int(number)

    def names(self, name: str, value: Any) -> list[str]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            self.fields[name] = f"expected a list of texts, found {value!r}"[:200]
            return []
        if len(value) > MAX_TAGS or any(len(v) > 100 or "\x00" in v for v in value):
            self.fields[name] = f"expected at most {MAX_TAGS} tags of at most 100 characters"
            return []
        return list(dict.fromkeys(v.strip() for v in value if v.strip()))

    def json(self, name: str, value: Any) -> Any:
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            self.fields[name] = f"expected JSON, found {error}"
            return None
        if len(text) > MAX_TEXT:
            self.fields[name] = f"expected at most {MAX_TEXT:,} characters of JSON, found {len(text):,}"
        if "\\u0000" in text or re.search(r"\\ud[89ab][0-9a-f]{2}(?!\\ud[c-f])", text):
            self.fields[name] = "expected text without NUL characters and lone surrogates"
        return value

    def agent(self, value: Any) -> str:
        if not isinstance(value, str) or not re.fullmatch(SLUG_PATTERN, value):
            self.fields["agent"] = (
                f"expected a slug of 1 to 64 lower-case letters, digits, - and _, found {value!r}"[:200]
            )
            return ""
        return value

    def choice(self, name: str, value: Any, allowed: Sequence[str]) -> str:
        if value not in allowed:
            self.fields[name] = f"expected one of {', '.join(a for a in allowed if a)}; found {value!r}"[:200]
            return ""
        return str(value)

    def messages(self, value: Any) -> list[dict[str, Any]]:
        if isinstance(value, str):
            value = [{"role": "user", "content": value}]
        if not isinstance(value, list) or not value:
            self.fields["messages"] = "expected a list of at least one {role, content}"
            return []
        for index, message in enumerate(value):
            if (
                not isinstance(message, Mapping)
                or not isinstance(message.get("role"), str)
                or not isinstance(message.get("content"), (str, list, type(None)))
            ):
                self.fields["messages"] = f"message {index}: expected {{role, content}}, found {message!r}"[
                    :200
                ]
                return []
        self.json("messages", value)
        return [dict(m) for m in value]

    def done(self, what: str) -> None:
        if self.fields:
            raise FeedbackRefused(
                f"{what} refused: " + "; ".join(f"{name}: {fault}" for name, fault in self.fields.items()),
                self.fields,
            )


def _identity(value: uuid.UUID | str | None) -> uuid.UUID:
    if value is None:
        return uuid.uuid4()
    if isinstance(value, uuid.UUID):
        return value
    try:
        return uuid.UUID(value)
    except (ValueError, AttributeError, TypeError) as error:
        raise FeedbackRefused(
            "id refused: expected a UUID", {"id": f"expected a UUID, found {value!r}"[:200]}
        ) from error


def _body_hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()


def _write(row: Any) -> Written:
    """Insert a row whose id may have been sent before: the same body is the same write, another is a conflict."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
    except IntegrityError:
        earlier = type(row)._default_manager.filter(pk=row.pk).first()
        if earlier is None:
            raise
        if earlier.body_hash != row.body_hash:
            name = type(row).__name__.lower()
            raise FeedbackConflict(
                f"{name} {row.pk} was recorded before with a different body",
                {"id": "already used for another write"},
            ) from None
        return Written(earlier, created=False)
    return Written(row, created=True)


def _decision_build(
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
    source: str = "app",
    created_at: datetime | None = None,
) -> Decision:
    check = _Check()
    key = _identity(id)
    values: dict[str, Any] = {
        "agent": check.agent(agent),
        "messages": check.messages(messages),
        "response": check.text("response", response),
        "state": None if state is None else check.json("state", state),
        "candidates": None if candidates is None else _candidates(check, candidates),
        "policy": check.text("policy", policy, limit=200),
        "unit": check.text("unit", unit, limit=200),
        "arm": check.text("arm", arm, limit=200),
        "propensity": check.number("propensity", propensity, 0.0, 1.0, open_low=True),
        "run_id": check.text("run_id", run_id, limit=200),
        "latency_ms": check.number("latency_ms", latency_ms, 0.0, 1e12),
        "tokens_in": check.whole("tokens_in", tokens_in, 0, 2**31 - 1),
        "tokens_out": check.whole("tokens_out", tokens_out, 0, 2**31 - 1),
        "tags": check.names("tags", tags),
        "metadata": check.json("metadata", dict(metadata or {})),
        "source": check.text("source", source, limit=40),
    }
    check.done("decision")
    return Decision(
        id=key,
        **values,
        prompt_hash=prompt_hash(values["agent"], values["messages"]),
        body_hash=_body_hash(values),
        created_at=created_at or timezone.now(),
    )


def _candidates(check: _Check, value: Any) -> Any:
    """Listed responses: texts, or {response, score} with a score in [0, 1]."""
    if not isinstance(value, (list, tuple)):
        check.fields["candidates"] = f"expected a list, found {type(value).__name__}"
        return None
    for index, candidate in enumerate(value):
        if isinstance(candidate, str):
            check.text(f"candidates[{index}]", candidate)
        elif isinstance(candidate, Mapping) and isinstance(candidate.get("response"), str):
            check.number(f"candidates[{index}].score", candidate.get("score"), 0.0, 1.0)
        else:
            check.fields["candidates"] = f"candidate {index}: expected a text or {{response, score}}"
    return check.json("candidates", list(value))


def decision_record(**facts: Any) -> Written:
    """Record one decision.

    Facts: agent (slug), messages (list of {role, content}, or one text), response; optionally id (UUID, makes a
    retry safe), state, candidates, policy, unit, arm, propensity in (0, 1], run_id, latency_ms, tokens_in,
    tokens_out, tags, metadata, source, created_at.

    Raises FeedbackRefused with a fault per field; FeedbackConflict when the id was used for another decision.
    """
    return _write(_decision_build(**facts))


def decisions_record(items: Iterable[Mapping[str, Any]]) -> list[Written]:
    """Record many decisions in one transaction, all or none; ids seen before with the same body are kept."""
    rows = [_decision_build(**item) for item in items]
    written: list[Written] = []
    with transaction.atomic():
        for start in range(0, len(rows), BULK_BATCH):
            batch = {row.pk: row for row in rows[start : start + BULK_BATCH]}
            known = set(Decision.objects.filter(pk__in=batch).values_list("pk", flat=True))
            Decision.objects.bulk_create(
                (r for pk, r in batch.items() if pk not in known), ignore_conflicts=True
            )
            stored = dict(Decision.objects.filter(pk__in=batch).values_list("pk", "body_hash"))
            for row in rows[start : start + BULK_BATCH]:
                if stored[row.pk] != row.body_hash:
                    raise FeedbackConflict(
                        f"decision {row.pk} was recorded before with a different body",
                        {"id": "already used for another write"},
                    )
                written.append(Written(row, created=row.pk not in known))
    return written


def _decision_get(decision: Decision | uuid.UUID | str) -> Decision:
    if isinstance(decision, Decision):
        return decision
    found = Decision.objects.filter(pk=_identity(decision)).first()
    if found is None:
        raise DecisionUnknown(f"no decision {decision}", {"decision": "does not exist"})
    return found


def _append(row: Rating | Comparison, chain: dict[str, Any]) -> Written:
    """Append to the chain of one rater's words on one subject; the newest row of a chain is the current one.

    Two writers at once would both name the same predecessor: the one-to-one `supersedes` (and the unique first
    row) lets one of them in, and the other looks again.
    """
    model = type(row)
    for _ in range(20):
        row.supersedes = model._default_manager.filter(**chain, superseded_by__isnull=True).first()
        try:
            with transaction.atomic():
                written = _write(row)
                if written.created and isinstance(row, Rating):
                    _count_human(row)
                return written
        except IntegrityError:
            continue
    raise FeedbackRefused(
        f"{model.__name__.lower()} refused: too many writers at once on {chain}; send it again"
    )


def _count_human(row: Rating) -> None:
    """Keep the decision's number of standing ratings by people true. A change, not a recount: the row's place in its
    chain is certain, while a recount would miss what another transaction is about to commit."""
    before = int(row.supersedes is not None and not row.supersedes.withdrawn and _human(row.supersedes))
    change = int(not row.withdrawn and _human(row)) - before
    if change:
        Decision.objects.filter(pk=row.decision_id).update(ratings_human=F("ratings_human") + change)


def _human(row: Rating) -> bool:
    return row.rater_kind == RaterKind.HUMAN


def rating_submit(
    *,
    decision: Decision | uuid.UUID | str,
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
) -> Written:
    """Store what one rater thinks of one decision; it supersedes what the same rater said of it before.

    thumb "up" | "down", stars 1..5, score in [0, 1], correction (the response it should have been), tags, notes:
    at least one of them. Raises FeedbackRefused with a fault per field, DecisionUnknown, FeedbackConflict.
    """
    check = _Check()
    subject = _decision_get(decision)
    key = _identity(id)
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
    if not any(said) and all(values[name] is None for name in ("stars", "score", "correction")):
        check.fields.setdefault(
            "thumb", "expected at least one of thumb, stars, score, correction, tags, notes"
        )
    check.done("rating")
    row = Rating(
        id=key,
        decision=subject,
        **values,
        body_hash=_body_hash({"decision": str(subject.pk), **values}),
        created_at=created_at or timezone.now(),
    )
    return _append(row, {"decision": subject, "rater": values["rater"]})


def rating_withdraw(rating: Rating) -> Written:
    """Take a rating back (undo). It stays on record; what stood before it does not come back by itself."""
    row = Rating(
        decision_id=rating.decision_id,
        rater=rating.rater,
        rater_kind=rating.rater_kind,
        withdrawn=True,
        supersedes=rating,
    )
    try:
        with transaction.atomic():
            written = _write(row)
            _count_human(row)
            return written
    except IntegrityError:
        raise FeedbackConflict(
            "this rating was changed or taken back already; reload to see what stands"
        ) from None


def comparison_submit(
    *,
    left: Decision | uuid.UUID | str,
    right: Decision | uuid.UUID | str,
    preference: Literal["left", "right", "tie", "both_bad"] | str,
    rater: str,
    id: uuid.UUID | str | None = None,
    tags: Sequence[str] = (),
    notes: str = "",
    rater_kind: str = RaterKind.HUMAN,
    created_at: datetime | None = None,
) -> Written:
    """Store one rater's preference between two decisions of one agent on the same prompt.

    Raises FeedbackRefused with a fault per field, DecisionUnknown, FeedbackConflict.
    """
    check = _Check()
    one, other = _decision_get(left), _decision_get(right)
    key = _identity(id)
    if one.pk == other.pk:
        check.fields["right"] = "expected another decision than left"
    elif one.agent != other.agent or one.prompt_hash != other.prompt_hash:
        check.fields["right"] = "expected a decision of the same agent on the same prompt as left"
    values: dict[str, Any] = {
        "preference": check.choice("preference", preference, Preference.values),
        "rater": check.text("rater", rater, limit=200, required=True),
        "rater_kind": check.choice("rater_kind", rater_kind, RaterKind.values),
        "tags": check.names("tags", tags),
        "notes": check.text("notes", notes, limit=20_000),
    }
    check.done("comparison")
    row = Comparison(
        id=key,
        left=one,
        right=other,
        **values,
        body_hash=_body_hash({"left": str(one.pk), "right": str(other.pk), **values}),
        created_at=created_at or timezone.now(),
    )
    return _append(row, {"left": one, "right": other, "rater": values["rater"]})


def outcome_record(
    *,
    decision: Decision | uuid.UUID | str,
    name: str,
    value: float | bool,
    at: datetime | None = None,
    id: uuid.UUID | str | None = None,
) -> Written:
    """Store a measured fact about a decision. Raises FeedbackRefused, DecisionUnknown, FeedbackConflict."""
    check = _Check()
    subject = _decision_get(decision)
    key = _identity(id)
    if not isinstance(name, str) or not re.fullmatch(SLUG_PATTERN, name):
        check.fields["name"] = f"expected a slug such as ticket_reopened, found {name!r}"[:200]
    number = check.number("value", float(value) if isinstance(value, bool) else value, -1e308, 1e308)
    if number is None and "value" not in check.fields:
        check.fields["value"] = "expected a number, found nothing"
    check.done("outcome")
    body = {"decision": str(subject.pk), "name": name, "value": number, "at": at}
    return _write(
        Outcome(
            id=key,
            decision=subject,
            name=name,
            value=number,
            at=at or timezone.now(),
            body_hash=_body_hash(body),
        )
    )
