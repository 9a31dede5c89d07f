"""Signed tokens for the people an answer was given to: each lets its holder rate one decision, and nothing else."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.signing import BadSignature, SignatureExpired, TimestampSigner
from django.http import HttpRequest
from django.urls import reverse
from rest_framework.authentication import BaseAuthentication
from rest_framework.request import Request

from backend.http import client_address
from backend.rest.access import Grant, ScopeThrottle
from backend.rest.errors import RequestRefused
from feedback.accounts.authentication import KeyHolder

if TYPE_CHECKING:  # DRF's views import the default classes, which import this package
    from rest_framework.views import APIView

APP_USER = "app user"
"""Rater of what is said with a token. No account has this name, because names of accounts hold no space."""
FEEDBACK_HEADER = "X-Ratchet-Feedback"


def _signer() -> TimestampSigner:
    return TimestampSigner(sep=".", salt="ratchet.feedback")


def token_sign(decision: uuid.UUID) -> str:
    """A token for one decision, valid for FEEDBACK_TOKEN_DAYS. It needs no row and no request to the database."""
    return _signer().sign(decision.hex)


def token_read(token: str) -> uuid.UUID:
    """The decision that a token is for. Raises RequestRefused (403) with the code token_expired or token_invalid."""
    try:
        return uuid.UUID(_signer().unsign(token, max_age=timedelta(days=settings.FEEDBACK_TOKEN_DAYS)))
    except SignatureExpired:
        raise RequestRefused(
            f"the token is older than {settings.FEEDBACK_TOKEN_DAYS:g} days (FEEDBACK_TOKEN_DAYS): nothing was stored",
            code="token_expired",
            status=403,
        ) from None
    except (BadSignature, ValueError):
        raise RequestRefused(
            "expected a token as an answer brings it in `ratchet.feedback_token`, found one that this server did not "
            "sign, or a part of one: nothing was stored",
            code="token_invalid",
            status=403,
        ) from None


def feedback_links(request: HttpRequest | Request, decision: uuid.UUID) -> dict[str, str]:
    """Token and form address of a decision, for the people who got its answer."""
    token = token_sign(decision)
    return {
        "feedback_token": token,
        "feedback_url": request.build_absolute_uri(reverse("feedback-form", args=[token])),
    }


def decision_named(place: str) -> uuid.UUID:
    """The decision that an address names, by its token or (for a caller with a key) by its id."""
    return token_read(place) if is_token(place) else uuid.UUID(place)


def is_token(place: str) -> bool:
    """False of a decision's id."""
    try:
        uuid.UUID(place)
    except ValueError:
        return True
    return False


def token_wait(request: HttpRequest, decision: uuid.UUID) -> int:
    """Count a rating under the rates of its decision and of the sender's address. Returns the seconds to wait, or 0."""
    throttle = ScopeThrottle()
    return max(
        throttle.count("feedback_token", str(decision)),
        throttle.count("feedback_address", client_address(request) or ""),
    )


class TokenAuthentication(BaseAuthentication):
    """The caller is whoever holds the token in the address. An address with an id is left to keys and sessions."""

    def authenticate(self, request: Request) -> tuple[object, Grant] | None:
        place = request.parser_context["kwargs"]["token"]
        if not is_token(place):
            return None
        decision = token_read(place)
        return KeyHolder(), Grant(APP_USER, f"token:{decision}", frozenset({"rate"}), is_person=False)

    def authenticate_header(self, request: Request) -> str:
        return "Bearer"


class FeedbackThrottle(ScopeThrottle):
    """Counts a rating by its decision and by the sender's address, rather than by its caller."""

    def allow_request(self, request: Request, view: APIView) -> bool:
        self._wait = token_wait(request._request, decision_named(view.kwargs["token"]))
        return not self._wait
