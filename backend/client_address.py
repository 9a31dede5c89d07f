"""The address a request came from, as far as it can be believed."""

from __future__ import annotations

import ipaddress

from django.conf import settings
from django.http import HttpRequest

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
