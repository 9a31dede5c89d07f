"""API keys (created, shown once, checked, revoked) and the authentication of requests by key or session."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated, TypeAlias

from django.contrib.auth.models import AnonymousUser
from django.db import IntegrityError, transaction
from django.db.models import Q, QuerySet
from django.utils import timezone
from pydantic import Field
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from backend.installation import PROGRAM
from backend.rest.access import RATE_AS, Grant
from feedback.accounts.roles import user_scopes
from feedback.cache import TTLCache
from feedback.models import ApiKey
from feedback.storage.fields import SaidText, Slug
from feedback.storage.validation import Check, FeedbackRefused

PREFIX = "rk_"
SECRET_BYTES = 30
"""Random bytes of a key, 40 characters as text. 240 bits need no slow hash: SHA-256 is enough."""
PREFIX_LENGTH = 11
"""Leading characters stored in plain text to tell keys apart; the other 32 hold 192 random bits."""
USED_EVERY = timedelta(minutes=1)
"""A key's last-used time is written at most this often."""

_FORM = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{40}}")
_key_cache: TTLCache[ApiKey | None] = TTLCache()


KeyName: TypeAlias = Annotated[SaidText, Field(max_length=100)]


class KeyRefused(FeedbackRefused):
    """The key cannot be created or found."""


ORIGIN = re.compile(r"https?://[a-z0-9.-]+(?::\d{1,5})?|https?://\[[0-9a-f:.]+\](?::\d{1,5})?")


def key_budget(name: str, usd: float | None) -> ApiKey:
    """Set what providers may take a month for a key's requests, in US dollars; None: no limit. Raises KeyRefused."""
    if usd is not None and not 0 <= usd < float("inf"):
        fault = f"expected at least 0 US dollars, found {usd}"
        raise KeyRefused(f"budget: {fault}", {"budget": fault})
    if not ApiKey.objects.filter(name=name).update(budget_usd=usd, budget_noticed_at=None):
        raise KeyRefused(f"there is no key {name!r}", {"name": "does not exist"})
    return ApiKey.objects.get(name=name)


def key_create(name: str, scopes: Iterable[str], *, agent: str = "", origin: str = "") -> tuple[ApiKey, str]:
    """Create a key; returns its row and the key, which is not stored and cannot be shown again.

    name: unique, at most 100 characters. scopes: one or more of ApiKey.SCOPES. agent, origin: of a publishable key,
    which has the scope rate alone. Raises KeyRefused.
    """
    check = Check()
    origin = origin.lower().rstrip("/")
    if bool(agent) != bool(origin):
        check.fields["origin" if agent else "agent"] = "a publishable key needs both an agent and an origin"
    if agent:
        check.value("agent", Slug, agent)
    if origin and not ORIGIN.fullmatch(origin):
        check.fields["origin"] = f"expected a site such as https://shop.example, found {origin!r:.80}"
    check.value("name", KeyName, name)
    distinct_scopes = list(dict.fromkeys(scopes))
    unknown = [scope for scope in distinct_scopes if scope not in ApiKey.SCOPES]
    if unknown or not distinct_scopes:
        found = ", ".join(map(str, unknown)) or "none"
        check.fields["scopes"] = f"expected one or more of {', '.join(ApiKey.SCOPES)}; found {found}"
    elif origin and distinct_scopes != ["rate"]:
        check.fields["scopes"] = "a publishable key stands in public pages, and may have the scope rate alone"
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
                name=name,
                prefix=secret[:PREFIX_LENGTH],
                key_hash=_hash(secret),
                scopes=ordered,
                agent=agent,
                origin=origin,
            )
    except IntegrityError:
        raise KeyRefused(
            f"there is a key named {name!r} already; choose another name (revoked keys keep theirs)",
            {"name": "taken"},
        ) from None
    return row, secret


def key_revoke(name: str) -> ApiKey:
    """Revoke a key, at once in this process and within FEEDBACK_REMEMBER_S seconds in others. Raises KeyRefused."""
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
    """Every key by name, including revoked ones."""
    return ApiKey.objects.order_by("name")


def key_check(secret: str) -> ApiKey | None:
    """The row of a sent key; None if it is unknown or revoked. Updates its last-used time."""
    if not _FORM.fullmatch(secret):
        return None
    # Cached by hash: this process's memory holds no key.
    return _key_cache.get(_hash(secret), lambda: _look_up(secret))


def _look_up(secret: str) -> ApiKey | None:
    row = ApiKey.objects.filter(prefix=secret[:PREFIX_LENGTH]).first()
    # Found by the public prefix, then compared in constant time.
    if row is None or not hmac.compare_digest(row.key_hash, _hash(secret)) or row.revoked_at is not None:
        return None
    now = timezone.now()
    if row.last_used_at is None or now - row.last_used_at > USED_EVERY:
        old = Q(last_used_at=None) | Q(last_used_at__lt=now - USED_EVERY)
        ApiKey.objects.filter(old, pk=row.pk).update(last_used_at=now)
    return row


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyHolder(AnonymousUser):
    """`request.user` of an app with a key: authenticated, without a User row."""

    is_authenticated = True  # type: ignore[assignment]


class KeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer <key>`, or `X-Api-Key: <key>` as Anthropic's clients send it."""

    def authenticate(self, request: Request) -> tuple[object, Grant] | None:
        scheme, _, secret = request.META.get("HTTP_AUTHORIZATION", "").partition(" ")
        if scheme.lower() != "bearer":
            secret = request.META.get("HTTP_X_API_KEY", "")
        if not secret and scheme.lower() != "bearer":
            return None
        key = key_check(secret.strip())
        if key is None:
            raise AuthenticationFailed(
                f"this key is unknown or revoked; make one with `{PROGRAM} api_key create`"
            )
        scopes = frozenset(key.scopes)
        grant = Grant(key.name, key.ident, scopes, is_person=False, agent=key.agent, origin=key.origin)
        return KeyHolder(), grant

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class RoleAuthentication(SessionAuthentication):
    """A person's session; writes need the CSRF token."""

    def authenticate(self, request: Request) -> tuple[object, Grant] | None:
        found = super().authenticate(request)
        if found is None:
            return None
        user = found[0]
        return user, Grant(user.get_username(), f"user:{user.pk}", user_scopes(user), is_person=True)
