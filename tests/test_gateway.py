"""The gateway: what it takes and refuses, what it answers, what is recorded."""

import json
import uuid
from typing import Any

import pytest
from django.test import override_settings

from backend import limits
from feedback.models import Decision
from rl.models import ServingSettings
from rl.serving.base import BackendFailed, BackendUnable
from tests.support.api_client import ApiClient, error_of
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    policy_made,
    support_bot_allowed,
    written_by_the_asking_thread,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("written_at_once", "support_bot")]

ADDRESS = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.fixture
def api() -> ApiClient:
    return ApiClient("ingest", "read", "rate")


def asked(api: ApiClient, *, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    response = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO, **body}, headers=headers or {})
    assert response.status_code == 200, response.content
    found: dict[str, Any] = json.loads(response.content)
    return found


def unsigned(body: dict[str, Any]) -> dict[str, Any]:
    """The answer without its feedback token, which is of the second in which it was signed."""
    links = ("feedback_token", "feedback_url")
    return {**body, "ratchet": {name: value for name, value in body["ratchet"].items() if name not in links}}


def events(api: ApiClient, **body: Any) -> list[Any]:
    response: Any = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO, "stream": True, **body})
    assert response.status_code == 200, response.content
    assert response["Content-Type"].startswith("text/event-stream")
    said = b"".join(response.streaming_content).decode()
    assert said.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in said.strip().split("\n\n")]
    assert data[-1] == "[DONE]" or "error" in data[-1]
    return [json.loads(line) for line in data if line != "[DONE]"]


def test_a_completion_is_the_decision_of_its_id(api: ApiClient, parrot: Parrot) -> None:
    policy_made("support-bot-v3", "support-bot")
    body = asked(api, user="ada", metadata={"run_id": "run-7", "channel": "web"})
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello there"}
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    row = Decision.objects.get()
    assert str(row.pk) == body["id"]
    expected = ("support-bot", "support-bot-v3", "hello there", "ada", "run-7")
    assert (row.agent, row.policy, row.response, row.unit, row.run_id) == expected
    assert (row.tokens_in, row.tokens_out, row.messages) == (7, 3, HELLO)
    assert row.latency_ms
    assert row.metadata["channel"] == "web"
    assert row.metadata["serving"]["fallbacks"] == []
    assert (body["model"], body["ratchet"]["stepped_in"]) == ("support-bot-v3", False)


def test_an_answer_over_the_limit_is_recorded_cut_with_a_mark(api: ApiClient, parrot: Parrot) -> None:
    parrot.said = "ab" * (limits.TEXT_CHARACTERS // 2 + 1)
    assert asked(api)["choices"][0]["message"]["content"] == parrot.said
    parrot.said, parrot.tool_calls = (
        "",
        [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "f", "arguments": json.dumps({"x": parrot.said})},
            }
        ],
    )
    asked(api, tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}])
    for row in Decision.objects.all():
        assert len(row.response) == row.metadata["serving"]["cut_at"] == limits.TEXT_CHARACTERS
        assert "response_is" not in row.metadata


def test_headers_name_unit_and_run(api: ApiClient, parrot: Parrot) -> None:
    asked(api, user="body", headers={"X-Ratchet-Unit": "ada", "X-Ratchet-Run": "r1"})
    row = Decision.objects.get()
    assert (row.unit, row.run_id) == ("ada", "r1")


def test_a_stream_is_the_same_completion_in_pieces(api: ApiClient, parrot: Parrot) -> None:
    assert all("usage" not in chunk and chunk["choices"] for chunk in events(api))
    Decision.objects.all().delete()
    chunks = events(api, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {str(Decision.objects.get().pk)}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks[:-1])
    assert said == Decision.objects.get().response == "hello there "
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_a_broken_stream_is_recorded_as_far_as_it_came(api: ApiClient, parrot: Parrot) -> None:
    parrot.said = "broken line"
    assert events(api)[-1]["error"]["type"] == "server_error"
    row = Decision.objects.get()
    assert (row.response, row.metadata["serving"]["finish_reason"]) == ("broken line ", "error")


def test_a_reader_who_leaves_leaves_a_decision_as_far_as_it_came(api: ApiClient, parrot: Parrot) -> None:
    stream: Any = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO, "stream": True})
    parts = iter(stream.streaming_content)
    next(parts)
    next(parts)
    stream._iterator.close()  # as the server does; close() would end the test's own connection too
    row = Decision.objects.get()
    assert (row.response, row.metadata["serving"]["finish_reason"]) == ("hello ", "left")


