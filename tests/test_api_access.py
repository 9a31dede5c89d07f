"""REST: who may call what, how often, and how everything that is wrong is answered."""

import json
import logging
import re
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.staticfiles import finders
from django.db import OperationalError
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from rest_framework.settings import api_settings

from backend.operator_file import OperatorFileError, operator_settings
from backend.rest.access import SCOPES, ScopeThrottle
from backend.rest.views import WRITES_AND_READS, ApiView
from backend.settings import _rates
from feedback.accounts.authentication import key_revoke
from feedback.models import Decision, Rating
from feedback.services import decision_record
from tests.support.api_client import ApiClient, decision_body, error_of, person, signed_in

pytestmark = pytest.mark.django_db

OPEN = {"/api/schema/", "/api/docs/", "/api/", "/v1/"}
"""Addresses that anyone may open: the description of the API, and the answer that nothing is there."""


def api_views(patterns: list[URLPattern | URLResolver], before: str = "/") -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        here = before + str(pattern.pattern).replace("^", "")
        if isinstance(pattern, URLResolver):
            yield from api_views(pattern.url_patterns, here)
        elif here.startswith(("/api/", "/v1/")):
            yield here, getattr(pattern.callback, "cls", None)


def endpoints() -> list[tuple[str, str, str]]:
    """(method, address with a value in every place, scope) of every guarded endpoint."""
    found = []
    for address, view in api_views(get_resolver().url_patterns):
        if address in OPEN:
            continue
        assert view is not None, f"{address} is no REST view: it has no guard"
        assert issubclass(view, ApiView), f"{address} is not built on ApiView: it has no guard"
        filled = address.replace("<uuid:pk>", str(uuid.UUID(int=7))).replace("<int:pk>", "7")
        filled = filled.replace("<str:agent>", "support-bot").replace("<str:name>", "widgets-v1")
        filled = filled.replace("<path:name>", "widgets-v1").replace("<str:token>", str(uuid.UUID(int=7)))
        assert "<" not in filled, f"{address}: give the place a value in this test"
        found += [(method, filled, scope) for method, scope in view.scopes.items()]
    return found


ENDPOINTS = endpoints()
IDS = [f"{method} {address}" for method, address, _ in ENDPOINTS]


def call(client: Client, method: str, address: str) -> Any:
    return client.generic(method, address, b"{}" if method != "GET" else b"", content_type="application/json")


def test_the_walk_finds_the_endpoints() -> None:
    assert {
        ("POST", "/api/decisions/", "ingest"),
        ("GET", "/api/decisions/", "read"),
        ("POST", f"/api/decisions/{uuid.UUID(int=7)}/ratings/", "rate"),
        ("POST", "/api/traces/", "ingest"),
        ("POST", "/api/comparisons/", "rate"),
        ("POST", "/api/policies/feedback/support-bot", "rate"),
    } <= set(ENDPOINTS)


def test_scopes_of_views() -> None:
    # every method names a scope
    for _, view in api_views(get_resolver().url_patterns):
        if view is not None and issubclass(view, ApiView):
            answered = {method for method in WRITES_AND_READS if hasattr(view, method.lower())}
            assert answered == set(view.scopes)
            assert set(view.scopes.values()) <= set(SCOPES)
    # a view without a scope cannot be written
    with pytest.raises(TypeError, match="DELETE"):
        type("Careless", (ApiView,), {"scopes": {"GET": "read"}, "get": None, "delete": None})


UNKNOWN_KEYS = ("Bearer rk_" + "A" * 40, "Bearer ", "Bearer \x00", "bearer x y z", "Bearer é")


@pytest.mark.parametrize(("method", "address", "scope"), ENDPOINTS, ids=IDS)
def test_an_endpoint_lets_in_its_scope_and_nobody_else(method: str, address: str, scope: str) -> None:
    nobody = call(Client(), method, address)
    assert (nobody.status_code, error_of(nobody)["code"]) == (401, "unauthorized")
    assert nobody["WWW-Authenticate"] == "Bearer"
    for header in UNKNOWN_KEYS:
        unknown = call(Client(headers={"Authorization": header}), method, address)
        assert (unknown.status_code, error_of(unknown)["code"]) == (401, "unauthorized")
    other = call(ApiClient(*(other for other in SCOPES if other != scope)).client, method, address)
    assert other.status_code == 403
    assert scope in error_of(other)["message"]
    rater = signed_in("ada", "rater")
    by_rater = call(rater, method, address).status_code
    assert by_rater not in (401, 403) if scope == "rate" else by_rater == 403
    assert call(ApiClient(scope).client, method, address).status_code not in (401, 403, 405, 500)


