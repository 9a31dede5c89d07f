"""One answer for one id: a request that names its decision's id claims it before a model works on it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.db import DatabaseError, connection
from django.utils import timezone

from backend.logs import OutageLog
from rl.models import AnswerClaim
from rl.serving.base import ServingRefused

LEASE = timedelta(minutes=10)
"""A claim expires after this time. An answer and the write of its decision take less."""

WAIT_MS = 250
"""Longest wait for another writer of SQLite; then the request is answered without a claim."""


class KeyReused(ServingRefused):
    """An Idempotency-Key or X-Ratchet-Decision that was sent before with another request."""

    def __init__(self, decision: uuid.UUID) -> None:
        super().__init__(
            f"decision {decision} belongs to another request: send a new Idempotency-Key or X-Ratchet-Decision "
            "with a new request, or the same body with the same one",
            code="idempotency_key_reused",
        )


class InProgress(ServingRefused):
    """The same request with the same id is being answered now."""

    retry_after_s = 1

    def __init__(self, decision: uuid.UUID) -> None:
        super().__init__(
            f"decision {decision} is being answered: send the same request again in {self.retry_after_s} s",
            code="request_in_progress",
        )


@dataclass
class Claim:
    """`kept` is set once a decision is recorded; the id is free again otherwise."""

    kept: bool = False


@contextmanager
def claimed(decision: uuid.UUID | None, request: str, outage: OutageLog) -> Iterator[Claim]:
    """Hold the id of a decision for a request (its hash) while it is answered. None: nobody else knows the id.

    Raises KeyReused where another request holds it, InProgress where the same one does. Without a database that takes
    writes nothing is held.
    """
    claim, attempt = Claim(), uuid.uuid4()
    held: uuid.UUID | None = None
    if decision is not None:
        try:
            _take(decision, request, attempt)
            held = decision
        except DatabaseError as error:
            outage.report("a request is answered without a claim on its id", error)
    try:
        yield claim
    finally:
        if held is not None and not claim.kept:
            try:
                AnswerClaim.objects.filter(pk=held, attempt=attempt).delete()
            except DatabaseError as error:
                outage.report(f"decision {held} cannot be tried again before its claim ends", error)


def claims_expire() -> None:
    """Delete claims that stand no longer."""
    AnswerClaim.objects.filter(until__lt=timezone.now()).delete()


def _take(decision: uuid.UUID, request: str, attempt: uuid.UUID) -> None:
    now = timezone.now()
    mine = {"request": request, "attempt": attempt, "until": now + LEASE}
    with _impatient():
        AnswerClaim.objects.bulk_create([AnswerClaim(decision=decision, **mine)], ignore_conflicts=True)
        # Compare-and-swap: of those who find a claim that ended, one takes it over.
        AnswerClaim.objects.filter(pk=decision, until__lt=now).update(**mine)
    found = AnswerClaim.objects.filter(pk=decision).first()
    if found is not None and found.attempt == attempt:
        return
    if found is not None and found.request != request:
        raise KeyReused(decision)
    raise InProgress(decision)


@contextmanager
def _impatient() -> Iterator[None]:
    """Within it, SQLite waits WAIT_MS for other writers."""
    if connection.vendor != "sqlite":
        yield
        return
    with connection.cursor() as cursor:
        (before,) = cursor.execute("PRAGMA busy_timeout").fetchone()
        cursor.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {before}")
