"""Sign-in by password and by one-time link, its pages, and the lockout after failed sign-ins.

The `login_link` command creates links for people without a password. django-axes counts failures of accounts and of
addresses in the database. Django's `authenticate` reports passwords to it, the functions here report links. An account
is the typed name, whether it exists or not, so that a lockout does not reveal who has an account.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from axes.handlers.database import AxesDatabaseHandler
from axes.handlers.proxy import AxesProxyHandler
from axes.models import AccessAttempt
from django.conf import settings
from django.contrib import admin
from django.contrib.auth import get_user_model, login
from django.contrib.auth.decorators import login_required, permission_required
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.auth.signals import user_login_failed
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.contrib.auth.validators import UnicodeUsernameValidator
from django.contrib.auth.views import LoginView
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import transaction
from django.db.models import Sum
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from feedback.accounts.roles import ADMIN, RATER, ROLES, landing_page, role_give


class PeopleRefused(ValueError):
    """The person or link cannot be created."""


class _LinkTokens(PasswordResetTokenGenerator):
    """Sign-in tokens. The salt keeps them from resetting a password.

    Django's generator cuts last_login to seconds, so a token would survive a second sign-in within one second. This
    one keeps microseconds.
    """

    key_salt = "feedback.accounts.sign_in.signin_link"

    def _make_hash_value(self, user: User, timestamp: int) -> str:
        last = user.last_login.isoformat() if user.last_login else "never"
        return f"{user.pk} {user.password} {user.email} {user.is_active} {last} {timestamp}"


link_tokens = _LinkTokens()


@dataclass(frozen=True)
class SigninLink:
    """A link that signs one person in once."""

    username: str
    url: str
    expires_at: datetime
    created: bool
    """True if this call created the person."""
    operator: bool
    """True if the person may open the admin."""


def anybody_signed_in() -> bool:
    return User.objects.filter(last_login__isnull=False).exists()


def signin_link(username: str, base_url: str) -> SigninLink:
    """Create a one-time sign-in link, and the person if missing.

    The first person of an installation becomes a superuser, later ones raters. Ends the person's lockout.
    The link expires at the person's next sign-in or after PASSWORD_RESET_TIMEOUT seconds.

    base_url: scheme and host of Ratchet, such as http://localhost:8000. Raises PeopleRefused.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc or re.search(r"\s", base_url):
        raise PeopleRefused(f"expected a base URL such as http://localhost:8000, found {base_url!r}")
    user, is_new = _person(username)
    if not user.is_active:
        raise PeopleRefused(f"{username} may not sign in: the account is inactive; activate it in the admin")
    brake_release(user)
    address = reverse(
        "signin-link",
        kwargs={"uid": urlsafe_base64_encode(force_bytes(user.pk)), "token": link_tokens.make_token(user)},
    )
    return SigninLink(
        username=user.get_username(),
        url=base_url.rstrip("/") + address,
        expires_at=timezone.now() + timedelta(seconds=settings.PASSWORD_RESET_TIMEOUT),
        created=is_new,
        operator=user.is_staff,
    )


def signin_invite(inviter: User | AnonymousUser, username: str, role: str, base_url: str) -> SigninLink:
    """A sign-in link for a person, who is added with this role if missing. Raises PeopleRefused.

    Only a superuser makes one for a superuser: whoever opens the link has that person's rights.
    """
    known = User.objects.filter(username=username).first()
    if known is None and role not in ROLES:
        raise PeopleRefused(f"expected a role of {', '.join(ROLES)}, found {role!r:.40}")
    if known is not None and known.is_superuser and not inviter.is_superuser:
        raise PeopleRefused(f"{username} is a superuser: only another superuser may make a link for them")
    link = signin_link(username, base_url)
    if link.created:
        role_give(User.objects.get(username=username), role)
    return link


def _person(username: str) -> tuple[User, bool]:
    try:
        UnicodeUsernameValidator()(username)
    except ValidationError:
        raise PeopleRefused(f"expected a name of letters, digits and @ . + - _, found {username!r}") from None
    if len(username) > 150:
        raise PeopleRefused(f"expected a name of at most 150 characters, found {len(username)}")
    people = get_user_model()
    with transaction.atomic():
        first = not people.objects.exists()
        user, created = people.objects.get_or_create(
            username=username, defaults={"is_staff": first, "is_superuser": first}
        )
        if created:
            user.set_unusable_password()
            user.save(update_fields=["password"])
            role_give(user, ADMIN if first else RATER)
    return user, created


def signin_link_check(uid: str, token: str) -> User | None:
    """The person of a valid link; None if it was used, expired or forged. Does not use the link up."""
    try:
        user = get_user_model().objects.get(pk=urlsafe_base64_decode(uid).decode())
    except (ValueError, OverflowError, ValidationError, get_user_model().DoesNotExist):
        user = get_user_model()(is_active=False)
    # Checked for unknown people too: the response time must not reveal accounts.
    good = link_tokens.check_token(user, token)
    return user if good and user.is_active else None


def signin_link_redeem(uid: str, token: str) -> User | None:
    """Use a link up; returns its person or None. Of two simultaneous requests, one succeeds."""
    user = signin_link_check(uid, token)
    if user is None:
        return None
    seen = {"last_login": user.last_login} if user.last_login else {"last_login__isnull": True}
    now = timezone.now()
    if get_user_model().objects.filter(pk=user.pk, **seen).update(last_login=now) != 1:
        return None
    user.last_login = now
    return user


