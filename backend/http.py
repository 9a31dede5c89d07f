"""The address a request came from, as far as it can be believed."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponseRedirect
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.http import url_has_allowed_host_and_scheme

IPV6_PREFIX = 64
"""Bits of an IPv6 address that stand for one customer: the rest is theirs to change at will."""


def client_address(request: HttpRequest) -> str | None:
    """The client's address; of IPv6 the /64 it lies in. None where there is none, as behind a Unix socket.

    With NUM_PROXIES = n it is the n-th entry of X-Forwarded-For from the right: what stands left of it was written by
    the client itself. Where that is no address, the one the connection came from.
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


def redirect_back(request: HttpRequest, usual: str, *args: Any) -> HttpResponseRedirect:
    """To the address in the form's field `back`, where it is a path of this server; else to the usual route."""
    back = request.POST.get("back", "")
    if back.startswith("/") and url_has_allowed_host_and_scheme(back, allowed_hosts=None):
        return redirect(back)
    return redirect(usual, *args)


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