def test_tools_are_passed_on_and_their_calls_recorded(api: ApiClient, parrot: Parrot) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
    parrot.tool_calls = [call]
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    body = asked(api, tools=tools, tool_choice="auto")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": None, "tool_calls": [call]}
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert parrot.asked[0][0].extra == {"tools": tools, "tool_choice": "auto"}
    row = Decision.objects.get()
    assert row.metadata["response_is"] == "messages"
    assert json.loads(row.response)[0]["tool_calls"] == [call]


def test_settings_of_a_request_reach_the_backend(api: ApiClient, parrot: Parrot) -> None:
    asked(api, temperature=0.3, top_p=0.9, max_completion_tokens=9, stop="END", seed=4, logit_bias={"1": 2})
    ask = parrot.asked[0][0]
    assert (ask.temperature, ask.top_p, ask.max_tokens, ask.stop, ask.seed) == (0.3, 0.9, 9, ("END",), 4)
    assert (ask.limit_field, ask.extra) == ("max_completion_tokens", {"logit_bias": {"1": 2}})


def test_an_operators_settings_stand_where_a_request_says_nothing(api: ApiClient, parrot: Parrot) -> None:
    ServingSettings.objects.create(agent="support-bot", temperature=0.7, max_tokens=99)
    asked(api)
    asked(api, temperature=0, max_tokens=5)
    assert [(ask.temperature, ask.max_tokens) for ask, _ in parrot.asked] == [(0.7, 99), (0.0, 5)]


def test_a_constrained_agent_answers_by_its_schema(api: ApiClient, parrot: Parrot) -> None:
    asked(api, model="widgets")
    asked(api, model="widgets", response_format={"type": "text"})
    schemas = [ask.response_schema for ask, _ in parrot.asked]
    assert schemas[0]["required"] == ["widget"]
    assert schemas[1] is None


def test_a_json_schema_is_what_constrains(api: ApiClient, parrot: Parrot) -> None:
    asked(api, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})
    asked(api, response_format={"type": "json_object"})
    assert [ask.response_schema for ask, _ in parrot.asked] == [SCHEMA, {}]
    # exp(-0.5): within a schema an answer is a choice, and its probability is on record
    assert Decision.objects.order_by("created_at")[0].propensity == pytest.approx(0.6065306597)


def test_free_words_have_no_propensity(api: ApiClient, parrot: Parrot) -> None:
    parrot.said = "nul \x00 half \ud800"
    asked(api)
    row = Decision.objects.get()
    assert (row.propensity, row.metadata["serving"]["log_probability"]) == (None, -0.5)
    assert row.response == "nul \ufffd half ?"


@pytest.mark.parametrize(
    ("model", "answers"),
    [
        ("widgets", "widgets-v2"),
        ("widgets:widgets-v1", "widgets-v1"),
        ("widgets-v1", "widgets-v1"),
        ("widgets:base", "base"),
        ("filer", "base"),
    ],
)
def test_an_agent_a_policy_or_both(api: ApiClient, parrot: Parrot, model: str, answers: str) -> None:
    policy_made("widgets-v1", stage="retired")
    policy_made("widgets-v2")
    assert asked(api, model=model)["model"] == answers
    assert Decision.objects.get().agent == model.split(":")[0].removesuffix("-v1")


def test_where_an_agents_policy_fails_the_base_steps_in_and_is_named(api: ApiClient, parrot: Parrot) -> None:
    policy_made("widgets-v2")
    assert "X-Ratchet-Intended" not in api.post(ADDRESS, {"model": "widgets", "messages": HELLO})
    Decision.objects.all().delete()
    parrot.failing = {"widgets-v2": BackendFailed("gone", kind="missing")}
    response = api.post(ADDRESS, {"model": "widgets", "messages": HELLO})
    body = json.loads(response.content)
    assert (response["X-Ratchet-Policy"], response["X-Ratchet-Intended"]) == ("base", "widgets-v2")
    assert body["model"] == "base"
    row = Decision.objects.get()
    told = {"agent": "widgets", "policy": "base", "intended": "widgets-v2", "stepped_in": True, "arm": ""}
    told |= {"decision": str(row.pk), "recorded": True}
    assert {n: v for n, v in body["ratchet"].items() if not n.startswith("feedback_")} == told
    assert (row.policy, row.metadata["serving"]["meant"]) == ("base", "widgets-v2")
    assert [f["kind"] for f in row.metadata["serving"]["fallbacks"]] == ["missing"]
    first, second = events(api, model="widgets")[:2]
    assert (first["ratchet"]["policy"], first["ratchet"]["intended"]) == ("base", "widgets-v2")
    assert "ratchet" not in second


