"""Hosted policies: answered by their upstream alone, in each dialect, recorded with model, tokens and cost."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from django.test import Client

from rl.models import Policy, ServingSettings, Upstream
from rl.serving import decision_facts, endpoint
from rl.serving.decision_facts import TokenUsage
from rl.upstreams import upstream_change
from tests.support.hosted import FORMAT, HELLO, LOOK, SCHEMA, ask, hosted, model_server, recorded  # noqa: F401
from tests.support.serving import openai_client, policy_made  # noqa: F401
from tests.support.stub_anthropic import KEY, AnthropicServer
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def claude(monkeypatch: pytest.MonkeyPatch) -> Iterator[AnthropicServer]:
    monkeypatch.setenv("CLAUDE_KEY", KEY)
    with AnthropicServer() as server:
        yield server


def of_claude(claude: AnthropicServer, **more: Any) -> Policy:
    return hosted(claude.url, dialect="anthropic", key_env="CLAUDE_KEY", **more)


@pytest.mark.parametrize("stream", [False, True])
def test_a_hosted_champion_is_recorded(client: openai.OpenAI, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url, price_in=2.0, price_out=10.0, price_cached=1.0, parameters={"temperature": 0.2})
    usage = {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150}
    usage |= {"prompt_tokens_details": {"cached_tokens": 40}}
    usage |= {"completion_tokens_details": {"reasoning_tokens": 30}}
    choice = {"index": 0, "finish_reason": "stop"}
    said = {"role": "assistant", "content": "hi"}
    whole = {"id": "c-9", "model": "m-1-2026-11-01", "usage": usage}
    if stream:
        event = {**whole, "choices": [{**choice, "delta": said}]}
        stub.sends = ("text/event-stream", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
        assert [c.model for c in ask(client, stream=True)][-1] == "bot-hosted"
    else:
        body = {**whole, "choices": [{**choice, "message": said}]}
        stub.sends = ("application/json", json.dumps(body).encode())
        assert ask(client).model == "bot-hosted"
    assert (stub.bodies[0]["model"], stub.bodies[0]["temperature"]) == ("m-1", 0.2)
    (row,) = recorded()
    serving = row.metadata["serving"]
    assert (row.policy, row.tokens_in, row.tokens_out) == ("bot-hosted", 100, 50)
    assert row.latency_ms is not None
    assert serving["upstream"] == {"id": "c-9", "model": "m-1-2026-11-01"}
    assert serving["usage"] == usage
    assert serving["cost_usd"] == pytest.approx((60 * 2 + 40 * 1 + 50 * 10) / 1e6)


def test_the_page_says_the_cost(client: openai.OpenAI, admin_client: Client, stub: ModelServer) -> None:
    hosted(stub.url, price_in=1000.0, price_out=2000.0)
    stub.sends = ("application/json", json.dumps({**stub.completion(), "model": "m-1-2026"}).encode())
    ask(client)
    (row,) = recorded()
    made_by = dict(admin_client.get(f"/decisions/{row.pk}/").context["made_by"])
    assert (made_by["provider's model"], made_by["cost"]) == ("m-1-2026", "$0.013000")


def test_a_local_policys_prompt_never_goes_to_a_provider(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url, stage="retired")  # an earlier champion
    policy_made("bot-v3", agent="bot")
    for model in ("bot", "bot-v3", "bot:bot-v3", "bot:base"):
        with pytest.raises(openai.InternalServerError):  # no files here: nobody answers
            ask(client, model)
    assert stub.bodies == []


def test_a_prompt_goes_to_no_other_backend(client: openai.OpenAI, stub: ModelServer, settings: Any) -> None:
    with ModelServer() as local:
        local.models += ["m-1", "bot-hosted"]
        settings.LOCAL_BACKENDS = [local.url]
        stub.statuses = [503] * 3
        hosted(stub.url)
        with pytest.raises(openai.InternalServerError):
            ask(client)
        assert local.bodies == []


def test_fallbacks_are_named_ordered_and_said(client: openai.OpenAI, stub: ModelServer) -> None:
    with ModelServer() as second, ModelServer() as third:
        hosted(stub.url)
        for server, name in ((second, "bot-second"), (third, "bot-third")):
            hosted(server.url, name, stage="candidate")
            server.said = name
        row = ServingSettings(agent="bot", fallbacks=["bot-second", "bot-third"])
        row.full_clean()
        row.save()
        stub.statuses, second.statuses = [401], [503] * 3
        raw = client.chat.completions.with_raw_response.create(model="bot", messages=HELLO)
    body = json.loads(raw.content)
    assert body["choices"][0]["message"]["content"] == "bot-third"
    assert (raw.headers["X-Ratchet-Policy"], raw.headers["X-Ratchet-Intended"]) == ("bot-third", "bot-hosted")
    assert body["ratchet"]["stepped_in"] is True
    (decision,) = recorded()
    tried = [(one["policy"], one["kind"]) for one in decision.metadata["serving"]["fallbacks"]]
    assert tried == [("bot-hosted", "refused"), ("bot-second", "failed")]
    assert decision.policy == "bot-third"


def test_a_key_that_is_missing_is_said_and_nobody_is_asked(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url, key_env="NO_SUCH_KEY")
    with pytest.raises(openai.InternalServerError, match="NO_SUCH_KEY"):
        ask(client)
    assert stub.bodies == []


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_thinks_and_answers(client: openai.OpenAI, claude: AnthropicServer, stream: bool) -> None:
    of_claude(claude, price_in=3.0, price_out=15.0)
    claude.blocks = [
        {"type": "thinking", "thinking": "they greet", "signature": "s1"},
        {"type": "text", "text": "hello there", "citations": None},
    ]
    answer = ask(client, stream=stream, temperature=0.5, max_tokens=90, stop=["END"])
    if stream:
        said = "".join(c.choices[0].delta.content or "" for c in answer if c.choices)
    else:
        said = answer.choices[0].message.content
        assert answer.model_extra["ratchet"]["left_out"] == ["temperature"]
    assert said == "hello there"
    (body,) = claude.bodies
    assert body["system"] == "Be brief."
    assert body["messages"] == [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert (body["max_tokens"], body["stop_sequences"], body["model"]) == (90, ["END"], "m-1")
    (row,) = recorded()
    serving = row.metadata["serving"]
    expected = ("hello there", "they greet", 120, 5)
    assert (row.response, row.reasoning, row.tokens_in, row.tokens_out) == expected
    assert serving["upstream"] == {"id": "msg_1", "model": "claude-test-1-20261101", "request_id": "req_1"}
    assert serving["usage"]["prompt_tokens_details"] == {"cached_tokens": 100, "cache_write_tokens": 8}
    assert serving["cost_usd"] == pytest.approx((120 * 3 + 5 * 15) / 1e6)
    assert serving["left_out_of_request"] == ["temperature"]


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tools_are_called(client: openai.OpenAI, claude: AnthropicServer, stream: bool) -> None:
    of_claude(claude)
    claude.blocks = [
        {"type": "text", "text": "let me look", "citations": None},
        {"type": "tool_use", "id": "tu_1", "name": "look", "input": {"q": 1}},
        {"type": "tool_use", "id": "tu_2", "name": "look", "input": {"q": 2}},
    ]
    claude.stop_reason = "tool_use"
    answer = ask(client, tools=[LOOK], tool_choice="required", parallel_tool_calls=False, stream=stream)
    if stream:
        calls: dict[int, list[str]] = {}
        for chunk in answer:
            for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                calls.setdefault(call.index, ["", "", ""])
                calls[call.index][0] += call.id or ""
                calls[call.index][1] += call.function.name or ""
                calls[call.index][2] += call.function.arguments or ""
        found = [tuple(call) for call in calls.values()]
    else:
        found = [(c.id, c.function.name, c.function.arguments) for c in answer.choices[0].message.tool_calls]
    assert found == [("tu_1", "look", '{"q": 1}'), ("tu_2", "look", '{"q": 2}')]
    sent = claude.bodies[0]
    assert sent["tools"] == [{"name": "look", "input_schema": LOOK["function"]["parameters"]}]
    assert sent["tool_choice"] == {"type": "any", "disable_parallel_tool_use": True}
    (row,) = recorded()
    assert json.loads(row.response)[0]["tool_calls"][1]["function"]["name"] == "look"
    if stream:
        return
    claude.blocks, claude.stop_reason = [{"type": "text", "text": "done", "citations": None}], "end_turn"
    results: Any = [
        {"role": "tool", "tool_call_id": id, "content": word} for id, word in (("tu_1", "a"), ("tu_2", "b"))
    ]
    messages = [*HELLO, answer.choices[0].message.to_dict(), *results]
    client.chat.completions.create(model="bot", messages=messages, tools=[LOOK])
    turns = claude.bodies[1]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
    assert [block["type"] for block in turns[1]["content"]] == ["text", "tool_use", "tool_use"]
    expected = [("tool_result", "tu_1"), ("tool_result", "tu_2")]
    assert [(b["type"], b["tool_use_id"]) for b in turns[2]["content"]] == expected


def test_anthropic_gets_the_schema_and_pictures(client: openai.OpenAI, claude: AnthropicServer) -> None:
    of_claude(claude)
    parts: Any = [
        {"type": "text", "text": "which?"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    ]
    client.chat.completions.create(
        model="bot", messages=[{"role": "user", "content": parts}], response_format=FORMAT
    )
    (body,) = claude.bodies
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": SCHEMA}}
    assert [block.get("source") for block in body["messages"][0]["content"]][1:] == [
        {"type": "base64", "media_type": "image/png", "data": "AAAA"},
        {"type": "url", "url": "https://example.com/a.png"},
    ]
    sound: Any = [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}]
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model="bot", messages=[{"role": "user", "content": sound}])
    assert refusal.value.param == "messages"


def test_a_refused_key_is_nowhere_in_what_is_said_recorded_or_logged(
    client: openai.OpenAI,
    claude: AnthropicServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    stub: ModelServer,
) -> None:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-wrong-987654")
    of_claude(claude)
    hosted(stub.url, "bot-second", stage="candidate")
    ServingSettings.objects.create(agent="bot", fallbacks=["bot-second"])
    assert ask(client).model == "bot-second"
    with pytest.raises(openai.InternalServerError) as failure:
        ask(client, "bot-hosted")
    said = [str(failure.value), caplog.text, *(json.dumps(row.metadata) for row in recorded())]
    assert all("[hidden]" in text for text in said)
    assert not any("987654" in text for text in said)


@pytest.mark.parametrize(("status", "answered"), [(429, 503), (529, 503), (500, 503), (400, 400)])
def test_upstream_faults(client: openai.OpenAI, claude: AnthropicServer, status: int, answered: int) -> None:
    of_claude(claude)
    claude.statuses = [status] * 3
    with pytest.raises(openai.APIStatusError, match=f"the stub says {status}") as failure:
        ask(client)
    assert failure.value.status_code == answered


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["openai", "responses", "anthropic"])
@pytest.mark.parametrize(
    "sends",
    [
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices": 7, "content": 7, "output": [7], "type": 3}',
        b'{"type": "message", "content": [7], "output": 3}',
    ],
)
def test_garbage(client: openai.OpenAI, stub: ModelServer, dialect: str, stream: bool, sends: bytes) -> None:
    hosted(stub.url, dialect=dialect)
    stub.sends = ("text/event-stream", b"data: " + sends + b"\n\n") if stream else ("application/json", sends)
    with pytest.raises(openai.APIStatusError) as failure:
        list(ask(client, stream=True)) if stream else ask(client)
    assert failure.value.status_code in ((502, 503) if stream else (502,))


def test_a_slow_upstream_is_given_up_after_its_own_timeout(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url, timeout_s=0.1)
    stub.delay_s = 0.5
    with pytest.raises(openai.InternalServerError, match=r"within 0\.1 s"):
        ask(client)


def test_retry_after_is_obeyed(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    stub.statuses, stub.retry_after = [429], "30"
    for _ in range(2):
        with pytest.raises(openai.InternalServerError) as failure:
            ask(client)
        assert 28 <= int(failure.value.response.headers["Retry-After"]) <= 30
    assert len(stub.bodies) == 1  # left alone meanwhile


@pytest.mark.parametrize("said", ["9" * 400, "Wed, 21 Oct 9999 07:28:00 GMT"])
def test_a_retry_after_of_ages_is_a_day(client: openai.OpenAI, stub: ModelServer, said: str) -> None:
    hosted(stub.url)
    stub.statuses, stub.retry_after = [429], said
    with pytest.raises(openai.InternalServerError) as failure:
        ask(client)
    assert (failure.value.status_code, failure.value.response.headers["Retry-After"]) == (503, "86400")


def test_a_short_retry_after_is_waited_for(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    stub.statuses, stub.retry_after = [429], "0.05"
    assert ask(client).model == "bot-hosted"
    assert len(stub.bodies) == 2


def test_one_models_failures_keep_no_other_from_answering(client: openai.OpenAI, stub: ModelServer) -> None:
    policy = hosted(stub.url)
    Policy.objects.create(
        name="bot-other", agent="bot", kind="hosted", upstream=policy.upstream, base_model="m-2"
    )
    stub.statuses = [503] * 6
    for _ in range(2):
        with pytest.raises(openai.InternalServerError):
            ask(client)
    with pytest.raises(openai.InternalServerError, match="failed 5 times in a row"):
        ask(client)
    stub.statuses = []
    assert ask(client, "bot-other").model == "bot-other"


def test_client_errors_open_no_circuit(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    stub.statuses = [400, 401, 403, 404, 413, 422] * 2
    for _ in range(12):
        with pytest.raises(openai.APIStatusError):
            ask(client)
    assert ask(client).model == "bot-hosted"


def test_a_500_to_a_schema_drops_the_schema(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    stub.statuses, stub.said = [500, 500], '{"ok": true}'
    assert ask(client, response_format=FORMAT).model_extra["ratchet"]["left_out"] == ["json_schema"]
    assert [body["response_format"]["type"] for body in stub.bodies] == ["json_schema"] * 2 + ["json_object"]
    ask(client, response_format=FORMAT)
    assert stub.bodies[3]["response_format"] == {"type": "json_object", "schema": SCHEMA}
    other = hosted(stub.url, "bot-other", stage="candidate")
    stub.statuses = [500] * 5  # it is down: the schema is not to blame
    with pytest.raises(openai.InternalServerError):
        ask(client, other.name, response_format=FORMAT)
    ask(client, other.name, response_format=FORMAT)
    assert stub.bodies[-1]["response_format"]["type"] == "json_schema"


@pytest.mark.parametrize(
    ("schemas", "sent"),
    [("json_schema", FORMAT), ("json_object", {"type": "json_object", "schema": SCHEMA}), ("none", None)],
)
def test_the_form_upstreams_take(client: openai.OpenAI, stub: ModelServer, schemas: str, sent: Any) -> None:
    hosted(stub.url, schemas=schemas)
    ask(client, response_format=FORMAT)
    assert stub.bodies[0].get("response_format") == sent


def test_the_limit_goes_by_the_name_the_model_knows(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    stub.statuses = [400]
    stub.error = {
        "message": "Unsupported parameter: 'max_tokens' is not supported with this model.",
        "param": "max_tokens",
    }
    ask(client, max_tokens=9)
    ask(client, max_tokens=9)
    names = [next(key for key in body if key.startswith("max_")) for body in stub.bodies]
    assert names == ["max_tokens", "max_completion_tokens", "max_completion_tokens"]


@pytest.mark.parametrize("escaped", [False, True])
def test_a_key_cut_in_two_is_hidden(client: openai.OpenAI, stub: ModelServer, escaped: bool) -> None:
    key = "sk-very/secret/0123456789abcdef"
    hosted(stub.url)
    upstream_change(Upstream.objects.get(), {}, key)
    repeated = key.replace("/", "\\/") if escaped else key
    # each place at which a message is cut lies within the key
    for length in (190, 992):
        stub.sends = ("text/html", f"{'x' * length}{repeated}".encode())
        with pytest.raises(openai.APIStatusError) as failed:
            ask(client)
        assert key[:8] not in str(failed.value)
        assert "sk-very" not in str(failed.value)


def test_ones_own_price(client: openai.OpenAI, stub: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TokenUsage] = []

    def table(usage: TokenUsage, *_: Any) -> tuple[float, float]:
        asked.append(usage)
        return usage.read * 4 / 1e6, usage.written * 8 / 1e6

    monkeypatch.setattr(decision_facts, "_table_costs", table)
    hosted(stub.url, price_cached=1.0)
    usage = {"prompt_tokens": 100, "completion_tokens": 50, "prompt_tokens_details": {"cached_tokens": 40}}
    stub.sends = ("application/json", json.dumps({**stub.completion(), "usage": usage}).encode())
    ask(client)
    (row,) = recorded()
    assert (asked[0].read, asked[0].cached) == (60, 0)
    assert row.metadata["serving"]["cost_usd"] == pytest.approx((60 * 4 + 40 * 1 + 50 * 8) / 1e6)


def test_a_stream_that_is_cut_has_its_tokens_and_their_cost(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url, price_in=2.0, price_out=10.0)
    stub.cut_stream = True
    with pytest.raises(openai.APIError):
        list(ask(client, stream=True))
    (row,) = recorded()
    serving = row.metadata["serving"]
    # 14 characters were read and 6 written, and nobody counted their tokens
    assert (row.tokens_in, row.tokens_out, serving["tokens_estimated"]) == (3, 2, True)
    assert serving["cost_usd"] == pytest.approx((3 * 2 + 2 * 10) / 1e6)


def test_what_was_said_before_a_cut_is_kept(client: openai.OpenAI, claude: AnthropicServer) -> None:
    of_claude(claude, price_in=2.0, price_out=10.0)
    claude.cut_stream = True
    with pytest.raises(openai.APIError):
        list(ask(client, stream=True))
    (row,) = recorded()
    assert row.metadata["serving"]["upstream"]["model"].startswith("claude")
    assert row.tokens_in == row.metadata["serving"]["usage"]["prompt_tokens"] > 0
    assert row.metadata["serving"]["cost_usd"] > 0


def test_signed_thoughts_stay_within_anthropic(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url)
    thought = {
        "role": "assistant",
        "content": "hi",
        "thinking_blocks": [{"type": "thinking", "signature": "s"}],
    }
    answer = client.chat.completions.create(model="bot", messages=[*HELLO, thought, *HELLO])
    assert stub.bodies[0]["messages"][2] == {"role": "assistant", "content": "hi"}
    assert answer.model_dump()["ratchet"]["left_out"] == ["thinking_blocks"]


def test_a_prompt_too_long_is_refused_unsent(client: openai.OpenAI, stub: ModelServer) -> None:
    hosted(stub.url, context_tokens=100)
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="bot", messages=[{"role": "user", "content": "word " * 200}])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert not stub.bodies
    client.chat.completions.create(model="bot", messages=[{"role": "user", "content": "word " * 100}])
    assert len(stub.bodies) == 1
