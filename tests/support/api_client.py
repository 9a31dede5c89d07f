"""A client of the REST API in tests: JSON in, JSON out, as a key or as a signed-in person."""

import json
from typing import Any

from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from feedback.accounts.authentication import key_create
from feedback.accounts.roles import role_give


class ApiClient:
    """Sends JSON with a key of the given scopes, or with none."""

    def __init__(self, *scopes: str, key: str = "") -> None:
        self.key = key or (key_create(f"key-{'-'.join(scopes)}", scopes)[1] if scopes else "")
        self.client = Client(
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {}, raise_request_exception=False
        )

    def post(self, path: str, body: Any, **more: Any) -> HttpResponse:
        raw = body if isinstance(body, (str, bytes)) else json.dumps(body)
        return self.client.post(path, raw, content_type="application/json", **more)  # type: ignore[return-value]

    def get(self, path: str, **query: Any) -> HttpResponse:
        return self.client.get(path, query)  # type: ignore[return-value]


def person(name: str, role: str) -> User:
    """A person with a role made by the migration."""
    user = User.objects.create_user(name, password="correct horse battery")
    role_give(user, role)
    return user


def signed_in(name: str, role: str) -> Client:
    client = Client()
    client.force_login(person(name, role))
    return client


def decision_body(**more: Any) -> dict[str, Any]:
    return {"agent": "support-bot", "messages": "Where is my order?", "response": "On its way.", **more}


def error_of(response: HttpResponse) -> dict[str, Any]:
    """The error of a refusal, after checking that it has the shape of its address and is JSON."""
    assert response["Content-Type"] == "application/json", response.content[:200]
    body = json.loads(response.content)
    request = getattr(response, "request", None)
    if request is not None and request["PATH_INFO"] in ("/v1/traces", "/v1/logs"):
        assert set(body) == {"code", "message"}
        assert body["message"]
        return {**body, "code": {16: "unauthorized", 7: "forbidden"}.get(body["code"], body["code"])}
    if request is not None and request["PATH_INFO"] == "/v1/messages":
        assert body.pop("type") == "error"
        assert set(body["error"]) == {"message", "type", "code"}
    elif request is not None and request["PATH_INFO"].startswith("/v1/"):
        assert set(body["error"]) == {"message", "type", "param", "code"}
    else:
        assert set(body["error"]) == {"code", "message", "fields"}
    assert set(body) == {"error"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error