LINKS = "/accounts/link/"
"""Path under which failed links are counted, without the token."""


class BrakeHandler(AxesDatabaseHandler):
    """Separate limits for an account and an address, because an office shares one address."""

    def get_failures(self, request: HttpRequest, credentials: Mapping[str, object] | None = None) -> int:
        of_account, of_address = (
            attempts.aggregate(sum=Sum("failures_since_start"))["sum"] or 0
            for attempts in self.get_user_attempts(request, credentials)
        )
        # axes has a single limit, the account's: scale the address's failures to it.
        share = of_address / settings.SIGN_IN_FAILURES_OF_ADDRESS
        return max(of_account, math.floor(share * settings.AXES_FAILURE_LIMIT))


def refused_response(request: HttpRequest, response: HttpResponse, credentials: object) -> HttpResponse:
    """The 429 page of a lockout, the same for existing and unknown accounts."""
    wait_s = int(settings.AXES_COOLOFF_TIME.total_seconds())
    page = render(request, "braked.html", {"minutes": max(1, round(wait_s / 60))}, status=429)
    page["Retry-After"] = str(wait_s)
    return page


def link_allowed(request: HttpRequest, uid: str) -> bool:
    """False if this person's links or this address failed too often."""
    AxesProxyHandler.update_request(request)
    request.axes_path_info = LINKS  # type: ignore[attr-defined]
    allowed: bool = AxesProxyHandler.is_allowed(request, {"username": _link_account(uid)})
    request.axes_locked_out = not allowed  # type: ignore[attr-defined]
    return allowed


def link_failed(request: HttpRequest, uid: str) -> None:
    """Count a failed link. Call `link_allowed` first in the same request."""
    user_login_failed.send(__name__, credentials={"username": _link_account(uid)}, request=request)


def brake_release(user: User) -> None:
    """Forget an account's failures, when an operator creates a new link for it."""
    names = [user.get_username(), _account_of(user.pk)]
    AccessAttempt.objects.filter(username__in=names).delete()


def _link_account(uid: str) -> str:
    """Account name under which a link is counted; no person can have it."""
    try:
        return _account_of(int(urlsafe_base64_decode(uid[:64]).decode()))
    except (ValueError, UnicodeDecodeError):
        return "link ?"


def _account_of(pk: int) -> str:
    return f"link {pk}"


# --- Sign-in pages: by password and by one-time link, and the page that makes such links ---

INVITE = ["auth.add_user", "auth.change_user"]


class SignIn(LoginView):
    """Signs in, then opens the requested page or the landing page of the person's role."""

    template_name = "login.html"
    redirect_authenticated_user = True
    extra_context = {"oidc": settings.OIDC_NAME}

    def get_default_redirect_url(self) -> str:
        return reverse(landing_page(self.request.user))

    def get_redirect_url(self, *args: Any, **kwargs: Any) -> str:
        """The requested page; the start page does not count as one, because browsers open it first."""
        address = str(super().get_redirect_url(*args, **kwargs))
        return "" if address == reverse("home") else address


@never_cache
@sensitive_variables("token")
@require_http_methods(["GET", "HEAD", "POST"])
def link_signin(request: HttpRequest, uid: str, token: str) -> HttpResponse:
    """Sign in by a one-time link. GET only shows a button, because mail programs and chats open links for previews."""
    if not link_allowed(request, uid):
        return HttpResponse(status=429)  # The axes middleware renders the page.
    user = signin_link_redeem(uid, token) if request.method == "POST" else signin_link_check(uid, token)
    if user is None:
        link_failed(request, uid)
        return render(request, "link.html", {"person": None}, status=410)
    if request.method == "POST":
        login(request, user, backend="django.contrib.auth.backends.ModelBackend")
        return redirect(landing_page(user))
    return render(request, "link.html", {"person": user})


@never_cache
@login_required
@permission_required(INVITE, raise_exception=True)
@require_http_methods(["GET", "HEAD", "POST"])
def people(request: HttpRequest) -> HttpResponse:
    """Everybody who may sign in. POST makes a sign-in link and shows it once: `name`, with `role` for somebody new."""
    link, fault = None, ""
    if request.method == "POST":
        name, role = request.POST.get("name", "").strip(), request.POST.get("role", "")
        try:
            link = signin_invite(request.user, name, role, request.build_absolute_uri("/").rstrip("/"))
        except PeopleRefused as refusal:
            fault = f"{str(refusal)[:1].upper()}{str(refusal)[1:]}."
    everybody = User.objects.filter(is_active=True).prefetch_related("groups").order_by("username")
    context = {"link": link, "fault": fault, "everybody": everybody, "roles": ROLES}
    return render(request, "feedback/people.html", context, status=400 if fault else 200)


def admin_login(request: HttpRequest) -> HttpResponse:
    """The admin's page to sign in on; 403 for people who are signed in and may not use the admin."""
    if request.method == "GET" and request.user.is_authenticated and not admin.site.has_permission(request):
        raise PermissionDenied
    return admin.site.login(request)