def test_a_person_without_a_role_and_a_revoked_key_may_nothing(django_user_model: Any) -> None:
    client, app = Client(), ApiClient("read")
    client.force_login(django_user_model.objects.create_user("ada"))
    assert {call(client, method, address).status_code for method, address, _ in ENDPOINTS} == {403}
    assert app.get("/api/decisions/").status_code == 200
    key_revoke("key-read")
    assert app.get("/api/decisions/").status_code == 401


def test_a_session_writes_with_its_csrf_token_alone() -> None:
    decision = decision_record(agent="a", messages="q", response="r").row
    client = Client(enforce_csrf_checks=True)
    client.force_login(person("ada", "rater"))
    path, body = f"/api/decisions/{decision.pk}/ratings/", json.dumps({"thumb": "up"})
    refused = client.post(path, body, content_type="application/json")
    assert refused.status_code == 403
    assert "CSRF" in error_of(refused)["message"]
    assert not Rating.objects.exists()
    client.cookies["csrftoken"] = token = "x" * 32
    allowed = client.post(path, body, content_type="application/json", headers={"X-CSRFToken": token})
    assert allowed.status_code == 201


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = dict(api_settings.DEFAULT_THROTTLE_RATES)
    monkeypatch.setattr(api_settings, "DEFAULT_THROTTLE_RATES", found)
    monkeypatch.setattr(ScopeThrottle, "_counts", {})
    return found


def test_too_many_requests_are_told_when_to_come_back(rates: dict[str, str]) -> None:
    rates["read"] = "3/hour"
    app = ApiClient("read", "ingest")
    assert [app.get("/api/decisions/").status_code for _ in range(3)] == [200, 200, 200]
    response = app.get("/api/decisions/")
    assert response.status_code == 429
    assert error_of(response)["code"] == "throttled"
    assert 1 <= int(response["Retry-After"]) <= 3600
    assert app.post("/api/decisions/", decision_body()).status_code == 201, (
        "another scope has a count of its own"
    )
    assert ApiClient("read").get("/api/decisions/").status_code == 200, "another key has a count of its own"


