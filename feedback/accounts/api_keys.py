"""Keys of apps and scripts: made, shown once, checked at every request, revoked."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from backend.rest.access import RATE_AS
from feedback.cache import TTLCache
from feedback.models import ApiKey
from feedback.storage.validation import Check, FeedbackRefused

PREFIX = "rk_"
SECRET_BYTES = 30
"""Random bytes in a key, written as 40 characters: 240 bits cannot be guessed, so a plain SHA-256 keeps them."""
PREFIX_LENGTH = 11
"""First characters of a key, kept to tell keys apart; the other 32 hold 192 random bits."""
USED_EVERY = timedelta(minutes=1)
"""Resolution of a key's last-used time: it is written at most this often."""

_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{40}}")
_key_cache: TTLCache[ApiKey | None] = TTLCache()


class KeyRefused(FeedbackRefused):
    """A key that cannot be made or found."""


def key_create(name: str, scopes: Iterable[str]) -> tuple[ApiKey, str]:
    """A new key. Returns its row and the key itself, which is nowhere stored and cannot be shown again.

    name: what it is for, up to 100 characters, unique. scopes: of ApiKey.SCOPES, at least one. Raises KeyRefused.
    """
    check = Check()
    check.text("name", name, limit=100, required=True)
    distinct_scopes = list(dict.fromkeys(scopes))
    unknown = [scope for scope in distinct_scopes if scope not in ApiKey.SCOPES]
    if unknown or not distinct_scopes:
        found = ", ".join(map(str, unknown)) or "none"
        check.fields["scopes"] = f"expected one or more of {', '.join(ApiKey.SCOPES)}; found {found}"
    elif RATE_AS in distinct_scopes and "rate" not in distinct_scopes:
        check.fields["scopes"] = "rate_as (naming the rater) also needs the scope rate"
    if check.fields:
        raise KeyRefused(
            "; ".join(f"{field}: {fault}" for field, fault in check.fields.items()), check.fields
        )
    secret = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    ordered = [scope for scope in ApiKey.SCOPES if scope in distinct_scopes]
    try:
        with transaction.atomic():
            row = ApiKey.objects.create(
                name=name, prefix=secret[:PREFIX_LENGTH], key_hash=_hash(secret), scopes=ordered
            )
    except IntegrityError:
        raise KeyRefused(
            f"there is a key named {name!r} already; choose another name (revoked keys keep theirs)",
            {"name": "taken"},
        ) from None
    return row, secret


def key_revoke(name: str) -> ApiKey:
    """End a key for good, at once in this process and within FEEDBACK_REMEMBER_S seconds in all. Raises KeyRefused."""
    row = ApiKey.objects.filter(name=name).first()
    if row is None:
        known = ", ".join(ApiKey.objects.filter(revoked_at=None).values_list("name", flat=True)[:20])
        raise KeyRefused(f"there is no key named {name!r}; there are: {known or 'none'}", {"name": "unknown"})
    if row.revoked_at is None:
        row.revoked_at = timezone.now()
        row.save(update_fields=["revoked_at"])
    _key_cache.clear()
    return row


def keys_all() -> QuerySet[ApiKey]:
    """Every key, by name, the revoked ones too."""
    return ApiKey.objects.order_by("name")


def key_check(secret: str) -> ApiKey | None:
    """The key a caller sent, or None where it is none of ours or was revoked. Notes now and then that it was used."""
    if not _FORM.fullmatch(secret):
        return None
    # by its hash, so that the memory of this process holds no key either
    return _key_cache.get(_hash(secret), lambda: _look_up(secret))


def _look_up(secret: str) -> ApiKey | None:
    row = ApiKey.objects.filter(prefix=secret[:PREFIX_LENGTH]).first()
    # the row is found by what is public of a key; the rest is compared in constant time
    if row is None or not hmac.compare_digest(row.key_hash, _hash(secret)) or row.revoked_at is not None:
        return None
    now = timezone.now()
    if row.last_used_at is None or now - row.last_used_at > USED_EVERY:
        old = Q(last_used_at=None) | Q(last_used_at__lt=now - USED_EVERY)
        ApiKey.objects.filter(old, pk=row.pk).update(last_used_at=now)
    return row


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
