"""Requests and responses: the client's address, redirects after forms, the Content-Security-Policy."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence

from django.conf import settings
from django.contrib.auth.decorators import login_required, permission_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST, require_safe

IPV6_PREFIX = 64
"""Bits of an IPv6 address that identify a customer, who controls the rest."""


def client_address(request: HttpRequest) -> str | None:
    """The client's address, for IPv6 its /64 network; None behind a Unix socket.

    With NUM_PROXIES = n, it is the n-th entry of X-Forwarded-For from the right, because the client can write the
    entries left of it. If that is no address, the connection's.
    """
    entries = [part.strip() for part in request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")]
    forwarded = entries[-settings.NUM_PROXIES] if 0 < settings.NUM_PROXIES <= len(entries) else ""
    for text in (forwarded, request.META.get("REMOTE_ADDR", "")):
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            continue
        if address.version == 6:
            if address.ipv4_mapped:
                return str(address.ipv4_mapped)
            return str(ipaddress.ip_network((address, IPV6_PREFIX), strict=False).network_address)
        return str(address)
    return None


def redirect_back(request: HttpRequest, usual: str, *args: object) -> HttpResponseRedirect:
    """Redirect to the form's field `back` if it is a path of this server, else to the usual route."""
    back = request.POST.get("back", "")
    if back.startswith("/") and url_has_allowed_host_and_scheme(back, allowed_hosts=None):
        return redirect(back)
    return redirect(usual, *args)


View = Callable[..., HttpResponseBase]


def page(permission: str | list[str]) -> Callable[[View], View]:
    """Decorator of a page that is only read, for signed-in people with a permission; others get 403."""
    return lambda view: login_required(
        permission_required(permission, raise_exception=True)(require_safe(view))
    )


def button(permission: str | list[str]) -> Callable[[View], View]:
    """Decorator of the address of a form, for signed-in people with a permission; others get 403."""
    return lambda view: login_required(
        permission_required(permission, raise_exception=True)(require_POST(view))
    )


HEADER = "Content-Security-Policy"


def policy_header(directives: Mapping[str, Sequence[str]]) -> str:
    """Value of the header, such as `default-src 'none'; script-src 'self'`."""
    return "; ".join(" ".join([name, *sources]) for name, sources in directives.items())


def body_refused(fault: str) -> HttpResponse:
    """413 to a request whose body was not read. The connection closes: the client may still be sending."""
    return HttpResponse(fault, status=413, content_type="text/plain", headers={"Connection": "close"})


class BodyLimit:
    """Refuses a form with files that is larger than any form here, by its stated length, before anything of it is read.

    Django writes such files to the disk while it looks for the form's token, whoever sent them. The two pages that take
    an upload have a limit of their own, and ask who it is first.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponseBase]) -> None:
        self.get_response = get_response

    @cached_property
    def _uploads(self) -> tuple[str, ...]:
        return tuple(map(reverse, settings.UPLOAD_PAGES))

    def __call__(self, request: HttpRequest) -> HttpResponseBase:
        length = request.META.get("CONTENT_LENGTH") or "0"
        most = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        is_form = (request.content_type or "").startswith("multipart/")
        if is_form and length.isdigit() and int(length) > most and request.path_info not in self._uploads:
            return body_refused(f"The form is larger than {most >> 20} MB.")
        return self.get_response(request)


class ContentSecurityPolicy:
    """Adds the Content-Security-Policy of SECURE_CSP (Django 6's form): no inline scripts, handlers or styles.

    The admin also gets `unsafe-eval`, because Unfold's menus are Alpine.js expressions in attributes.
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
