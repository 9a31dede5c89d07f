"""A backend behind OpenAI's protocol: what is sent, how failures are met, and the guards in front of it."""

import json
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rl.agents import AGENTS
from rl.serving import endpoint
from rl.serving.base import (
    Ask,
    BackendFailed,
    CircuitBreaker,
    ConcurrencyLimiter,
    Endpoint,
    Model,
    ServingRefused,
)
from rl.serving.endpoint import EndpointBackend
from tests.support.stub_openai import ModelServer

HELLO = [{"role": "user", "content": "hello"}]
POLICY = Model("widgets-v3", "bundled")
BASE_MODEL = Model("base", "Qwen/Qwen3-0.6B")


def streamed(ask: Ask) -> Ask:
    return replace(ask, stream=True)


@pytest.fixture
def stub() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


@pytest.fixture
def backend(stub: ModelServer) -> EndpointBackend:
    return EndpointBackend(Endpoint("stub", stub.url, key="sk-1"))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    "told", [[{"token": "a", "logprob": -0.2}, {"token": "b", "logprob": -0.4}], None, [], [7]]
)
def test_confidence_is_what_the_tokens_log_probabilities_come_to(
    backend: EndpointBackend, stub: ModelServer, told: object
) -> None:
    whole = stub.completion()
    whole["choices"][0]["logprobs"] = None if told is None else {"content": told}
    stub.sends = ("application/json", json.dumps(whole).encode())
    answer = backend.answer(Ask(HELLO, confidence=True), POLICY, 5)
    assert stub.bodies[-1]["logprobs"] is True
    assert answer.confidence == (pytest.approx(math.exp(-0.3)) if told and told != [7] else None)
    assert "logprobs" not in answer.extras.choice
    kept = backend.answer(Ask(HELLO, confidence=True, extra={"logprobs": True}), POLICY, 5)
    assert kept.extras.choice.get("logprobs") == whole["choices"][0]["logprobs"]
    assert backend.answer(Ask(HELLO), POLICY, 5).confidence is None
    assert "logprobs" not in stub.bodies[-1]


def test_what_was_asked_for_is_sent_in_openais_words(backend: EndpointBackend, stub: ModelServer) -> None:
    schema = {"type": "object"}
    ask = Ask(
        HELLO,
        9,
        temperature=0.5,
        top_p=0.9,
        stop=["END"],
        seed=3,
        response_schema=schema,
        extra={"tools": [1], "tool_choice": "auto"},
        limit_field="max_completion_tokens",
    )
    backend.answer(ask, POLICY, 5)
    assert stub.bodies[0] == {
        "model": "widgets-v3",
        "messages": HELLO,
        "max_completion_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "seed": 3,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "response", "schema": schema, "strict": True},
        },
        "tools": [1],
        "tool_choice": "auto",
    }


def test_a_server_that_repeats_an_item_has_not_answered(backend: EndpointBackend, stub: ModelServer) -> None:
    prioritizer, state = AGENTS["prioritizer"], {"goal": "go on", "tasks": list("abcdefgh")}
    ask = Ask(HELLO, response_schema=prioritizer.response_schema(state))
    stub.said = prioritizer.respond(list("aaaaaaaa"))
    for answered in (
        lambda: backend.answer(ask, POLICY, 5),
        lambda: next(backend.pieces(streamed(ask), POLICY, 5)),
    ):
        stub.bodies.clear()
        with pytest.raises(BackendFailed, match="uniqueItems") as failure:
            answered()
        assert failure.value.kind == "repeated"
        assert len(stub.bodies) == 3  # drawn anew each time
    sent = stub.bodies[0]["response_format"]["json_schema"]["schema"]
    assert "uniqueItems" not in json.dumps(sent)  # servers refuse the keyword
    stub.said = prioritizer.respond(list("hgfedcba"))
    pieces = list(backend.pieces(streamed(ask), POLICY, 5))
    assert "".join(piece.text for piece in pieces) == stub.said
    assert pieces[-1].finish_reason == "stop"