@pytest.mark.parametrize("model", ["widgets-v1", "widgets:widgets-v1"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_asked_for_by_name(api: ApiClient, parrot: Parrot, model: str, stream: bool) -> None:
    policy_made("widgets-v1", stage="challenger")
    policy_made("widgets-v2")
    parrot.failing = {"widgets-v1": BackendFailed("gone", kind="missing", retry_after_s=15.0)}
    response = api.post(ADDRESS, {"model": model, "messages": HELLO, "stream": stream})
    assert (response.status_code, response["Retry-After"]) == (503, "15")
    assert "widgets-v1" in error_of(response)["message"]
    assert [who.name for _, who in parrot.asked] == ["widgets-v1"]
    assert not Decision.objects.exists()


@pytest.mark.parametrize(
    ("model", "nearest"),
    [
        *(("gpt-4o", ""), ("widgetts", "widgets"), ("widgets-v99", "widgets-v9"), ("asistant", "assistant")),
        *(("Widgets", "widgets"), ("filer:widgets-v9", ""), ("widgets:none", ""), ("no such/model", "")),
        ("widgets:widgets-bad", ""),
    ],
)
def test_unknown_names_get_suggestions(api: ApiClient, parrot: Parrot, model: str, nearest: str) -> None:
    policy_made("widgets-v9")
    policy_made("widgets-bad", stage="rejected")
    response = api.post(ADDRESS, {"model": model, "messages": HELLO})
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"], error["type"]) == (
        *(404, "model_not_found", "model", "invalid_request_error"),
    )
    assert nearest in error["message"].partition("did you mean ")[2]
    assert not Decision.objects.exists()
    assert api.get(f"/v1/models/{model}").status_code == 404


def test_an_agent_is_known_from_its_first_decision_on(api: ApiClient, parrot: Parrot) -> None:
    body = {"model": "mailroom", "messages": HELLO}
    assert api.post(ADDRESS, body).status_code == 404
    decision = {"agent": "mailroom", "messages": HELLO, "response": "Hi."}
    assert api.post("/api/decisions/", decision).status_code == 201
    assert api.post(ADDRESS, body).status_code == 200
    assert "mailroom" in [found["id"] for found in json.loads(api.get("/v1/models").content)["data"]]


def test_an_agent_that_was_only_set_up_is_known(api: ApiClient, parrot: Parrot) -> None:
    ServingSettings.objects.create(agent="mailroom")
    assert asked(api, model="mailroom")["model"] == "base"
    assert asked(api, model="mailroom:base")["model"] == "base"


@pytest.mark.parametrize(
    ("allowed", "status"), [(["team-*"], 200), (["*"], 200), (["team-b"], 404), ([], 404)]
)
def test_new_names(api: ApiClient, parrot: Parrot, settings: Any, allowed: list[str], status: int) -> None:
    settings.GATEWAY_NEW_AGENTS = allowed
    assert api.post(ADDRESS, {"model": "team-a", "messages": HELLO}).status_code == status


def test_an_agent_nobody_knows_decides_nothing(api: ApiClient, parrot: Parrot) -> None:
    assert api.post("/api/decide/", {"agent": "gpt-4o", "messages": HELLO}).status_code == 404
    assert not Decision.objects.exists()


@pytest.mark.parametrize("stream", [False, True])
def test_unanswered_is_503_and_not_recorded(api: ApiClient, parrot: Parrot, stream: bool) -> None:
    parrot.failing = {"base": BackendFailed("down", retry_after_s=3.2)}
    response = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO, "stream": stream})
    assert (response.status_code, response["Retry-After"]) == (503, "4")
    assert error_of(response)["type"] == "server_error"
    assert not Decision.objects.exists()


