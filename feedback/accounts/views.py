"""Pages of signing in: by password and by one-time link."""

from __future__ import annotations

from typing import Any

from django.contrib.auth import login
from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_http_methods

from feedback.accounts.roles import landing_page
from feedback.accounts.sign_in import signin_link_check, signin_link_redeem
from feedback.accounts.sign_in_brake import link_allowed, link_failed


class SignIn(LoginView):
    """Signs in and leads on: to the page that was asked for, else to where this person's work is."""

    template_name = "login.html"
    redirect_authenticated_user = True

    def get_default_redirect_url(self) -> str:
        return reverse(landing_page(self.request.user))

    def get_redirect_url(self, *args: Any, **kwargs: Any) -> str:
        """The page asked for; the start page, which browsers open first, does not count as asked for."""
        address = str(super().get_redirect_url(*args, **kwargs))
        return "" if address == reverse("home") else address


@never_cache
@sensitive_variables("token")
@require_http_methods(["GET", "HEAD", "POST"])
def link_signin(request: HttpRequest, uid: str, token: str) -> HttpResponse:
    """Sign in by a one-time link.

    GET only asks: mail programs and chats open links to preview them, and would use it up.
    """
    if not link_allowed(request, uid):
        return HttpResponse(status=429)  # the middleware of the brake has the page
    user = signin_link_redeem(uid, token) if request.method == "POST" else signin_link_check(uid, token)
    if user is None:
        link_failed(request, uid)
        return render(request, "link.html", {"person": None}, status=410)
    if request.method == "POST":
        login(request, user, backend="django.contrib.auth.backends.ModelBackend")
        return redirect(landing_page(user))
    return render(request, "link.html", {"person": user})
