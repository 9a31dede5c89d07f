"""Access to an endpoint: scopes and rates per caller."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.settings import api_settings
from rest_framework.throttling import SimpleRateThrottle

if TYPE_CHECKING:  # DRF's views import the default classes, which are here
    from rest_framework.views import APIView

SCOPES = ("ingest", "rate", "read", "operate")
"""Permissions a key or a role may hold: record decisions, outcomes and traces; rate and compare; read; train
and promote."""
RATE_AS = "rate_as"
"""Further permission of a key beside `rate`: to say whose rating it sends. Without it a key rates as
itself."""
MAX_CALLERS = 10_000
"""Callers counted at once."""


@dataclass(frozen=True)
class Grant:
    """Rights of the sender of a request, given by the authentication classes as `request.auth`."""

    holder: str
    """Name of the key or of the person: the rater, where the request names none."""
    ident: str
    """Identity under which requests are counted together, such as key:3."""
    scopes: frozenset[str]
    is_person: bool
    """Signed in, rather than an app with a key: a person rates as themselves alone."""
    agent: str = ""
    """The only agent that a publishable key rates."""
    origin: str = ""
    """The only site whose pages may send a publishable key, which is no secret. Empty: an ordinary key."""


def grant_of(request: Request) -> Grant:
    """The caller and its scopes, for a view whose permission let nobody without a grant through."""
    grant = request.auth
    assert isinstance(grant, Grant)
    return grant


class HasScope(BasePermission):
    """The caller was granted the scope that the view names for the method."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        if not isinstance(request.auth, Grant):
            return False  # not signed in, which DRF answers with 401
        if not hasattr(view, "scopes"):
            return False
        scope = scope_of(view, request.method)
        if origin := request.auth.origin:
            if not getattr(view, "takes_publishable_keys", False):
                self.message = "this is a publishable key: it only rates, at POST /api/feedback/{decision}"
                return False
            if request.headers.get("Origin", "").lower() != origin:
                self.message = f"this publishable key works on pages of {origin} alone"
                return False
        self.message = f"this needs the scope {scope}, and the caller has {_list(request.auth.scopes)}"
        return scope is None or scope in request.auth.scopes


def scope_of(view: object, method: str | None) -> str | None:
    """The scope a method of a view needs; None where the view has no such method (405 is its answer)."""
    scopes: dict[str, str] = getattr(view, "scopes", {})
    return scopes.get("GET" if method == "HEAD" else method or "")


def _list(scopes: frozenset[str]) -> str:
    return ", ".join(scope for scope in SCOPES if scope in scopes) or "none"


class ScopeThrottle(SimpleRateThrottle):
    """Throttle by a window of fixed length, per caller and scope, counted in this process.

    DRF's own keeps the time of every request in the cache and reads all of them at each; at the rates a busy app
    needs that costs more than the request. A counter per window lets at most twice the rate through at its border.
    """

    _counts: ClassVar[dict[tuple[str, str, int], tuple[float, int]]] = {}
    """Scope, caller and length of the window -> the window's number, requests in it."""
    _lock = threading.Lock()

    def __init__(self) -> None:
        pass  # the scope, and so the rate, is known with the request

    def allow_request(self, request: Request, view: APIView) -> bool:
        scope = scope_of(view, request.method)
        grant = request.auth
        if scope is None or not isinstance(grant, Grant):
            return True
        self._wait = self.count(scope, grant.ident)
        return not self._wait

    def count(self, rate: str, ident: str) -> int:
        """Count a request of a caller under a rate. Returns the seconds to wait if it is one too many, else 0."""
        limit, seconds = self.parse_rate(str(api_settings.DEFAULT_THROTTLE_RATES[rate]))
        assert limit is not None  # only a rate of None has none
        assert seconds is not None
        window, into = divmod(time.time(), seconds)
        is_over = self._count((rate, ident, seconds), window) > limit
        return math.ceil(seconds - into) if is_over else 0

    def _count(self, key: tuple[str, str, int], window: float) -> int:
        with self._lock:
            if len(self._counts) > MAX_CALLERS:
                self._counts.clear()  # many callers, each seen a little more often than allowed
            last, count = self._counts.get(key, (window, 0))
            count = count + 1 if last == window else 1
            self._counts[key] = (window, count)
            return count

    def wait(self) -> float:
        """Seconds until the next window."""
        return self._wait
