"""Sign-in by one-time link, for people without a password; links are made on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.contrib.auth.tokens import PasswordResetTokenGenerator
from django.contrib.auth.validators import UnicodeUsernameValidator
from django.core.exceptions import ValidationError
from django.db import transaction
from django.urls import reverse
from django.utils import timezone
from django.utils.encoding import force_bytes
from django.utils.http import urlsafe_base64_decode, urlsafe_base64_encode

from feedback.accounts.roles import ADMIN, RATER, role_give
from feedback.accounts.sign_in_brake import brake_release


class PeopleRefused(ValueError):
    """A person or link that cannot be made; the message says what was expected and what to do."""


class _LinkTokens(PasswordResetTokenGenerator):
    """Tokens that sign in, and do nothing else: a salt of their own keeps them from resetting a password.

    Django's generator cuts last_login to the second, so that two sign-ins within one second would leave the
    token of the second link alive; ours keeps the microseconds.
    """

    key_salt = "feedback.accounts.sign_in.signin_link"

    def _make_hash_value(self, user: User, timestamp: int) -> str:
        last = user.last_login.isoformat() if user.last_login else "never"
        return f"{user.pk} {user.password} {user.email} {user.is_active} {last} {timestamp}"


link_tokens = _LinkTokens()


@dataclass(frozen=True)
class SigninLink:
    """A link that signs one person in, once."""

    username: str
    url: str
    expires_at: datetime
    created: bool
    """True where this call made the person."""
    operator: bool
    """True where the person may open the admin."""


def anybody_signed_in() -> bool:
    """True if this installation has been opened by anyone yet."""
    return User.objects.filter(last_login__isnull=False).exists()


def signin_link(username: str, base_url: str) -> SigninLink:
    """Make a one-time link for a person, who is added when missing.

    The first person of an installation may do everything, so that the admin opens; those after are raters until
    somebody makes them more. A person whom the brake on sign-in holds up is let go.
    The link ends with the next sign-in of that person, or after PASSWORD_RESET_TIMEOUT.

    base_url: scheme and host people open Ratchet at, such as http://localhost:8000. Raises PeopleRefused.
    """
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.netloc or re.search(r"\s", base_url):
        raise PeopleRefused(f"expected a base URL such as http://localhost:8000, found {base_url!r}")
    user, is_new = _person(username)
    if not user.is_active:
        raise PeopleRefused(
            f"{username} may not sign in: the account is switched off; switch it on in the admin"
        )
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
    """The person a link would sign in, or None where it was used, ran out or is not ours. Changes nothing."""
    try:
        user = get_user_model().objects.get(pk=urlsafe_base64_decode(uid).decode())
    except (ValueError, OverflowError, ValidationError, get_user_model().DoesNotExist):
        user = get_user_model()(is_active=False)
    # checked for nobody too: how long the answer takes must not tell who is there
    good = link_tokens.check_token(user, token)
    return user if good and user.is_active else None


def signin_link_redeem(uid: str, token: str) -> User | None:
    """Use a link up: the person it signs in, or None. Of two requests with one link at once, one gets the person."""
    user = signin_link_check(uid, token)
    if user is None:
        return None
    seen = {"last_login": user.last_login} if user.last_login else {"last_login__isnull": True}
    now = timezone.now()
    if get_user_model().objects.filter(pk=user.pk, **seen).update(last_login=now) != 1:
        return None
    user.last_login = now
    return user