def test_a_local_server_is_asked_only_for_models_on_its_list(stub: ModelServer) -> None:
    stub.models = ["widgets-v3:latest", "Qwen/Qwen3-0.6B"]
    backend = EndpointBackend(Endpoint("local", stub.url), listed=True)
    backend.answer(Ask(HELLO), POLICY, 5)
    backend.answer(Ask(HELLO), BASE_MODEL, 5)
    assert [body["model"] for body in stub.bodies] == ["widgets-v3:latest", "Qwen/Qwen3-0.6B"]
    with pytest.raises(BackendFailed) as failure:
        backend.answer(Ask(HELLO), Model("filer-v9", "bundled"), 5)
    assert (failure.value.kind, len(stub.bodies)) == ("unlisted", 2)


def test_a_spare_field_that_a_server_refuses_is_left_out_from_then_on(stub: ModelServer) -> None:
    backend = EndpointBackend(Endpoint("stub", stub.url, forward_fields=True))
    ask = Ask(HELLO, extra={"user": "ada", "metadata": {"a": "b"}, "store": True, "logit_bias": {"1": 2}})
    stub.statuses, stub.error = [400], {"message": "Unknown name 'user'"}
    assert backend.answer(ask, POLICY, 5).text == "hello there"
    backend.answer(ask, POLICY, 5)
    assert ["user" in body for body in stub.bodies] == [True, False, False]
    assert all("metadata" in body for body in stub.bodies)
    stub.statuses, stub.error = [400], {"message": "no 'logit_bias'"}  # which says something about the answer
    with pytest.raises(ServingRefused):
        backend.answer(ask, POLICY, 5)


@pytest.mark.parametrize("forward", [False, True])
def test_who_asks_is_told_only_to_an_endpoint_that_may_know(stub: ModelServer, forward: bool) -> None:
    backend = EndpointBackend(Endpoint("stub", stub.url, forward_fields=forward))
    backend.answer(Ask(HELLO, extra={"user": "ada", "metadata": {"a": "b"}}), POLICY, 5)
    assert len({"user", "metadata"} & stub.bodies[0].keys()) == (2 if forward else 0)


@pytest.mark.parametrize("status", [0, 408, 429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(backend: EndpointBackend, stub: ModelServer, status: int) -> None:
    stub.statuses = [status, status]
    assert backend.answer(Ask(HELLO), POLICY, 5).text == "hello there"
    assert len(stub.bodies) == 3


def test_a_server_that_is_busy_keeps_the_circuit_closed(backend: EndpointBackend, stub: ModelServer) -> None:
    for _ in range(3):
        stub.statuses = [429] * 3
        with pytest.raises(BackendFailed, match="429"):
            backend.answer(Ask(HELLO), POLICY, 5)
    assert backend.answer(Ask(HELLO), POLICY, 5).text == "hello there"


def test_a_circuit_opens_pauses_tries_once_and_closes() -> None:
    now = [0.0]
    breaker = CircuitBreaker("x", failures=2, pause_s=10, clock=lambda: now[0])
    breaker.record_failure()
    breaker.enter()
    breaker.record_failure()
    with pytest.raises(BackendFailed, match="2 times in a row"):
        breaker.enter()
    now[0] = 10.0
    breaker.enter()  # the one that tries
    with pytest.raises(BackendFailed):
        breaker.enter()  # the others wait for its word
    breaker.record_success()
    breaker.enter()


def test_a_failed_try_keeps_the_circuit_open() -> None:
    now = [0.0]
    breaker = CircuitBreaker("x", failures=1, pause_s=10, clock=lambda: now[0])
    breaker.record_failure()
    now[0] = 10.0
    breaker.enter()
    breaker.record_failure()
    now[0] = 19.0
    with pytest.raises(BackendFailed):
        breaker.enter()


def test_who_finds_the_queue_full_is_sent_away() -> None:
    turns = ConcurrencyLimiter(1, 1, "x")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.turn(5):
            inside.set()
            leave.wait(5)

    threads = [threading.Thread(target=hold) for _ in range(2)]
    for thread in threads:
        thread.start()
    inside.wait(5)
    while turns._there < 2:
        time.sleep(0.001)
    with pytest.raises(BackendFailed) as failure, turns.turn(5):
        pass
    assert failure.value.kind == "busy"
    leave.set()
    for thread in threads:
        thread.join()
    with turns.turn(0.1):
        pass


def test_who_waits_in_vain_has_not_held_a_place() -> None:
    turns = ConcurrencyLimiter(1, 5, "x")
    with turns.turn(1):
        for _ in range(10):
            with pytest.raises(BackendFailed, match=r"no free slot within 0\.001 s"), turns.turn(0.001):
                pass
