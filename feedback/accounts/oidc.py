"""Sign-in by OpenID Connect, through django-allauth: the account and the role of a person of the provider."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NoReturn

from allauth.core.exceptions import ImmediateHttpResponse
from allauth.socialaccount.adapter import DefaultSocialAccountAdapter
from allauth.socialaccount.models import SocialAccount, SocialLogin
from allauth.socialaccount.providers.base import AuthProcess
from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.shortcuts import render
from requests import RequestException, Session
from requests import Response as HttpAnswer

from feedback.accounts.roles import ROLES, role_give

logger = logging.getLogger("feedback.oidc")

NOT_SIGNED_IN = "The provider did not sign you in. Try again, or ask whoever runs this installation."


class Adapter(DefaultSocialAccountAdapter):
    """Finds or adds the person, gives the role of their groups, and shows each refusal on the sign-in page."""

    def pre_social_login(self, request: HttpRequest, sociallogin: SocialLogin) -> None:
        claims = _claims(sociallogin)
        role = role_of(claims)
        sociallogin.state["process"] = AuthProcess.LOGIN  # there is no page of connected accounts
        if role is None:
            _refuse(request, "None of your groups may use Ratchet. Ask whoever runs it for a role.")
        if not sociallogin.is_existing and (known := _invited(claims)) is not None:
            sociallogin.connect(request, known)
        if not sociallogin.is_existing and not _verified(claims):
            sociallogin.email_addresses, sociallogin.user.email = [], ""
        if not sociallogin.user.is_active:
            _refuse(request, "This account is switched off. Ask an admin to activate it.")
        if sociallogin.is_existing and settings.OIDC_ROLES:
            role_give(sociallogin.user, role)

    def save_user(self, request: HttpRequest, sociallogin: SocialLogin, form: Any = None) -> User:
        user: User = super().save_user(request, sociallogin, form)
        role_give(user, role_of(_claims(sociallogin)) or "rater")
        return user

    def is_auto_signup_allowed(self, request: HttpRequest, sociallogin: SocialLogin) -> bool:
        return True

    def on_authentication_error(
        self,
        request: HttpRequest,
        provider: Any,
        error: Any = None,
        exception: Any = None,
        extra_context: Any = None,
    ) -> NoReturn:
        _refuse(request, NOT_SIGNED_IN)

    def get_requests_session(self) -> Session:
        """A session whose failures are shown on the sign-in page: allauth answers some of them with 500."""
        session = super().get_requests_session()
        ask = session.request

        def asked(*args: Any, **options: Any) -> HttpAnswer:
            try:
                answer: HttpAnswer = ask(*args, **options)
                answer.raise_for_status()
            except RequestException as fault:
                logger.warning("the provider of OpenID Connect did not answer: %s", type(fault).__name__)
                _refuse(self.request, NOT_SIGNED_IN)
            return answer

        session.request = asked
        return session


def role_of(claims: Mapping[str, object]) -> str | None:
    """The highest role that OIDC_ROLES gives to one of the groups; None if it gives none. Without OIDC_ROLES: rater."""
    groups = claims.get(settings.OIDC_GROUPS_CLAIM)
    names = {"*", *map(str, groups if isinstance(groups, list) else [groups or "*"])}
    given = {role for group, role in (settings.OIDC_ROLES or {"*": "rater"}).items() if group in names}
    return max(given, key=list(ROLES).index, default=None)


def _claims(sociallogin: SocialLogin) -> dict[str, Any]:
    data: dict[str, Any] = sociallogin.account.extra_data
    return {**(data.get("id_token") or {}), **(data.get("userinfo") or {})} or data


def _invited(claims: Mapping[str, object]) -> User | None:
    """The person who was invited under this address, as name or as e-mail.

    A name that came from the provider invites nobody: people there may choose it.
    """
    if not (email := _verified(claims)):
        return None
    linked = SocialAccount.objects.values("user")
    invited = User.objects.filter(username__iexact=email).exclude(pk__in=linked)
    return invited.first() or User.objects.filter(email__iexact=email).first()


def _verified(claims: Mapping[str, object]) -> str:
    """The e-mail address, if the provider has verified it."""
    return str(claims.get("email") or "") if claims.get("email_verified") is True else ""


def _refuse(request: HttpRequest, fault: str) -> NoReturn:
    context = {"fault": fault, "oidc": settings.OIDC_NAME, "form": AuthenticationForm(request)}
    raise ImmediateHttpResponse(render(request, "login.html", context, status=403))
