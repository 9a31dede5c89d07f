"""Client.decide, rate and outcome: what is sent, what comes back, what is raised, and what outlives a dead server."""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_server import Ratchet
from ratchet_client import Client, Decision, RatchetError, RequestRefused, ServerUnavailable

KEY = "7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a001"


def decided(path: str, body: dict[str, Any]) -> str | None:
    """The body of a response as POST /api/decide/ has it, as far as the client reads it."""
    if path != "/api/decide/":
        return None
    return json.dumps(
        {
            "id": body["id"],
            "response": "billing",
            "action": {"queue": "billing"},
            "policy": "support-bot-v2",
            "arm": "challenger",
            "propensity": 0.75,
            "recorded": True,
            "stored": True,
            "source": "decide",
        }
    )


def refusal(status: int, code: str, message: str, **fields: str) -> tuple[int, str]:
    return status, json.dumps({"error": {"code": code, "message": message, "fields": fields}})


@pytest.fixture
def ratchet() -> Iterator[Ratchet]:
    server = Ratchet()
    server.text = decided
    yield server
    server.stop()


@pytest.fixture
def client(ratchet: Ratchet) -> Iterator[Client]:
    with Client("support-bot", ratchet.url, "key") as client:
        yield client


def test_decide_sends_what_it_is_given_and_returns_the_decision(ratchet: Ratchet, client: Client) -> None:
    decision = client.decide(
        [("system", "Be brief."), ("human", "I was charged twice")],
        candidates=["billing", {"response": "sales", "score": 0.1}],
        unit="user-7",
        run_id="run-1",
        metadata={"channel": "web"},
    )
    ((path, key, body),) = ratchet.requests
    assert (path, key) == ("/api/decide/", "Bearer key")
    assert body == {
        "id": decision.id,
        "agent": "support-bot",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "I was charged twice"},
        ],
        "candidates": ["billing", {"response": "sales", "score": 0.1}],
        "unit": "user-7",
        "run_id": "run-1",
        "metadata": {"channel": "web"},
    }
    expected = ("billing", {"queue": "billing"}, "support-bot-v2")
    assert (decision.response, decision.action, decision.policy) == expected
    assert (decision.arm, decision.propensity, decision.recorded) == ("challenger", 0.75, True)
    assert decision.facts["source"] == "decide"


def test_what_is_left_out_is_not_sent(ratchet: Ratchet, client: Client) -> None:
    client.decide(state={}, id=KEY)
    client.rate(KEY, thumb="up")
    client.outcome(KEY, "ticket_reopened", 0)
    bodies = [body for _, _, body in ratchet.requests]
    assert bodies[0] == {"id": KEY, "agent": "support-bot", "state": {}}
    assert set(bodies[1]) == {"id", "thumb"}
    assert {k: v for k, v in bodies[2].items() if k != "id"} == {"name": "ticket_reopened", "value": 0}


def test_without_an_outbox_a_rating_is_stored_when_the_call_returns(ratchet: Ratchet, client: Client) -> None:
    decision = client.decide("Where?")
    receipt = client.rate(decision, stars=4, tags=["short"], rater="ada", id=KEY)
    assert (receipt.id, receipt.state) == (KEY, "stored")
    path, _, body = ratchet.requests[-1]
    assert path == f"/api/decisions/{decision.id}/ratings/"
    assert body == {"id": KEY, "stars": 4, "tags": ["short"], "rater": "ada"}


