"""The only writers of feedback: decisions, ratings, comparisons, outcomes, and withdrawals of ratings."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

from django.conf import settings
from django.db import IntegrityError, transaction

from feedback.models import (
    AgentSettings,
    Comparison,
    Decision,
    Outcome,
    RaterKind,
    Rating,
    Trace,
)
from feedback.storage.factories import (
    Subject,
    comparison_build,
    decision_build,
    identity_of,
    outcome_build,
    rating_build,
    withdrawal_build,
)
from feedback.storage.masking import masks_in_use
from feedback.storage.sampling import priority_update
from feedback.storage.sql import NoDecision, chunks, rating_insert, ratings_human_change, row_insert
from feedback.storage.tombstones import decisions_erased, erased_refusal, erased_refuse
from feedback.storage.validation import DecisionUnknown as DecisionUnknown
from feedback.storage.validation import FeedbackConflict as FeedbackConflict
from feedback.storage.validation import FeedbackRefused

BULK_BATCH = 1000
"""Rows per INSERT when many decisions are written at once."""


R = TypeVar("R", Decision, Rating, Comparison, Outcome, Trace)
W = TypeVar("W", Rating, Comparison)


@dataclass(frozen=True)
class WriteResult(Generic[R]):
    """A stored row, and whether this call created it (False: the same write arrived before)."""

    row: R
    created: bool


def row_write(row: R) -> WriteResult[R]:
    """Insert a row, or return the stored one with the same id and body.

    Raises FeedbackConflict if the id was used for another body, Erased if the row was erased.
    """
    erased_refuse(row)
    try:
        # Inside a transaction, a savepoint keeps it usable after an IntegrityError.
        with transaction.atomic() if transaction.get_connection().in_atomic_block else nullcontext():
            row_insert(row)
    except IntegrityError:
        earlier = _earlier(row)
        if earlier is None:
            raise
        return earlier
    return WriteResult(row, created=True)


def _earlier(row: R) -> WriteResult[R] | None:
    """The row stored before under this id, if any. Raises FeedbackConflict if its body differs."""
    earlier = type(row)._default_manager.filter(pk=row.pk).first()
    if earlier is None:
        return None
    is_unrecorded(row, earlier.body_hash)
    return WriteResult(earlier, created=False)


def is_unrecorded(row: Any, before: str | None) -> bool:
    """True if nothing was recorded under a row's id before. Raises FeedbackConflict where something else was.

    before: the hash of the body that was recorded under the id.
    """
    if before is None:
        return True
    if before != row.body_hash:
        raise FeedbackConflict(
            f"{type(row).__name__.lower()} {row.pk} was recorded before with a different body",
            {"id": "already used for another write"},
        )
    return False


def agent_set_up(agent: str) -> None:
    """Create an agent's settings, with defaults, before its first decision."""
    AgentSettings.objects.get_or_create(agent=agent, defaults=settings.FEEDBACK_AGENT_DEFAULTS)


def decision_record(**facts: Any) -> WriteResult[Decision]:
    """Record one decision.

    facts: fields of `DecisionFacts`. Required: agent (slug), messages (list of {role, content}, or a text), response.
    Optional: id (UUID, makes a retry safe), created_at and the others.

    Raises FeedbackRefused with a fault per field, FeedbackConflict if the id was used for another decision.
    """
    return row_write(decision_build(**facts))


def decisions_record(items: Iterable[Mapping[str, Any]]) -> list[WriteResult[Decision]]:
    """Record many decisions in one transaction, all or none. Decisions recorded before stay as they are."""
    rows = [decision_build(**item) for item in items]
    for pk in decisions_erased(rows):
        raise erased_refusal("decision", pk)
    results: list[WriteResult[Decision]] = []
    with transaction.atomic():
        for chunk in chunks(rows, BULK_BATCH):
            batch = {row.pk: row for row in chunk}
            existing_ids = set(Decision.objects.filter(pk__in=batch).values_list("pk", flat=True))
            Decision.objects.bulk_create(
                (r for pk, r in batch.items() if pk not in existing_ids), ignore_conflicts=True
            )
            stored = dict(Decision.objects.filter(pk__in=batch).values_list("pk", "body_hash"))
            for row in chunk:
                is_unrecorded(row, stored[row.pk])
                results.append(WriteResult(row, created=row.pk not in existing_ids))
    return results


def _subject(decision: Decision | uuid.UUID | str, name: str = "decision") -> Subject:
    """The decision in the field `name`. Raises FeedbackRefused, DecisionUnknown."""
    if isinstance(decision, Decision):
        return Subject(decision.pk, decision.agent, decision.prompt_hash)
    key = identity_of(decision, name)
    found = Decision.objects.filter(pk=key).order_by().values_list("pk", "agent", "prompt_hash")[:1]
    for row in found:
        return Subject(*row)
    raise _unknown(key, name)


