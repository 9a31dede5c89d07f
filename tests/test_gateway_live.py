"""OpenAI's own client against the running gateway, in front of a real model server that is slow, fails and dies."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Rating
from rl.serving import endpoint
from rl.serving.gateway import recorder
from tests.support.hosted import recorded
from tests.support.server import free_port
from tests.support.serving import openai_client, support_bot_allowed  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("support_bot")]

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def stub(settings: Any) -> Iterator[ModelServer]:
    with ModelServer() as server:
        settings.LOCAL_BACKENDS = [server.url]
        yield server


def spooled(count: int) -> list[str]:
    """The spool's decisions; waits for so many: what the journal holds goes there when the database refuses it."""
    deadline = time.monotonic() + 30
    found: list[str] = []
    while len(found) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        found = [record.body["body"]["id"] for record in recorder.outbox.pending()]
    return found


def test_a_rating_right_after_the_answer(stub: ModelServer, client: openai.OpenAI, live_server: Any) -> None:
    for _ in range(5):
        answer = client.chat.completions.create(model="support-bot", messages=HELLO)
        rated = httpx2.post(
            f"{live_server.url}/api/decisions/{answer.id}/ratings/",
            json={"thumb": "up"},
            headers={"Authorization": f"Bearer {client.api_key}"},
        )
        assert rated.status_code == 201
    assert Rating.objects.count() == 5


def test_refusals_are_the_clients_own_errors(client: openai.OpenAI, stub: ModelServer) -> None:
    broken: Any = [{"role": "user", "content": 5}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="support-bot", messages=broken)
    assert (refusal.value.param, refusal.value.type) == ("messages[0].content", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="support-bot:none", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="rk_wrong").chat.completions.create(model="a", messages=HELLO)
    assert stub.bodies == []


@pytest.mark.slow
def test_retries_are_one(client: openai.OpenAI, stub: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRIES", 0)
    stub.statuses = [503]  # the gateway's one try; it answers 503, and the client comes again
    answer = client.with_options(max_retries=2).chat.completions.create(model="support-bot", messages=HELLO)
    assert len(stub.bodies) == 2
    assert [str(row.pk) for row in recorded()] == [answer.id]


@pytest.mark.slow
def test_a_client_that_lost_the_answer_gets_the_same_one_again(live_server: Any, stub: ModelServer) -> None:
    class LosesTheFirst(httpx2.HTTPTransport):
        lost = 0

        def handle_request(self, request: httpx2.Request) -> httpx2.Response:
            response = super().handle_request(request)
            if not self.lost:
                self.lost += 1
                response.read()
                raise httpx2.ReadError("the line went dead", request=request)
            return response

    key = key_create("app", ["ingest"])[1]
    transport = LosesTheFirst()
    client = openai.OpenAI(
        base_url=f"{live_server.url}/v1", api_key=key, http_client=httpx2.Client(transport=transport)
    )
    answer = client.chat.completions.create(model="support-bot", messages=HELLO)
    assert transport.lost == 1
    assert [str(row.pk) for row in recorded()] == [answer.id]


@pytest.mark.slow
def test_an_outage_of_the_database_loses_nothing(
    stub: ModelServer, client: openai.OpenAI, settings: Any
) -> None:
    settings.FEEDBACK_REMEMBER_S = 0.0  # whatever was read is too old, and the database is asked again
    first = client.chat.completions.create(model="support-bot", messages=HELLO).id
    assert [str(row.pk) for row in recorded()] == [first]  # written, so that it never goes to the spool

    def away(*_: Any, **__: Any) -> Any:
        raise OperationalError("server closed the connection unexpectedly")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseDatabaseWrapper, "cursor", away)
        patch.setattr(BaseDatabaseWrapper, "connect", away)
        once = client.with_options(timeout=60, max_retries=0)
        ids = [once.chat.completions.create(model="support-bot", messages=HELLO).id for _ in range(3)]
        chunks = list(once.chat.completions.create(model="support-bot", messages=HELLO, stream=True))
        assert sorted(spooled(4)) == sorted([*ids, chunks[0].id])
    assert [str(row.pk) for row in recorded()] == [first, *ids, chunks[0].id]


@pytest.mark.slow
def test_a_killed_model_server(live_server: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.SERVING_TIMEOUT_S = 3.0
    first, port = ModelServer(), free_port()
    second = ModelServer(port)
    first.delay_s = second.delay_s = 0.01
    first.said, second.said = "first", "second"
    settings.LOCAL_BACKENDS = [first.url, second.url]
    key = key_create("app", ["ingest"])[1]
    results: list[tuple[int, str, str]] = []

    def ask(count: int) -> None:
        with httpx2.Client(
            headers={"Authorization": f"Bearer {key}"}, timeout=30
        ) as http:  # no request takes longer
            for _ in range(count):
                response = http.post(
                    f"{live_server.url}/v1/chat/completions", json={"model": "support-bot", "messages": HELLO}
                )
                body = response.json()
                said = body["choices"][0]["message"]["content"] if response.status_code == 200 else ""
                id = body.get("id") or response.headers.get("Retry-After", "")
                results.append((response.status_code, said, id))

    threads = [threading.Thread(target=ask, args=(15,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    while len(results) < 15:
        time.sleep(0.005)
    first.statuses = [0] * 10_000  # dies: every connection is cut, and then nobody listens
    first.close()
    while len(results) < 45:
        time.sleep(0.005)
    second.statuses = [0] * 10_000
    second.close()
    for thread in threads:
        thread.join()

    statuses = Counter(status for status, *_ in results)
    assert len(results) == 90
    assert set(statuses) == {200, 503}
    assert {said for status, said, _ in results if status == 200} == {"first", "second"}
    assert all(int(wait) >= 1 for status, _, wait in results if status == 503)
    assert sorted(str(row.pk) for row in recorded()) == sorted(
        id for status, *_, id in results if status == 200
    )
    stepped_in = Decision.objects.filter(metadata__serving__backend=f"127.0.0.1:{port}")
    assert stepped_in.exists()
    assert all(row.metadata["serving"]["fallbacks"] for row in stepped_in)