def test_what_no_backend_can_do_is_the_callers_fault(api: ApiClient, parrot: Parrot) -> None:
    parrot.failing = {"base": BackendUnable("no tools here", param="tools", code="unsupported")}
    response = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO})
    assert (response.status_code, error_of(response)["param"]) == (400, "tools")


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [123]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "nul \x00"}]}, "messages"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"model": ""}, "model"),
    ({"response_format": {"type": "yaml"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": json_schema(5)}, "response_format.json_schema"),
    ({"response_format": json_schema({"type": "banana"})}, "response_format"),
    ({"response_format": json_schema({"$ref": "#"})}, "response_format"),
    ({"response_format": json_schema({"$ref": "#/$defs/missing"})}, "response_format"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -1}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"stop": [1]}, "stop"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]}, "messages"),
    ({"stop": ["a"] * 5}, "stop"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0]"),
    ({"user": 5}, "user"),
    ({"user": "x" * 201}, "user"),
    ({"metadata": "x"}, "metadata"),
]


@pytest.mark.parametrize(("change", "param"), BROKEN, ids=[json.dumps(change)[:70] for change, _ in BROKEN])
def test_malformed_is_refused(api: ApiClient, parrot: Parrot, change: dict[str, Any], param: str) -> None:
    response = api.post(ADDRESS, {"model": "support-bot", "messages": HELLO, **change})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert parrot.asked == []
    assert not Decision.objects.exists()


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TURNS: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": None}],
    [{"role": "assistant"}],
    [{"role": "assistant", "content": []}],
    [{"role": "assistant", "content": None, "refusal": "No.", "audio": None, "annotations": []}],
    [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
    [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "y"}],
        }
    ],
    [
        {
            "role": "assistant",
            "content": "x",
            "reasoning_content": "y",
            "tool_calls": None,
            "function_call": None,
        }
    ],
    [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "c1", "content": None}],
    [
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "3"},
    ],
    [{"role": "developer", "content": "Be brief."}],
    [{"role": "user", "content": [{"type": "text", "text": ""}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
]


@pytest.mark.parametrize("turns", TURNS, ids=[json.dumps(turns)[:70] for turns in TURNS])
def test_providers_turns_are_recorded(api: ApiClient, parrot: Parrot, turns: list[dict[str, Any]]) -> None:
    messages = [*HELLO, *turns, *HELLO]
    asked(api, messages=messages, seed=2**40)
    assert list(parrot.asked[0][0].messages) == messages
    row = Decision.objects.get()
    assert row.messages == messages
    assert api.get(f"/api/decisions/{row.pk}/").status_code == 200
    assert api.post("/api/decide/", {"agent": "support-bot", "messages": messages}).status_code == 201
    sent = {"agent": "support-bot", "messages": messages, "response": "x"}
    assert api.post("/api/decisions/", sent).status_code == 201


@pytest.mark.parametrize("body", ["", "nonsense", "[]", "null", '{"model": "a", "messages": NaN}'])
def test_a_body_that_is_no_object_is_refused(api: ApiClient, parrot: Parrot, body: str) -> None:
    response = api.post(ADDRESS, body)
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_an_address_that_is_none_answers_as_openai_does(api: ApiClient) -> None:
    response = api.get("/v1/audio/speech")
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_an_idempotency_key_is_answered_once(api: ApiClient, parrot: Parrot) -> None:
    first = asked(api, headers={"Idempotency-Key": "k1"})
    parrot.said = "something else"
    assert unsigned(asked(api, headers={"Idempotency-Key": "k1"})) == unsigned(first)
    assert asked(api, headers={"Idempotency-Key": "k2"})["id"] != first["id"]
    assert (len(parrot.asked), Decision.objects.count()) == (2, 2)


def test_an_idempotency_key_with_another_request_is_a_conflict(api: ApiClient, parrot: Parrot) -> None:
    first = asked(api, headers={"Idempotency-Key": "k1"})
    for change in ({"temperature": 1}, {"messages": [{"role": "user", "content": "Other"}]}):
        body = {"model": "support-bot", "messages": HELLO, **change}
        response = api.post(ADDRESS, body, headers={"Idempotency-Key": "k1"})
        assert response.status_code == 409
        assert error_of(response)["code"] == "idempotency_key_reused"
        assert first["id"] in error_of(response)["message"]
    unit = {"Idempotency-Key": "k1", "X-Ratchet-Unit": "somebody else"}
    assert api.post(ADDRESS, {"model": "support-bot", "messages": HELLO}, headers=unit).status_code == 409
    assert (len(parrot.asked), Decision.objects.count()) == (1, 1)


def test_a_client_names_the_decision(api: ApiClient, parrot: Parrot) -> None:
    chosen = {"X-Ratchet-Decision": "7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a001"}
    first = asked(api, headers=chosen)
    assert first["id"] == str(Decision.objects.get().pk) == chosen["X-Ratchet-Decision"]
    assert unsigned(asked(api, headers=chosen)) == unsigned(first)  # a retry
    body = {"model": "support-bot", "messages": HELLO}
    for who, sent in (
        (api, {**body, "temperature": 1}),
        (api, {**body, "stream": True}),
        (ApiClient("ingest"), body),
    ):
        response = who.post(ADDRESS, sent, headers=chosen)
        assert (response.status_code, error_of(response)["code"]) == (409, "idempotency_key_reused")
    response = api.post(ADDRESS, body, headers={"X-Ratchet-Decision": "7"})
    assert (response.status_code, error_of(response)["param"]) == (400, "X-Ratchet-Decision")
    assert (len(parrot.asked), Decision.objects.count()) == (1, 1)


def test_decisions_of_a_run_are_found(api: ApiClient, parrot: Parrot) -> None:
    asked(api)
    found = [asked(api, headers={"X-Ratchet-Run": "run-7"})["id"] for _ in range(2)]
    listed = api.get("/api/decisions/", run_id="run-7").json()["results"]
    assert {one["id"] for one in listed} == set(found)
    assert api.get("/api/decisions/", run_id="run-8").json()["results"] == []


def test_neither_keys_nor_retries_cross_api_keys(api: ApiClient, parrot: Parrot) -> None:
    first = asked(api, headers={"Idempotency-Key": "k1"})
    other = ApiClient("ingest")
    parrot.said = "for the other"
    assert asked(other, headers={"Idempotency-Key": "k1"})["id"] != first["id"]
    assert asked(other, headers={"X-Stainless-Retry-Count": "1"})["id"] != first["id"]


def test_nobody_can_put_an_answer_under_another_callers_key(api: ApiClient, parrot: Parrot) -> None:
    """The id is made with the site's own secret, not with what any caller may know."""
    first = uuid.UUID(asked(api, headers={"Idempotency-Key": "k1"})["id"])
    with override_settings(SECRET_KEY="another"):
        assert uuid.UUID(asked(api, headers={"Idempotency-Key": "k1"})["id"]) != first


def test_a_retry_of_an_answered_request_gets_the_same_answer(api: ApiClient, parrot: Parrot) -> None:
    first = asked(api)
    parrot.said = "something else"
    assert unsigned(asked(api, headers={"X-Stainless-Retry-Count": "1"})) == unsigned(first)
    assert Decision.objects.count() == 1
    # the same words again are no retry, and another request is another one
    assert asked(api, headers={"X-Stainless-Retry-Count": "0"})["id"] != first["id"]
    assert asked(api, temperature=1, headers={"X-Stainless-Retry-Count": "1"})["id"] != first["id"]


def test_a_retried_stream_is_the_same_answer_too(api: ApiClient, parrot: Parrot) -> None:
    body = {"model": "support-bot", "messages": HELLO, "stream": True}
    first: Any = api.post(ADDRESS, body)
    list(first.streaming_content)
    parrot.said, parrot.tool_calls = "something else", [CALL]
    again: Any = api.post(ADDRESS, body, headers={"X-Stainless-Retry-Count": "1"})
    said = b"".join(again.streaming_content).decode()
    assert "hello there" in said
    assert str(Decision.objects.get().pk) in said
    first = asked(api, headers={"Idempotency-Key": "k1"})
    parrot.tool_calls = []
    assert unsigned(asked(api, headers={"Idempotency-Key": "k1"})) == unsigned(first)
    assert first["choices"][0]["message"]["tool_calls"] == [CALL]


def test_models_lists_agents_and_policies_that_may_answer(api: ApiClient) -> None:
    policy_made("widgets-v1")
    policy_made("widgets-old", stage="retired")
    policy_made("widgets-bad", stage="rejected")
    body = json.loads(api.get("/v1/models").content)
    listed = {model["id"]: model for model in body["data"]}
    assert body["object"] == "list"
    assert {"widgets", "filer", "assistant", "widgets-v1"} <= set(listed)
    assert not {"widgets-bad", "widgets-old"} & set(listed)
    assert listed["widgets-v1"]["object"] == "model"
    assert listed["widgets-v1"]["created"] > 1_700_000_000


@pytest.mark.parametrize("name", ["widgets-v1", "widgets:widgets-v1", "widgets"])
def test_one_model_is_found_by_what_it_may_be_called(api: ApiClient, name: str) -> None:
    policy_made("widgets-v1")
    response = api.get(f"/v1/models/{name}")
    assert (response.status_code, json.loads(response.content)["id"]) == (200, name)