def _append(row: W, chain: Mapping[str, object]) -> WriteResult[W]:
    """Append to the chain of one rater's rows on one subject; the newest row of a chain stands.

    Most raters rate a subject once, so the row is first inserted as the start of a chain. If the database refuses a
    second start, the chain is looked up. Of two simultaneous writers, the one-to-one `supersedes` admits one; the
    other tries again.
    """
    model = type(row)
    replaces_human = False
    for _ in range(20):
        try:
            if isinstance(row, Rating):
                standing = rating_insert(row, rating_change(row, replaces_human))
                priority_update(row.decision_id, standing)
            else:
                with transaction.atomic():
                    row_insert(row)
            return WriteResult(row, created=True)
        except NoDecision:
            raise _unknown(row.decision_id) from None  # type: ignore[attr-defined]  # Ratings only.
        except IntegrityError:
            if (earlier := _earlier(row)) is not None:
                return earlier
        row.supersedes_id, replaces_human = None, False
        newest = model._default_manager.filter(**chain, superseded_by__isnull=True).order_by()
        for pk, withdrawn, kind in newest.values_list("pk", "withdrawn", "rater_kind")[:1]:
            row.supersedes_id, replaces_human = pk, not withdrawn and kind == RaterKind.HUMAN
        if row.supersedes_id is None and isinstance(row, Rating):
            _subject(row.decision_id)  # Without a chain, the decision may be missing.
    raise FeedbackRefused(
        f"{model.__name__.lower()} refused: too many simultaneous writes by one rater on one subject; send it again"
    )


def rating_change(row: Rating, before: bool) -> int:
    """Change in a decision's number of standing human ratings; `before`: the superseded row counted.

    A recount would miss rows that another transaction is about to commit.
    """
    return int(counts_in_progress(row)) - int(before)


def counts_in_progress(row: Rating) -> bool:
    """True if a standing rating is a human one."""
    return not row.withdrawn and row.rater_kind == RaterKind.HUMAN


def _unknown(pk: uuid.UUID, name: str = "decision") -> DecisionUnknown:
    return DecisionUnknown(
        f"no decision {pk}: it was never recorded, or left out by the agent's collection_rate",
        {name: "does not exist"},
    )


def rating_submit(
    *, decision: Decision | uuid.UUID | str, rater: str, rater_kind: str = RaterKind.HUMAN, **said: Any
) -> WriteResult[Rating]:
    """Store one rater's rating of one decision; it supersedes the rater's earlier one.

    said: fields of `RatingFacts`. Required: one of thumb ("up", "down"), stars (1 to 5), score (in [0, 1]), correction,
    tags, notes. Optional: id (UUID, makes a retry safe), created_at.

    Raises FeedbackRefused with a fault per field, DecisionUnknown, FeedbackConflict.
    """
    subject = decision.pk if isinstance(decision, Decision) else identity_of(decision, "decision")
    agent = _agent_of(decision) if masks_in_use() else ""
    row = rating_build(decision=subject, agent=agent, rater=rater, rater_kind=rater_kind, **said)
    if row.rater_kind != RaterKind.HUMAN:
        _subject(decision)  # For human ratings, the update of the count checks it.
    return _append(row, {"decision": subject, "rater": row.rater})


def _agent_of(decision: Decision | uuid.UUID | str) -> str:
    if isinstance(decision, Decision):
        return decision.agent
    return Decision.objects.filter(pk=identity_of(decision)).values_list("agent", flat=True).first() or ""


def rating_withdraw(
    rating: Rating, *, id: uuid.UUID | str | None = None, created_at: datetime | None = None
) -> WriteResult[Rating]:
    """Withdraw a rating (undo). It stays on record, and the rating before it does not stand again.

    Raises FeedbackConflict if the rating was superseded or withdrawn already.
    """
    return _withdraw(rating, id, created_at)


def comparison_withdraw(
    comparison: Comparison, *, id: uuid.UUID | str | None = None, created_at: datetime | None = None
) -> WriteResult[Comparison]:
    """As `rating_withdraw`, for comparisons."""
    return _withdraw(comparison, id, created_at)


def _withdraw(said: W, id: uuid.UUID | str | None, created_at: datetime | None) -> WriteResult[W]:
    row = withdrawal_build(said, id, created_at)
    try:
        with transaction.atomic():
            written = row_write(row)
            if written.created and isinstance(said, Rating) and isinstance(row, Rating):
                change = rating_change(row, counts_in_progress(said))
                priority_update(row.decision_id, ratings_human_change(row.decision_id, change))
            return written
    except IntegrityError:
        name = type(said).__name__.lower()
        raise FeedbackConflict(
            f"this {name} was changed or undone already; reload to see the present state"
        ) from None


def comparison_submit(
    *,
    left: Decision | uuid.UUID | str,
    right: Decision | uuid.UUID | str,
    preference: Literal["left", "right", "tie", "both_bad"] | str,
    rater: str,
    **said: Any,
) -> WriteResult[Comparison]:
    """Store one rater's preference between two decisions of one agent on the same prompt.

    said: further fields of `ComparisonFacts`, id (UUID, makes a retry safe), created_at.

    Raises FeedbackRefused with a fault per field, DecisionUnknown, FeedbackConflict.
    """
    one, other = _subject(left, "left"), _subject(right, "right")
    row = comparison_build(left=one, right=other, preference=preference, rater=rater, **said)
    return _append(row, {"left": one.pk, "right": other.pk, "rater": row.rater})


def outcome_record(
    *,
    decision: Decision | uuid.UUID | str,
    name: str,
    value: float | bool,
    at: datetime | str | None = None,
    **more: Any,
) -> WriteResult[Outcome]:
    """Store a measured fact about a decision.

    more: further fields of `OutcomeFacts`, id (UUID, makes a retry safe), created_at.

    Raises FeedbackRefused with a fault per field, DecisionUnknown, FeedbackConflict.
    """
    subject = _subject(decision)
    return row_write(outcome_build(decision=subject.pk, name=name, value=value, at=at, **more))
