"""`/v1/responses` and `/v1/messages` by the official clients: over the same path as chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from feedback.accounts.api_keys import key_create
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
        "model": "bot", "max_tokens": 50, "system": "Be brief.", "messages": [{"role": "user", "content": "hello"}],
        **more,
    }  # fmt: skip
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_messages_answer_and_are_recorded(
    claude_client: anthropic.Anthropic, stub: ModelServer, stream: bool
) -> None:
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
    assert row.messages == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"},
    ]  # fmt: skip
    body = stub.bodies[0]
    assert (body["max_tokens"], body["stop"]) == (50, ["END"])
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_tools_and_take_their_results(
    claude_client: anthropic.Anthropic, stub: ModelServer, stream: bool
) -> None:
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
    asked: Any = {
        "model": "bot",
        "instructions": "Be brief.",
        "input": "hello",
        "max_output_tokens": 50,
        "text": form,
    }
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
def test_responses_call_tools_and_take_their_results(
    client: openai.OpenAI, stub: ModelServer, stream: bool
) -> None:
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
    assert (said.content[0].text, call.call_id, call.name, call.arguments) == (
        "let me look",
        "c1",
        "look",
        '{"q": 1}',
    )
    assert stub.bodies[0]["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    say(stub, SAID, False)
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        said.to_dict(), call.to_dict(), {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]  # fmt: skip
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


def test_faults_have_the_shape_of_the_dialect(
    client: openai.OpenAI, claude_client: anthropic.Anthropic, stub: ModelServer
) -> None:
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