def test_a_new_window_starts_from_nothing(rates: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    rates["read"] = "1/min"
    app = ApiClient("read")
    now = 1_000_000_020.0  # 40 seconds into a minute: 1e9 is divisible by neither, 1_000_000_020 % 60 == 0
    monkeypatch.setattr("backend.rest.access.time.time", lambda: now + 40)
    assert [app.get("/api/decisions/").status_code for _ in range(2)] == [200, 429]
    assert app.get("/api/decisions/")["Retry-After"] == "20"
    monkeypatch.setattr("backend.rest.access.time.time", lambda: now + 60)
    assert app.get("/api/decisions/").status_code == 200


def test_rates_are_set_in_the_file_of_knobs() -> None:
    assert _rates({"throttle_read": "7/min"})["read"] == "7/min"
    assert _rates({})["ingest"] == django_settings.REST_FRAMEWORK["DEFAULT_THROTTLE_RATES"]["ingest"]
    for knobs in ({"throttle_read": "7"}, {"throttle_write": "7/min"}, {"throttle_read": "0/min"}):
        with pytest.raises(OperatorFileError, match="throttle_"):
            operator_settings({"feedback": knobs})


@pytest.fixture
def app() -> ApiClient:
    return ApiClient("ingest", "rate", "read")


NO_JSON = (
    *(b"", b"{", b"nonsense", b"[" * 100_000, b'{"a":' * 5_000, b"\x00", b'{"a": 1}{"b": 2}'),
    *(
        b'{"agent": NaN}',
        b'{"agent": Infinity}',
        b'{"agent": -Infinity}',
        b'{"agent": ' + b"9" * 5_000 + b"}",
    ),
    *(b"\xff\xfe{}", b'{"agent": "\xff"}', "{}".encode("utf-16"), b"\xef\xbb\xbf{}"),
    *(b"5", b'"text"', b"null", b"true"),
    b'{"agent": "a", "messages": "q", "response": "r", "state": NaN}',
)


@pytest.mark.parametrize("path", ["decisions/", "traces/", "comparisons/", "policies/feedback/a"])
def test_a_body_that_is_no_object_of_json_is_refused(app: ApiClient, path: str) -> None:
    for body in NO_JSON:
        response = app.post(f"/api/{path}", body)
        assert response.status_code == 400, body[:20]
        error_of(response)
    assert not Decision.objects.exists()


def test_another_type_of_body_or_method_is_refused(app: ApiClient) -> None:
    def sent(kind: str, method: str = "POST") -> Any:
        body = json.dumps(decision_body())
        return app.client.generic(method, "/api/decisions/", body, content_type=kind)

    others = (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/xml",
    )
    for kind in (*others, "", *(f"application/json; charset={name}" for name in ("utf-16", "zlib", "hex"))):
        response = sent(kind)
        assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")
    for kind in ("application/json; charset=UTF-8", "Application/JSON"):
        assert sent(kind).status_code == 201
    for method in ("PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        response = sent("application/json", method)
        assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
        assert set(response["Allow"].split(", ")) == {"GET", "POST", "HEAD"}


def test_a_body_over_the_limit_is_refused(app: ApiClient, settings: Any) -> None:
    settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1000
    response = app.post("/api/decisions/", decision_body(response="x" * 1000))
    assert response.status_code == 413
    assert error_of(response)["code"] == "too_large"
    assert app.post("/api/decisions/", decision_body(response="x" * 500)).status_code == 201


def test_a_chunked_body_is_asked_for_its_length(app: ApiClient) -> None:
    response = app.client.generic(
        "POST", "/api/decisions/", b"", content_type="application/json", HTTP_TRANSFER_ENCODING="chunked"
    )
    assert response.status_code == 411
    assert error_of(response)["code"] == "length_required"


NOWHERE = ("", "nothing/", "decisions", "decisions/7/", "decisions/x/ratings/", "../x", "%00")


def test_an_address_where_nothing_is_answers_json_whatever_is_asked_for(app: ApiClient) -> None:
    for path in NOWHERE:
        for method in ("GET", "POST"):
            response = app.client.generic(method, f"/api/{path}", b"{}", content_type="application/json")
            assert (response.status_code, error_of(response)["code"]) == (404, "not_found")
    html = {"Accept": "text/html"}
    response = app.client.get("/api/decisions/", headers=html)
    assert (response.status_code, response["Content-Type"]) == (200, "application/json")
    error_of(app.client.get("/api/nothing/", headers=html))
    foreign = app.client.get("/api/decisions/", headers={"Host": "evil.example"})
    assert foreign.status_code == 400
    error_of(foreign)


def test_surprises(app: ApiClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(**_: Any) -> None:
        raise KeyError("the secret of the house")

    monkeypatch.setattr("feedback.api.decisions.decisions_search", broken)
    logging.getLogger("backend").addHandler(caplog.handler)
    try:
        response = app.get("/api/decisions/")
    finally:
        logging.getLogger("backend").removeHandler(caplog.handler)
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal"
    assert b"secret" not in response.content
    assert b"Traceback" not in response.content
    assert "the secret of the house" in caplog.text


def test_an_outage_says_when_to_come_back(app: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(**_: Any) -> None:
        raise OperationalError("connection refused to 10.0.0.7")

    monkeypatch.setattr("feedback.api.decisions.decisions_search", away)
    response = app.get("/api/decisions/")
    assert response.status_code == 503
    assert error_of(response)["code"] == "unavailable"
    assert int(response["Retry-After"]) > 0
    assert b"10.0.0.7" not in response.content


def test_the_schema_and_its_page_are_open_and_load_nothing_from_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schema = Client().get("/api/schema/")
    assert "Warning" not in capsys.readouterr().err
    assert (schema.status_code, schema["Content-Type"]) == (200, "application/json")
    assert schema.json()["openapi"].startswith("3.1")
    page = Client().get("/api/docs/")
    assert page.status_code == 200
    loaded = re.findall(r'<(?:script|link|img)\b[^>]*?(?:src|href)="([^"]+)"', page.content.decode())
    assert len(loaded) >= 4
    for address in loaded:
        if address.startswith("/api/docs/?"):  # the page's own script
            continue
        assert address.startswith("/static/")
        assert finders.find(address.removeprefix("/static/")), address


def test_the_schema_describes_every_endpoint_and_its_scope() -> None:
    described = {
        (method.upper(), path)
        for path, methods in Client().get("/api/schema/").json()["paths"].items()
        for method in methods
    }
    expected = set()
    for address, view in api_views(get_resolver().url_patterns):
        # what is below /v1/ is described by OpenAI
        if view is not None and issubclass(view, ApiView) and not address.startswith("/v1/"):
            path = (
                address.replace("<uuid:pk>", "{id}")
                .replace("<int:pk>", "{id}")
                .replace("<str:agent>", "{agent}")
                .replace("<str:name>", "{name}")
                .replace("<str:token>", "{token}")
            )
            expected |= {(method, path) for method in view.scopes}
    assert {(method, path.replace("{pk}", "{id}")) for method, path in described} == expected
