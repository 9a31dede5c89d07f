"""Page of sign-in by password."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.views import LoginView
from django.urls import reverse

from feedback.accounts.roles import landing_page


class SignIn(LoginView):
    """Signs in and leads on: to the page that was asked for, else to where this person's work is."""

    template_name = "login.html"
    redirect_authenticated_user = True

    def get_default_redirect_url(self) -> str:
        return reverse(landing_page(self.request.user))

    def get_redirect_url(self, *args: Any, **kwargs: Any) -> str:
        """The page asked for; the start page, which a browser asks for first, is nobody's wish in particular."""
        asked = str(super().get_redirect_url(*args, **kwargs))
        return "" if asked == reverse("home") else asked
