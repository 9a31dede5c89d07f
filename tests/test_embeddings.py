"""`/v1/embeddings` by the official client: passed on to an upstream over its connections, breaker, limit and key."""

import base64
import json
import struct
from typing import Any

import openai
import pytest

from feedback.cache import forget_all
from feedback.models import Decision
from rl.models import Upstream
from rl.upstreams import upstream_add
from tests.support.api_client import ApiClient, error_of
from tests.support.hosted import model_server  # noqa: F401
from tests.support.serving import openai_client  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)

KEY = "sk-embedding-key-0123456789"
VECTORS = [[0.5, -1.0], [0.25, 2.0]]


def upstream(url: str, name: str = "one", **more: Any) -> Upstream:
    found = upstream_add({"name": name, "url": url, "model": "emb-own", **more}, KEY)
    forget_all()
    return found


def say(stub: ModelServer, **more: Any) -> None:
    """The upstream's answer; vectors as the official client asks for them."""
    data = [
        {"object": "embedding", "index": n, "embedding": base64.b64encode(struct.pack("<2f", *one)).decode()}
        for n, one in enumerate(VECTORS)
    ]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    body = {"object": "list", "model": "emb-1-0925", "data": data, "usage": usage, **more}
    stub.sends = ("application/json", json.dumps(body).encode())


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "one:emb-1", "input": "hello", **more}


def test_the_official_client_gets_the_upstreams_vectors(client: openai.OpenAI, stub: ModelServer) -> None:
    upstream(stub.url)
    say(stub)
    found = client.embeddings.create(model="one:emb-1", input=["hello", "there"], dimensions=2, user="ada")
    assert [one.embedding for one in found.data] == VECTORS
    assert (found.model, found.usage.total_tokens) == ("emb-1-0925", 4)
    assert stub.paths == ["/v1/embeddings"]
    assert stub.bodies == [
        {"model": "emb-1", "input": ["hello", "there"], "dimensions": 2, "encoding_format": "base64"}
    ]
    assert not Decision.objects.exists()


def test_a_user_goes_only_to_an_upstream_that_forwards_fields(stub: ModelServer) -> None:
    upstream(stub.url, forward_fields=True)
    say(stub)
    assert ApiClient("ingest").post("/v1/embeddings", asked(user="ada")).status_code == 200
    assert stub.bodies[0]["user"] == "ada"


def test_the_model_names_its_upstream_unless_there_is_one_alone(stub: ModelServer) -> None:
    api = ApiClient("ingest")
    say(stub)
    refused = api.post("/v1/embeddings", asked())
    assert (refused.status_code, error_of(refused)["code"]) == (404, "model_not_found")
    upstream(stub.url)
    upstream("https://claude.invalid/v1", "claude", dialect="anthropic")
    for name in ("one:emb-1", "one", "nomic-embed-text:latest"):
        assert api.post("/v1/embeddings", asked(model=name)).status_code == 200
    assert [body["model"] for body in stub.bodies] == ["emb-1", "emb-own", "nomic-embed-text:latest"]
    refused = api.post("/v1/embeddings", asked(model="claude:emb-1"))
    assert (refused.status_code, error_of(refused)["param"]) == (404, "model")
    upstream(stub.url, "two")
    refused = api.post("/v1/embeddings", asked(model="emb-1"))
    assert (refused.status_code, error_of(refused)["param"]) == (404, "model")
    assert "one, two" in error_of(refused)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "a"}, "model"),
        ({"model": 3, "input": "a"}, "model"),
        ({"model": "one:m"}, "input"),
        ({"model": "one:m", "input": ""}, "input"),
        ({"model": "one:m", "input": []}, "input"),
        ({"model": "one:m", "input": {"a": 1}}, "input"),
        ({"model": "one:m", "input": ["a", 1]}, "input"),
        ([], ""),
    ],
)
def test_bad_requests_reach_no_upstream(stub: ModelServer, body: Any, param: str) -> None:
    upstream(stub.url)
    refused = ApiClient("ingest").post("/v1/embeddings", body)
    assert refused.status_code == 400
    assert (error_of(refused)["param"] or "").startswith(param)
    assert not stub.bodies


@pytest.mark.parametrize(
    ("statuses", "sends", "status", "code"),
    [
        ([400], None, 400, "c"),
        ([401], None, 503, "unavailable"),
        ([500] * 3, None, 503, "unavailable"),
        ([0] * 3, None, 503, "unavailable"),
        ([], b"no JSON", 502, "bad_upstream_answer"),
        ([], b'{"object": "list"}', 502, "bad_upstream_answer"),
        ([], b'{"data": {}}', 502, "bad_upstream_answer"),
    ],
)
def test_what_an_upstream_does_wrong_has_openais_shape_and_no_key(
    stub: ModelServer, statuses: list[int], sends: bytes | None, status: int, code: str
) -> None:
    upstream(stub.url)
    stub.statuses, stub.error = statuses, {"message": f"not with {KEY}", "code": "c"}
    if sends is not None:
        stub.sends = ("application/json", sends)
    refused = ApiClient("ingest").post("/v1/embeddings", asked())
    assert (refused.status_code, error_of(refused)["code"]) == (status, code)
    assert KEY not in refused.text


def test_a_wait_the_upstream_asks_for_is_passed_on(stub: ModelServer) -> None:
    upstream(stub.url)
    stub.statuses, stub.retry_after = [429], "30"
    api = ApiClient("ingest")
    refused = api.post("/v1/embeddings", asked())
    assert (refused.status_code, len(stub.bodies)) == (503, 1)
    assert 25 <= int(refused["Retry-After"]) <= 30
    # the other models of this upstream go on
    say(stub)
    stub.retry_after = ""
    assert api.post("/v1/embeddings", asked(model="one:emb-2")).status_code == 200
