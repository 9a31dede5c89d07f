"""Requests at the same moment under one id, at a server of two processes: one body is answered, the other refused."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.server import Server
from tests.support.stub_openai import ModelServer

ROUNDS = 4
AGENT = "assistant"
FREE, TAKEN = "Where is my parcel?", "When do you open?"


class Echo(ModelServer):
    """Repeats each question after a while, so that requests overlap."""

    def __init__(self) -> None:
        self._own = threading.local()
        super().__init__()
        self.delay_s = 0.3

        def heard(body: dict[str, Any]) -> None:
            self.said = f"You said: {body['messages'][-1]['content']}"

        self.asked = heard

    @property
    def said(self) -> str:
        return str(self._own.said)

    @said.setter
    def said(self, words: str) -> None:
        self._own.said = words


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    """Two processes of four threads on a database of their own."""
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path / 'claims.sqlite3'}"
    else:
        url = fresh_database(request.getfixturevalue("postgres_url"))
    with Echo() as stub:
        found = Server(url, tmp_path)
        found.environment |= {"LOCAL_BACKENDS": stub.url}
        found.migrate()
        with found:
            yield found


@dataclass
class Sent:
    question: str
    status: int
    body: dict[str, Any]
    headers: httpx.Headers

    @property
    def answer(self) -> str:
        return str(self.body["choices"][0]["message"]["content"])

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


def asked_at_once(server: Server, key: str, headers: dict[str, str], questions: list[str]) -> list[Sent]:
    barrier = threading.Barrier(len(questions))
    said = {"Authorization": f"Bearer {key}", **headers}

    def ask(question: str) -> Sent:
        body = {"model": AGENT, "messages": [{"role": "user", "content": question}]}
        with httpx.Client(timeout=300) as client:
            barrier.wait()
            found = client.post(f"{server.address}/v1/chat/completions", json=body, headers=said)
        return Sent(question, found.status_code, found.json(), found.headers)

    with ThreadPoolExecutor(len(questions)) as pool:
        return list(pool.map(ask, questions))


def prompts_of(server: Server, key: str, decision: str) -> list[str]:
    found = httpx.get(
        f"{server.address}/api/decisions/{decision}/", headers={"Authorization": f"Bearer {key}"}, timeout=300
    )
    assert found.status_code == 200, found.text
    return [message["content"] for message in found.json()["messages"]]


@pytest.mark.parametrize("header", ["X-Ratchet-Decision", "Idempotency-Key"])
def test_an_answer_never_comes_under_an_id_of_another_body(server: Server, header: str) -> None:
    key = server.key("ingest", "read")
    for _ in range(ROUNDS):
        chosen = {header: str(uuid.uuid4())}
        sent = asked_at_once(server, key, chosen, [FREE, TAKEN] * 2)
        answered = [one for one in sent if one.status == 200]
        refused = [one for one in sent if one.status == 409]
        assert len(answered) + len(refused) == 4, (sent, server.log())
        (winner,) = {one.question for one in answered}
        assert {one.answer.strip() for one in answered} == {f"You said: {winner}"}
        (decision,) = {one.body["id"] for one in answered}
        for one in refused:
            if one.question == winner:
                assert (one.code, one.headers["Retry-After"]) == ("request_in_progress", "1")
            else:
                assert one.code == "idempotency_key_reused"
        # afterwards both stand as they do one after the other
        (again, other) = asked_at_once(server, key, chosen, [winner]) + asked_at_once(
            server, key, chosen, [FREE if winner == TAKEN else TAKEN]
        )
        assert (again.status, again.body["id"], again.answer.strip()) == (
            200,
            decision,
            f"You said: {winner}",
        )
        assert (other.status, other.code) == (409, "idempotency_key_reused")
        assert prompts_of(server, key, decision) == [winner]


def test_streams_and_decide_hold_their_id_too(server: Server) -> None:
    key = server.key("ingest", "read")
    decision = str(uuid.uuid4())
    said = {"Authorization": f"Bearer {key}", "X-Ratchet-Decision": decision}
    body = {"model": AGENT, "messages": [{"role": "user", "content": FREE}], "stream": True}
    address = f"{server.address}/v1/chat/completions"
    with httpx.stream("POST", address, json=body, headers=said, timeout=300) as first:
        assert first.status_code == 200
        (second,) = asked_at_once(server, key, {"X-Ratchet-Decision": decision}, [TAKEN])
        assert (second.status, second.code) == (409, "idempotency_key_reused")
        text = "".join(first.iter_text())
    assert FREE.split()[0] in text
    assert prompts_of(server, key, decision) == [FREE]

    order = {"agent": AGENT, "id": str(uuid.uuid4())}
    orders = [{**order, "messages": [{"role": "user", "content": question}]} for question in (FREE, TAKEN)]
    barrier = threading.Barrier(len(orders) * 2)

    def decide(sent: dict[str, Any]) -> httpx.Response:
        barrier.wait()
        return httpx.post(f"{server.address}/api/decide/", json=sent, headers=said, timeout=300)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(decide, orders * 2))
    made = [one.json() for one in found if one.status_code in (200, 201)]
    (winner,) = {one["messages"][0]["content"] for one in made}
    assert {one["response"].strip() for one in made} == {f"You said: {winner}"}
    for sent, one in zip(orders * 2, found, strict=True):
        if one.status_code not in (200, 201):
            same = sent["messages"][0]["content"] == winner
            expected = (503, "pending") if same else (409, "conflict")
            assert (one.status_code, json.loads(one.text)["error"]["code"]) == expected


def test_a_request_that_failed_leaves_its_id_free(server: Server) -> None:
    key = server.key("ingest", "read")
    chosen = {"X-Ratchet-Decision": str(uuid.uuid4())}
    said = {"Authorization": f"Bearer {key}", **chosen}
    unknown = {"model": "assistant:none", "messages": [{"role": "user", "content": FREE}]}
    refused = httpx.post(f"{server.address}/v1/chat/completions", json=unknown, headers=said, timeout=300)
    assert refused.status_code == 404
    (sent,) = asked_at_once(server, key, chosen, [TAKEN])
    assert (sent.status, sent.body["id"]) == (200, chosen["X-Ratchet-Decision"])
