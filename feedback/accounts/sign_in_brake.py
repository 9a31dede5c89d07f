"""Brake on sign-in: after so many failures an account, and an address, is locked out for a while.

django-axes counts, in the database, for all processes together. Passwords (the site's page and the admin's) come to it
through Django's own `authenticate`; one-time links through the functions here. An account is known by the name that was
typed, whether there is such a person or not, so that the brake tells nobody who is there.
"""

from __future__ import annotations

import math
from typing import Any

from axes.handlers.database import AxesDatabaseHandler
from axes.handlers.proxy import AxesProxyHandler
from axes.models import AccessAttempt
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_login_failed
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils.http import urlsafe_base64_decode

LINKS = "/accounts/link/"
"""Address under which failed links are counted: without their token, which may be good again one day."""


class BrakeHandler(AxesDatabaseHandler):
    """Counts failures of an account and of an address against limits of their own: an office shares one address."""

    def get_failures(self, request: HttpRequest, credentials: dict[str, Any] | None = None) -> int:
        of_account, of_address = (
            attempts.aggregate(sum=Sum("failures_since_start"))["sum"] or 0
            for attempts in self.get_user_attempts(request, credentials)
        )
        # axes knows one limit, which is the account's
        share = of_address / settings.SIGN_IN_FAILURES_OF_ADDRESS
        return max(of_account, math.floor(share * settings.AXES_FAILURE_LIMIT))


def refused_response(request: HttpRequest, response: HttpResponse, credentials: Any) -> HttpResponse:
    """The page of somebody who has to wait: the same for accounts that are there and those that are not."""
    wait_s = int(settings.AXES_COOLOFF_TIME.total_seconds())
    page = render(request, "braked.html", {"minutes": max(1, round(wait_s / 60))}, status=429)
    page["Retry-After"] = str(wait_s)
    return page


def link_allowed(request: HttpRequest, uid: str) -> bool:
    """True if a link may be tried: neither this person's links nor this address failed too often."""
    AxesProxyHandler.update_request(request)
    request.axes_path_info = LINKS  # type: ignore[attr-defined]
    allowed: bool = AxesProxyHandler.is_allowed(request, {"username": _link_account(uid)})
    request.axes_locked_out = not allowed  # type: ignore[attr-defined]
    return allowed


def link_failed(request: HttpRequest, uid: str) -> None:
    """Count a link that signed nobody in. After `link_allowed` of the same request."""
    user_login_failed.send(__name__, credentials={"username": _link_account(uid)}, request=request)


def brake_release(user: User) -> None:
    """Forget an account's failures: called where an operator makes a new link for its owner."""
    names = [user.get_username(), _account_of(user.pk)]
    AccessAttempt.objects.filter(username__in=names).delete()


def _link_account(uid: str) -> str:
    """The account of a link: one name, however the id in it is padded; no name that a person can have."""
    try:
        return _account_of(int(urlsafe_base64_decode(uid[:64]).decode()))
    except (ValueError, UnicodeDecodeError):
        return "link ?"


def _account_of(pk: int) -> str:
    return f"link {pk}"
