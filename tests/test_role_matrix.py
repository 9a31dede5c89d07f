"""The role matrix: every address of the resolver by everybody in every method; the refused write nothing."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import get_resolver
from rest_framework.settings import api_settings

from backend.rest.access import SCOPES
from feedback.accounts.authentication import key_create, key_revoke
from feedback.accounts.roles import role_give
from feedback.models import Decision
from tests.support.campaign_scale import CAMPAIGN
from tests.test_api_access import ENDPOINTS
from tests.test_content_security import routes, world  # noqa: F401

pytestmark = pytest.mark.django_db

OPEN = set(
    (
        "/accounts/login/ /accounts/link/<str:uid>/<str:token>/ /healthz /readyz /api/schema/ /api/docs/ "
        "/api/ /v1/ /feedback/<str:token> /admin/login/ /admin/r/ "
        "/admin/r/<path:content_type_id>/<path:object_id>/"
    ).split()
)
"""Routes for anybody."""
RATERS = set(
    (
        "/ /rate/ /rate/skip/ /rate/undo/ /rate/pairs/ /rate/pairs/skip/ /rate/pairs/undo/ "
        "/agents/<str:slug>/ /glossary/"
    ).split()
)
"""Pages for raters. Whatever is in no list is for operators, so that a new page is shut until it is put here."""
ADMINS = ("/admin/auth/", "/admin/feedback/apikey/", "/people/")
"""Beginnings of routes for admins."""
LEFT_OUT = ("logout", "/api/", "/v1/", "/metrics")
"""Routes that end the session; and REST, whose endpoints name their scopes (`ENDPOINTS`)."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") if CAMPAIGN else ("GET", "POST")
UNSAFE = [method for method in METHODS if method not in ("GET", "HEAD", "OPTIONS")]
SITE = "https://shop.example"
"""Whose pages may send the publishable key."""
ROLES = ("nobody", "somebody", "rater", "operator", "admin")

WRITES = re.compile(r"\s*(INSERT INTO|UPDATE|DELETE FROM)\s+\"?(\w+)", re.IGNORECASE)
BOOKKEEPING = ("django_session", "axes_accessattempt", "feedback_apikey")
"""Tables of who is signed in, who failed to, and when a key was used: written for the refused too."""


@contextmanager
def written() -> Iterator[list[str]]:
    """Tables written to meanwhile."""
    tables: list[str] = []

    def look(execute: Callable[..., Any], sql: str, *rest: Any) -> Any:
        if (found := WRITES.match(sql)) and found[2] not in BOOKKEEPING:
            tables.append(found[2])
        return execute(sql, *rest)

    with connection.execute_wrapper(look):
        yield tables


def signed_in(who: str, **options: Any) -> Client:
    client = Client(raise_request_exception=False, **options)
    if who != "nobody":
        user = User.objects.get_or_create(username=who)[0]
        if who != "somebody":
            role_give(user, who)
        client.force_login(user)
    return client


def least(route: str) -> str:
    """The least of ROLES that a page is for."""
    if route in OPEN:
        return "nobody"
    if route in RATERS:
        return "rater"
    return "admin" if route.startswith(ADMINS) else "operator"


def pages(values: dict[str, str]) -> list[tuple[str, str]]:
    found = dict(routes(get_resolver().url_patterns, values))
    return sorted(
        (route, of_a_row(route, address))
        for route, address in found.items()
        if not any(part in route for part in LEFT_OUT) and (CAMPAIGN or not route.startswith("/admin/"))
    )


def of_a_row(route: str, address: str) -> str:
    """The address with the id of a row that is there, where the route is about one row of a model in the admin."""
    if not route.startswith("/admin/") or "object_id>" not in route:
        return address
    _, _, app, model, *_ = route.split("/")
    row = apps.get_model(app, model)._default_manager.first() if app in ("auth", "feedback", "rl") else None
    return address if row is None else address.replace("/7/", f"/{row.pk}/", 1)


@pytest.fixture(name="places")
def values_of_places(world: dict[str, str]) -> dict[str, str]:  # noqa: F811
    """Values for the places of routes; a decision's page is named by the id of one that is there."""
    key_create("an app's", ["read"])
    User.objects.get_or_create(username="admin")
    return {**world, "pk": world["pk"], "decision": str(Decision.objects.latest("created_at").pk)}


