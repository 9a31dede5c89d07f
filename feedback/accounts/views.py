"""Sign-in pages: by password and by one-time link."""

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
from feedback.accounts.sign_in import link_allowed, link_failed, signin_link_check, signin_link_redeem


class SignIn(LoginView):
    """Signs in, then opens the requested page or the landing page of the person's role."""

    template_name = "login.html"
    redirect_authenticated_user = True

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
