"""`/v1/responses` and `/v1/messages` by the official clients: over the same path as chat completions."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from feedback.accounts.authentication import key_create
from feedback.models import Decision
from tests.support.hosted import LOOK, SCHEMA, hosted, model_server, recorded  # noqa: F401
from tests.support.serving import openai_client  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 40}}
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
SAID = {"role": "assistant", "reasoning_content": "they greet", "content": "hello there"}
CALLED = {"role": "assistant", "content": "let me look", "tool_calls": [CALL]}
REFUSED = {"role": "assistant", "content": None, "refusal": "no"}
ASKED = [{"role": "user", "content": "hello"}]
TOOL: Any = {"name": "look", "input_schema": LOOK["function"]["parameters"]}


@pytest.fixture
def claude_client(live_server: Any) -> Iterator[anthropic.Anthropic]:
    key = key_create("claude-app", ["ingest", "read"])[1]
    with anthropic.Anthropic(base_url=live_server.url, api_key=key, max_retries=0) as made:
        yield made


def say(stub: ModelServer, said: dict[str, Any], stream: bool) -> None:
    """What the upstream answers: whole, or in words."""
    reason = "tool_calls" if "tool_calls" in said else "stop"
    if not stream:
        choice = {"index": 0, "message": said, "finish_reason": reason}
        stub.sends = ("application/json", json.dumps({"choices": [choice], "usage": USAGE}).encode())
        return
    deltas: list[dict[str, Any]] = []
    for name in ("reasoning_content", "content", "refusal"):
        deltas += [{name: word} for word in str(said.get(name) or "").partition(" ") if word]
    for call in said.get("tool_calls", ()):
        begun = {**call["function"], "arguments": ""}
        deltas.append({"tool_calls": [{**call, "index": 0, "function": begun}]})
        deltas.append(
            {"tool_calls": [{"index": 0, "function": {"arguments": call["function"]["arguments"]}}]}
        )
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}], "usage": USAGE})
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    stub.sends = ("text/event-stream", lines.encode())


def message(client: anthropic.Anthropic, stream: bool, **more: Any) -> anthropic.types.Message:
    asked: Any = {
        "model": "bot",
        "max_tokens": 50,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "hello"}],
        **more,
    }
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_are_recorded(claude_client: anthropic.Anthropic, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url)
    say(stub, SAID, stream)
    form: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    answer = message(
        claude_client, stream, stop_sequences=["END"], metadata={"user_id": "ada"}, output_config=form
    )
    thought, text = answer.content
    assert (thought.type, thought.thinking) == ("thinking", "they greet")
    assert (text.type, text.text, answer.stop_reason) == ("text", "hello there", "end_turn")
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens, answer.usage.output_tokens) == (
        60,
        40,
        7,
    )
    (row,) = recorded()
    assert (str(row.pk), row.policy, row.unit, row.source) == (answer.id, "bot-hosted", "ada", "gateway")
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert row.messages == expected
    body = stub.bodies[0]
    assert (body["max_tokens"], body["stop"]) == (50, ["END"])
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_tools(claude_client: anthropic.Anthropic, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url)
    say(stub, CALLED, stream)
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    answer = message(claude_client, stream, tools=[TOOL], tool_choice=choice)
    text, use = answer.content
    assert (text.text, answer.stop_reason) == ("let me look", "tool_use")
    assert (use.type, use.id, use.name, use.input) == ("tool_use", "c1", "look", {"q": 1})
    body = stub.bodies[0]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ("required", False)
    assert body["tools"] == [LOOK]
    say(stub, SAID, False)
    result: Any = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4"}]}
    picture: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "and this?"}, picture]},
    ]
    message(claude_client, False, messages=turns, tools=[TOOL])
    sent = stub.bodies[1]["messages"]
    assert [one["role"] for one in sent] == ["system", "user", "assistant", "tool", "user"]
    assert (sent[2]["content"], sent[2]["tool_calls"]) == ("let me look", [CALL])
    assert (sent[3]["tool_call_id"], sent[3]["content"]) == ("c1", "4")
    assert sent[4]["content"][1]["image_url"]["url"] == "data:image/png;base64,AAAA"


@pytest.mark.parametrize("stream", [False, True])
def test_responses_answer_and_are_recorded(client: openai.OpenAI, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url)
    say(stub, SAID, stream)
    form: Any = {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}}
    asked: Any = {"model": "bot", "instructions": "Be brief.", "input": "hello", "max_output_tokens": 50}
    asked |= {"text": form}
    answer = response(client, stream, **asked)
    assert (answer.output_text, answer.status) == ("hello there", "completed")
    assert answer.output[0].summary[0].text == "they greet"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (100, 7)
    assert answer.usage.input_tokens_details.cached_tokens == 40
    (row,) = recorded()
    assert (str(row.pk), row.policy, row.reasoning) == (answer.id, "bot-hosted", "they greet")
    body = stub.bodies[0]
    assert [one["role"] for one in body["messages"]] == ["system", "user"]
    assert (body["max_completion_tokens"], body["response_format"]["json_schema"]["name"]) == (50, "verdict")


def response(client: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        return list(events)[-1].response  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_tools(client: openai.OpenAI, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url)
    say(stub, CALLED, stream)
    tool: Any = {"type": "function", "strict": False, **LOOK["function"]}
    answer = response(
        client,
        stream,
        model="bot",
        input="hello",
        tools=[tool],
        tool_choice={"type": "function", "name": "look"},
    )
    said, call = answer.output
    expected = ("let me look", "c1", "look", '{"q": 1}')
    assert (said.content[0].text, call.call_id, call.name, call.arguments) == expected
    assert stub.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    say(stub, SAID, False)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        said.to_dict(),
        call.to_dict(),
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    client.responses.create(model="bot", input=items, tools=[tool])
    sent = stub.bodies[1]["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool"]
    assert (sent[1]["content"], sent[1]["tool_calls"]) == ("let me look", [CALL])


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_one_in_both(
    client: openai.OpenAI, claude_client: anthropic.Anthropic, stub: ModelServer, stream: bool
) -> None:
    hosted(stub.url)
    say(stub, REFUSED, stream)
    assert message(claude_client, stream).stop_reason == "refusal"
    part = response(client, stream, model="bot", input="hello").output[0].content[0]
    assert (part.type, part.refusal) == ("refusal", "no")


def test_faults(client: openai.OpenAI, claude_client: anthropic.Anthropic, stub: ModelServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        message(claude_client, False, model="nobody-knows")
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    hosted(stub.url)
    stub.statuses = [401] * 2
    with pytest.raises(anthropic.InternalServerError) as failed:
        message(claude_client, False)
    assert failed.value.status_code == 503
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="bot", input="hello")
    with pytest.raises(anthropic.AuthenticationError):
        message(claude_client.copy(api_key="rk_none"), False)


@pytest.mark.parametrize(
    "body",
    [
        [], {}, {"messages": 1}, {"messages": [1]}, {"messages": [{"role": "user", "content": [1]}]},
        {"messages": [{"role": []}]}, {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
        {"input": [1]}, {"input": [{"type": []}]},
        {"input": "a", "tools": [{"type": "web_search"}]}, {"input": "a", "previous_response_id": "x"},
        {"messages": [{"role": "user", "content": "a"}], "tools": 1}, {"input": "a", "tools": [1]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": []}]}]},
        {"input": [{"type": "message", "role": {}, "content": []}, {"type": "function_call", "arguments": []}]},
        {"input": [{"type": "function_call_output", "output": {}}]}, {"input": "a", "text": {"format": {"type": []}}},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]},
        {"messages": [{"role": "user", "content": "a"}], "tool_choice": {"type": []}, "output_config": {"format": {}}},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", ["messages", "responses"])
def test_a_body_that_is_none_is_400(live_server: Any, path: str, body: Any, stub: ModelServer) -> None:
    import httpx2

    hosted(stub.url)
    key = key_create("app", ["ingest"])[1]
    sent = {"model": "bot", **body} if isinstance(body, dict) else body
    said = httpx2.post(f"{live_server.url}/v1/{path}", json=sent, headers={"X-Api-Key": key})
    assert said.status_code == 400, said.text
    assert not Decision.objects.exists()


DEEP = "[" * 500 + "]" * 500
CALLS = (
    "5",
    '"abc"',
    '["x"]',
    '[{"id": "c", "function": "abc"}]',
    '[{"id": 5, "function": {"name": 5, "arguments": 7}}]',
    '[{"id": "c", "type": "custom", "custom": {"name": "x", "input": "y"}}]',
    f'[{{"id": "c", "function": {{"name": "x", "arguments": "{DEEP * 200}"}}}}]',
)
ODD = (
    '"message": {"content": "a"}, "logprobs": {"content": [{"token": "a", "logprob": -Infinity}]}',
    '"message": {"content": "a"}, "seen": 1e400',
    '"message": {"content": "a"}, "seen": "\\ud800"',
    *(f'"message": {{"content": "a", "tool_calls": {calls}}}' for calls in CALLS),
    '"message": {"content": "a", "thinking_blocks": 5}',
    '"message": {"content": "a", "thinking_blocks": [5]}',
)
USAGES = (
    '{"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": 5}',
    '{"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": null}}',
    '{"prompt_tokens": "3", "completion_tokens": NaN}',
    '{"prompt_tokens": -3, "completion_tokens": 1e400}',
)
ANSWERS = (
    *(f'{{"id": "x", "choices": [{{"index": 0, "finish_reason": "stop", {odd}}}]}}' for odd in ODD),
    *(
        f'{{"choices": [{{"index": 0, "message": {{"content": "a"}}}}], "usage": {usage}}}'
        for usage in USAGES
    ),
    '{"id": "\\ud800", "choices": [{"index": 0, "message": {"content": "a"}}]}',
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
def test_odd_fields_cost_no_answer(live_server: Any, stub: ModelServer, path: str, stream: bool) -> None:
    import httpx2

    hosted(stub.url)
    headers = {"X-Api-Key": key_create("app", ["ingest"])[1]}
    asked = {
        "model": "bot",
        "stream": stream,
        **({"input": "a"} if path == "responses" else {"messages": ASKED}),
    }
    for answer in ANSWERS:
        events = f"data: {answer.replace('message', 'delta', 1)}\n\ndata: [DONE]\n\n"
        stub.sends = (
            ("text/event-stream", events.encode()) if stream else ("application/json", answer.encode())
        )
        said = httpx2.post(f"{live_server.url}/v1/{path}", json=asked, headers=headers)
        assert said.status_code == 200, answer[:200]
        assert not stream or any(
            end in said.text for end in ("[DONE]", "message_stop", "response.completed")
        ), answer
        lines = [line.removeprefix("data: ") for line in said.text.splitlines() if line.startswith("data: {")]
        for body in lines if stream else [said.text]:
            json.loads(body, parse_constant=pytest.fail)
    rows = recorded()
    assert [row.policy for row in rows] == ["bot-hosted"] * len(ANSWERS)
    assert all("a" in row.response for row in rows)
    stub.sends = (
        "application/json",
        f'{{"choices": [{{"message": {{"content": "a", "x": {DEEP}}}}}]}}'.encode(),
    )
    assert httpx2.post(f"{live_server.url}/v1/{path}", json=asked, headers=headers).status_code in (502, 503)


ODD_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": "x"}]}


@pytest.mark.parametrize("dialect", ["openai", "responses", "anthropic"])
def test_the_unwritable_is_never_a_500(live_server: Any, stub: ModelServer, dialect: str) -> None:
    import httpx2

    hosted(stub.url, dialect=dialect)
    whole = {"status": "completed", "output": [], "type": "message", "content": []}
    stub.sends = ("application/json", json.dumps({**stub.completion(), **whole}).encode())
    key = key_create("app", ["ingest"])[1]
    odd: list[dict[str, Any]] = [
        {"tool_choice": [1], "tools": [LOOK]},
        {"tool_choice": {"type": "function", "function": "x"}, "tools": [LOOK]},
        {"response_format": {"type": "json_object", "json_schema": 5}},
        {"messages": [ODD_CALL]},
        {"messages": [{"role": "assistant", "content": "a", "thinking_blocks": 5}]},
    ]
    statuses = []
    for more in odd:
        asked = {"model": "bot", "messages": ASKED, **more}
        said = httpx2.post(f"{live_server.url}/v1/chat/completions", json=asked, headers={"X-Api-Key": key})
        statuses.append(said.status_code)
    assert set(statuses) <= {200, 400}, statuses
    assert 400 in statuses or dialect == "openai"
    headers = {"X-Api-Key": key, "Content-Type": "application/json"}
    raw = json.dumps({"model": "bot\ud800", "messages": ASKED})  # half of a surrogate pair
    said = httpx2.post(f"{live_server.url}/v1/chat/completions", content=raw, headers=headers)
    assert (said.status_code, said.json()["error"]["param"]) == (400, "model")