@pytest.mark.slow
def test_every_page_is_shut(places: dict[str, str], record_property: Callable[[str, object], None]) -> None:
    tried, faults = 0, []
    uuids = re.compile(r"<uuid:\w+>")
    for who in ROLES[:4]:
        client = signed_in(who)
        for route, address in pages(places):
            if uuids.search(route):
                address = re.sub(r"/decisions/[^/]+/", f"/decisions/{places['decision']}/", address)
            allowed = ROLES.index(who) >= ROLES.index(least(route))
            if allowed and not CAMPAIGN:
                continue  # that they get through is tested page by page
            for method in METHODS:
                with written() as tables:
                    response = client.generic(method, address)
                tried += 1
                status, where = response.status_code, response.get("Location", "")
                # the admin's old address of a row leads on to its page, which is another route
                refused = status in (401, 403, 404, 405) or (
                    status == 302 and ("login" in where or where.endswith(f"{address}change/"))
                )
                if status >= 500 and address != "/readyz":
                    faults.append((who, method, address, status, "a fault of ours"))
                elif not allowed and (not refused or tables):
                    faults.append((who, method, address, status, tables))
    record_property("tried", tried)
    assert faults == []
    assert tried > 100


def test_writes_need_csrf(places: dict[str, str], record_property: Callable[[str, object], None]) -> None:
    client, faults, tried = signed_in("admin", enforce_csrf_checks=True), [], 0
    endpoints = [address for method, address, _ in ENDPOINTS if method not in ("GET", "HEAD")]
    for address in [*(address for _, address in pages(places)), *endpoints, "/accounts/logout/"]:
        for method in UNSAFE:
            with written() as tables:
                status = client.generic(method, address, "{}", content_type="application/json").status_code
            tried += 1
            if status not in (403, 404, 405) or tables:
                faults.append((method, address, status, tables))
    record_property("tried", tried)
    assert faults == []


@pytest.mark.parametrize("role", ROLES[2:])
def test_no_page_leads_to_one_that_is_shut(places: dict[str, str], role: str) -> None:
    client, followed = signed_in(role), set()
    for page in ("/", "/rate/", "/rate/pairs/", "/glossary/", "/agents/widgets/"):
        for address in set(re.findall(r'(?:href|action)="(/[^"#]*)"', client.get(page).text)) - followed:
            if not address.startswith(("/static/", "/accounts/logout/")):
                assert client.get(address.replace("&amp;", "&")).status_code != 403, (
                    f"{page} leads to {address}"
                )
            followed.add(address)
    assert len(followed) > 5


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def test_endpoints(record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each endpoint is asked by every kind of key, and without one. A publishable key may only rate, from its own site.

    `test_api_access` tests the methods that exist.
    """
    rates = dict.fromkeys(api_settings.DEFAULT_THROTTLE_RATES, "1000000/s")
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", rates)
    keys = {scope: key_create(scope, [scope])[1] for scope in SCOPES}
    row, revoked = key_create("revoked", SCOPES)
    key_revoke(row.name)
    senders = {name: bearer(key) for name, key in {**keys, "revoked": revoked, "nobody": ""}.items()}
    public = bearer(key_create("on a page", ["rate"], agent="widgets", origin=SITE)[1])
    senders |= {f"publishable {site}": {**public, "Origin": site} for site in (SITE, "https://evil.example")}
    scopes: dict[str, dict[str, str]] = {}
    for method, address, scope in ENDPOINTS:
        scopes.setdefault(address, {})[method] = scope
    tried, faults = 0, []
    for address, needed in scopes.items() if CAMPAIGN else list(scopes.items())[::8]:
        for name, headers in senders.items():
            client = Client(headers=headers)
            for method in METHODS:
                scope = needed.get("GET" if method == "HEAD" else method)
                if scope == name or (name == f"publishable {SITE}" and address.startswith("/api/feedback/")):
                    continue
                with written() as tables:
                    status = client.generic(
                        method, address, "{}", content_type="application/json"
                    ).status_code
                tried += 1
                expected = (401,) if name in ("revoked", "nobody") else (403,) if scope else (403, 405)
                if status not in expected or tables:
                    faults.append((name, method, address, status, tables))
    record_property("tried", tried)
    assert faults == []