def test_async_twins_send_the_same_and_run_side_by_side(ratchet: Ratchet, client: Client) -> None:
    together = threading.Barrier(3)  # breaks, and the test with it, unless three requests are open at once

    def answer(path: str, body: dict[str, Any]) -> int | None:
        if path == "/api/decide/":
            together.wait(20)
        return None

    ratchet.answer = answer

    async def session() -> list[str]:
        decisions = await asyncio.gather(*(client.adecide(f"question {i}") for i in range(3)))
        await client.arate(decisions[0], thumb="down")
        await client.aoutcome(decisions[0], "ticket_reopened", True)
        return [decision.id for decision in decisions]

    ids = asyncio.run(session())
    assert len(client._pool._idle) == 3  # a connection for each request in flight, and all of them kept
    assert len(set(ids)) == 3
    expected = [f"/api/decisions/{ids[0]}/ratings/", f"/api/decisions/{ids[0]}/outcomes/"]
    assert [path for path, _, _ in ratchet.requests[3:]] == expected


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({}, "at least one of thumb, stars"),
        ({"thumb": "sideways"}, "thumb: expected up or down, found 'sideways'"),
        ({"stars": 6}, "stars: expected a whole number from 1 to 5, found 6"),
        ({"score": 1.5}, "score: expected a number from 0 to 1, found 1.5"),
        ({"score": "0.5"}, "score: expected a number from 0 to 1"),
    ],
)
def test_bad_rating(client: Client, ratchet: Ratchet, arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        client.rate(KEY, **arguments)
    assert ratchet.requests == []


def test_other_faults_of_arguments_are_refused_at_once(client: Client, ratchet: Ratchet) -> None:
    with pytest.raises(ValueError, match="expected messages or a state"):
        client.decide()
    with pytest.raises(ValueError, match="expected a finite number, found nan"):
        client.outcome(KEY, "minutes", float("nan"))
    with pytest.raises(ValueError, match="UUID"):
        client.rate("not an id", thumb="up")
    with pytest.raises(ValueError, match="expected an agent"):
        Client("No Slug", ratchet.url)
    with pytest.raises(ValueError, match="expected a spool_dir with redact"):
        Client("support-bot", ratchet.url, redact=lambda trace: trace)
    assert ratchet.requests == []


def test_a_refusal_names_status_code_and_fields(ratchet: Ratchet, client: Client) -> None:
    status, text = refusal(400, "invalid", "messages: expected a list", messages="expected a list")
    ratchet.answer, ratchet.text = lambda path, body: status, lambda path, body: text
    with pytest.raises(RequestRefused, match="HTTP 400 invalid: messages: expected a list") as caught:
        client.decide("Where?")
    assert (caught.value.status, caught.value.code) == (400, "invalid")
    assert caught.value.fields == {"messages": "expected a list"}


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_ids_to_come_again_with_are_told(ratchet: Ratchet, client: Client, status: int) -> None:
    _, text = refusal(status, "unavailable", "the database cannot be reached")
    ratchet.answer, ratchet.text = lambda path, body: status, lambda path, body: text
    ratchet.headers = {"Retry-After": "7"}
    with pytest.raises(ServerUnavailable, match="the database cannot be reached") as caught:
        client.decide("Where?")
    assert (caught.value.status, caught.value.retry_after_s) == (status, 7.0)
    ratchet.answer, ratchet.text = lambda path, body: None, decided
    assert client.decide("Where?", id=caught.value.id).id == caught.value.id
    first, second = (body for _, _, body in ratchet.requests)
    assert first == second


def test_a_server_that_is_not_there_is_unavailable(ratchet: Ratchet, client: Client) -> None:
    ratchet.stop()
    with pytest.raises(ServerUnavailable, match="no response from") as caught:
        client.rate(KEY, thumb="up")
    assert caught.value.status is None


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (200, "<html>Log in to the Wi-Fi</html>", ServerUnavailable),
        (200, '{"hello": "world"}', ServerUnavailable),
        (302, "", ServerUnavailable),
        (302, json.dumps({"id": KEY}), ServerUnavailable),
        (404, "<h1>Not Found</h1>", RequestRefused),
        (502, "bad gateway", ServerUnavailable),
    ],
)
def test_not_us(ratchet: Ratchet, client: Client, status: int, text: str, error: type[RatchetError]) -> None:
    ratchet.answer, ratchet.text = lambda path, body: status, lambda path, body: text or " "
    with pytest.raises(error, match="check the url"):
        client.decide("Where?")
    with pytest.raises(error, match="check the url"):
        client.rate(KEY, thumb="up", id=KEY)


def test_a_long_answer_is_read_whole(ratchet: Ratchet, client: Client) -> None:
    long = "x" * 300_000

    def text(path: str, body: dict[str, Any]) -> str:
        return json.dumps(json.loads(decided(path, body) or "") | {"response": long})

    ratchet.text = text
    assert client.decide("Where?").response == long


def test_ratings_outlive_a_dead_server_and_the_client(ratchet: Ratchet, tmp_path: Path) -> None:
    ratchet.stop()
    client = Client("support-bot", ratchet.url, "key", tmp_path, fsync=False)
    rating = client.rate(KEY, thumb="up", id=uuid.UUID(int=1))
    outcome = client.outcome(KEY, "ticket_reopened", False)
    assert (rating.state, outcome.state) == ("queued", "queued")
    assert client.close(0.3) is False
    ratchet.start()
    with Client("support-bot", ratchet.url, "key", tmp_path, fsync=False) as again:
        assert again.flush(20)
    expected = [("ratings", str(uuid.UUID(int=1))), ("outcomes", outcome.id)]
    assert [(path.rsplit("/", 2)[-2], body["id"]) for path, _, body in ratchet.requests] == expected
    assert ratchet.requests[0][2] == {"id": str(uuid.UUID(int=1)), "thumb": "up"}


def test_a_rating_that_nothing_takes_is_unsaved(ratchet: Ratchet, tmp_path: Path) -> None:
    ratchet.stop()
    (tmp_path / "spool").write_text("a file where the folder should be")
    client = Client("support-bot", ratchet.url, "key", tmp_path / "spool", fsync=False)
    assert client.rate(KEY, thumb="up").state == "unsaved"
    assert client.collector.status().waiting == 1
    client.close(0.1)


def test_own_decisions_go_through_the_outbox(ratchet: Ratchet, tmp_path: Path) -> None:
    with Client("support-bot", ratchet.url, "key", tmp_path, fsync=False) as client:
        key = client.collector.decision("Where?", "There", policy="rules-v1")
        client.rate(key, thumb="up", rater="user-7")
        assert client.flush(20)
    assert [path for path, _, _ in ratchet.requests] == ["/api/traces/", f"/api/decisions/{key}/ratings/"]


def test_a_client_without_an_outbox_has_no_collector(client: Client) -> None:
    with pytest.raises(RatchetError, match="give it a spool_dir"):
        _ = client.collector


def test_a_decision_shows_what_matters_and_not_its_prompt(client: Client) -> None:
    shown = repr(client.decide("Where?"))
    assert "billing" in shown
    assert "source" not in shown
    assert isinstance(client.decide("Where?"), Decision)
