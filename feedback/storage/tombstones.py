"""Tombstones: salted hashes of what was erased, so that no spool, retry or file brings it back. They hold no text.

A decision and a trace are known by their id for ever. A unit is known until the moment it was erased: what the same
user does afterwards is recorded, what was decided before is not.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime

from django.db import IntegrityError, transaction

from feedback.cache import TTLCache
from feedback.models import Decision, Tombstone, Trace
from feedback.storage.sql import chunks
from feedback.storage.validation import FeedbackConflict

Kind = Tombstone.Kind
_salt: TTLCache[bytes] = TTLCache()

ABSENCE_S = 1.0
"""Seconds for which a process caches that nothing was ever erased here; the first erasure waits as long. Until then
recording costs no query."""
_absent_at = float("-inf")
"""Time (`time.monotonic`) at which this process last looked for a salt and there was none."""

ERASURE_REASON = "erased here before: not brought back"
"""Reason given for such rows in an import's report."""


class ErasedConflict(FeedbackConflict):
    """A write of something that was erased. A conflict, so that no spool keeps its text as refused."""


def tombstones_announce() -> None:
    """Make every process look for tombstones from now on. Before the first erasure of an installation this waits
    ABSENCE_S; outside of the transaction that erases, or the others would not see it."""
    if _salt_stored(at_once=True) is None:
        _create_salt()
        time.sleep(ABSENCE_S)


def tombstones_make(decisions: Iterable[uuid.UUID], traces: Iterable[uuid.UUID], unit: str) -> None:
    """Write the tombstones of what is being erased, in the caller's transaction."""
    named = [(Kind.DECISION, str(pk)) for pk in decisions] + [(Kind.TRACE, str(pk)) for pk in traces]
    salt = _create_salt()
    rows = [Tombstone(kind=kind, digest=_digest(salt, kind, name)) for kind, name in named]
    Tombstone.objects.bulk_create(rows, batch_size=200, ignore_conflicts=True)
    # a unit that is erased again is erased up to now
    unit_digest = _digest(salt, Kind.UNIT, unit)
    Tombstone.objects.filter(kind=Kind.UNIT, digest=unit_digest).delete()
    Tombstone.objects.create(kind=Kind.UNIT, digest=unit_digest)


def decisions_erased(rows: Sequence[Decision], untimed: Iterable[uuid.UUID] = ()) -> set[uuid.UUID]:
    """Decisions among these, not stored yet, that were erased. untimed: without a time of their own; of an erased unit
    they count as recorded before the erasure."""
    salt = _salt_stored()
    if salt is None or not rows:
        return set()
    ids = {_digest(salt, Kind.DECISION, str(row.pk)): row.pk for row in rows}
    units: dict[str, list[Decision]] = {}
    for row in rows:
        if row.unit:
            units.setdefault(_digest(salt, Kind.UNIT, row.unit), []).append(row)
    found: set[uuid.UUID] = set()
    before = set(untimed)
    for kind, digest, at in _tombstone_rows([*ids, *units]):
        if kind == Kind.DECISION and digest in ids:
            found.add(ids[digest])
        elif kind == Kind.UNIT:
            found |= {row.pk for row in units.get(digest, ()) if row.pk in before or row.created_at <= at}
    return found


def ids_erased(decisions: Iterable[uuid.UUID]) -> set[uuid.UUID]:
    """Former ids of erased decisions, among these."""
    salt = _salt_stored()
    if salt is None:
        return set()
    ids = {_digest(salt, Kind.DECISION, str(pk)): pk for pk in decisions}
    return {ids[digest] for kind, digest, _ in _tombstone_rows(list(ids)) if kind == Kind.DECISION}


def traces_erased(traces: Sequence[uuid.UUID]) -> set[uuid.UUID]:
    """Erased traces, among these."""
    salt = _salt_stored()
    if salt is None or not traces:
        return set()
    ids = {_digest(salt, Kind.TRACE, str(pk)): pk for pk in traces}
    return {ids[digest] for kind, digest, _ in _tombstone_rows(list(ids)) if kind == Kind.TRACE}


def erased_refuse(row: object) -> None:
    """Raises Erased where a row that is about to be stored is a decision or a trace that was erased."""
    if isinstance(row, Decision) and decisions_erased([row]):
        raise erased_refusal("decision", row.pk)
    if isinstance(row, Trace) and traces_erased([row.pk]):
        raise erased_refusal("trace", row.pk)


def erased_refusal(what: str, pk: uuid.UUID) -> ErasedConflict:
    return ErasedConflict(
        f"{what} {pk} is erased and not recorded again; an app that keeps its own copy deletes it too",
        {"id": "erased"},
    )


def _tombstone_rows(digests: Sequence[str]) -> list[tuple[str, str, datetime]]:
    found: list[tuple[str, str, datetime]] = []
    for chunk in chunks(digests):
        rows = Tombstone.objects.filter(digest__in=chunk).order_by()
        found += rows.values_list("kind", "digest", "created_at")
    return found


def _digest(salt: bytes, kind: str, name: str) -> str:
    return hmac.new(salt, f"{kind}:{name}".encode(), hashlib.sha256).hexdigest()


def _salt_stored(*, at_once: bool = False) -> bytes | None:
    """This installation's salt; None where nothing was ever erased, as was known ABSENCE_S ago (or is `at_once`)."""
    global _absent_at
    if not at_once and time.monotonic() - _absent_at < ABSENCE_S:
        return None
    try:
        return _salt.get("salt", _salt_read)
    except LookupError:
        _absent_at = time.monotonic()
        return None


def _salt_read() -> bytes:
    for digest in Tombstone.objects.filter(kind=Kind.SALT).order_by().values_list("digest", flat=True)[:1]:
        return bytes.fromhex(digest)
    raise LookupError("no tombstone was written yet")


def _create_salt() -> bytes:
    global _absent_at
    if (salt := _salt_stored(at_once=True)) is not None:
        return salt
    _absent_at = float("-inf")
    try:
        with transaction.atomic():
            Tombstone.objects.create(kind=Kind.SALT, digest=secrets.token_hex(32))
    except IntegrityError:
        pass  # another process made it at the same moment
    return _salt_read()
