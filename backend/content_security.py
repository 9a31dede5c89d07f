"""Content-Security-Policy of every answer: scripts, styles and images of this site alone, and nothing inline.

The settings have the form of Django 6's own middleware (SECURE_CSP), which takes this one's place with Django 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from django.conf import settings
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.urls import reverse
from django.utils.functional import cached_property

HEADER = "Content-Security-Policy"


def policy_header(directives: Mapping[str, Sequence[str]]) -> str:
    """The header's value: `default-src 'none'; script-src 'self'`."""
    return "; ".join(" ".join([name, *sources]) for name, sources in directives.items())


class ContentSecurityPolicy:
    """Adds the header, which is written once per process: no page here has a nonce, for none has anything inline.

    Unfold's menus in the admin are Alpine.js expressions in attributes, which Alpine compiles: `unsafe-eval`, in the
    admin alone. Inline scripts, handlers and styles are refused there as everywhere.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response
        pages = settings.SECURE_CSP
        self._of_pages = policy_header(pages)
        self._of_admin = policy_header({**pages, "script-src": [*pages["script-src"], "'unsafe-eval'"]})

    @cached_property
    def _admin(self) -> str:
        return reverse("admin:index")

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = self.get_response(request)
        in_admin = request.path_info.startswith(self._admin)
        response.headers.setdefault(HEADER, self._of_admin if in_admin else self._of_pages)
        return response
