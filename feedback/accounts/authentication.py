"""Authentication of a request: an app by its API key, or a person by their session."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import AnonymousUser
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from backend.installation import PROGRAM
from backend.rest.access import Grant
from feedback.accounts.api_keys import key_check
from feedback.accounts.roles import user_scopes


class KeyHolder(AnonymousUser):
    """Stand-in for `request.user` of an app with a key: an authenticated caller without a row among the people."""

    is_authenticated = True  # type: ignore[assignment]


class KeyAuthentication(BaseAuthentication):
    """`Authorization: Bearer <key>`, or `X-Api-Key: <key>` as Anthropic's clients send it."""

    def authenticate(self, request: Request) -> tuple[Any, Grant] | None:
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
        return KeyHolder(), Grant(key.name, f"key:{key.pk}", frozenset(key.scopes), is_person=False)

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class RoleAuthentication(SessionAuthentication):
    """The session of a signed-in person; writes need the CSRF token, as forms do."""

    def authenticate(self, request: Request) -> tuple[Any, Grant] | None:
        found = super().authenticate(request)
        if found is None:
            return None
        user = found[0]
        return user, Grant(user.get_username(), f"user:{user.pk}", user_scopes(user), is_person=True)
