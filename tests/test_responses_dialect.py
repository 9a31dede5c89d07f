"""The responses dialect: requests and answers as OpenAI's published types have them."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from tests.support.hosted import FORMAT, HELLO, LOOK, SCHEMA, ask, hosted, model_server, recorded  # noqa: F401
from tests.support.serving import openai_client  # noqa: F401
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = {"input_tokens": 120, "input_tokens_details": {"cached_tokens": 100, "cache_write_tokens": 0}}
USAGE |= {"output_tokens": 50, "output_tokens_details": {"reasoning_tokens": 40}, "total_tokens": 170}
MESSAGE = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
MESSAGE |= {"content": [{"type": "output_text", "text": "hello there", "annotations": []}]}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "they greet"}]}
CALLS = [
    {
        "type": "function_call",
        "id": f"fc_{n}",
        "call_id": f"call_{n}",
        "name": "look",
        "arguments": f'{{"q": {n}}}',
        "status": "completed",
    }
    for n in (1, 2)
]


def response(output: list[Any], status: str = "completed", **more: Any) -> dict[str, Any]:
    made = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1.0,
        "model": "gpt-5-mini-2026-08-07",
        "output": output,
        "status": status,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": USAGE,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": 1.0,
        **more,
    }
    Response.model_validate(made)
    return made


def events(output: list[Any]) -> bytes:
    found: list[dict[str, Any]] = [{"type": "response.created", "response": response([], "in_progress")}]
    for index, item in enumerate(output):
        place = {"output_index": index, "item_id": item["id"]}
        begun = {**item, "status": "in_progress"}
        if item["type"] == "message":
            begun["content"] = []
        if item["type"] == "function_call":
            begun["arguments"] = ""
        found.append({"type": "response.output_item.added", "output_index": index, "item": begun})
        if item["type"] == "message":
            found += [
                {
                    "type": "response.output_text.delta",
                    "content_index": 0,
                    "delta": word,
                    "logprobs": [],
                    **place,
                }
                for word in ("hello ", "there")
            ]
        elif item["type"] == "reasoning":
            said = {
                "type": "response.reasoning_summary_text.delta",
                "summary_index": 0,
                "delta": "they greet",
            }
            found.append({**said, **place})
        else:
            parts = (item["arguments"][:3], item["arguments"][3:])
            found += [
                {"type": "response.function_call_arguments.delta", "delta": part, **place} for part in parts
            ]
        found.append({"type": "response.output_item.done", "output_index": index, "item": item})
    found.append({"type": "response.completed", "response": response(output)})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(found)]
    for event in numbered:
        EVENT.validate_python(event)
    return b"".join(f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in numbered)


def say(server: ModelServer, output: list[Any], stream: bool) -> None:
    whole = ("application/json", json.dumps(response(output)).encode())
    server.sends = ("text/event-stream", events(output)) if stream else whole


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_with_its_reasoning(client: openai.OpenAI, stub: ModelServer, stream: bool) -> None:
    hosted(
        stub.url,
        dialect="responses",
        price_in=1.0,
        price_out=10.0,
        parameters={"reasoning": {"effort": "low"}},
    )
    say(stub, [REASONING, MESSAGE], stream)
    answer = ask(client, stream=stream, max_tokens=90, stop=["END"], response_format=FORMAT, user="ada")
    if stream:
        assert "".join(c.choices[0].delta.content or "" for c in answer if c.choices) == "hello there"
    else:
        assert answer.choices[0].message.content == "hello there"
        assert answer.model_extra["ratchet"]["left_out"] == ["stop"]
    (body,) = stub.bodies
    assert body.pop("stream", False) is stream
    TypeAdapter(ResponseCreateParamsNonStreaming).validate_python(body)
    assert body == {
        "model": "m-1",
        "store": False,
        "input": HELLO,
        "max_output_tokens": 90,
        "text": {"format": {"type": "json_schema", "name": "verdict", "schema": SCHEMA, "strict": True}},
        "reasoning": {"effort": "low"},
    }
    (row,) = recorded()
    serving = row.metadata["serving"]
    expected = ("hello there", "they greet", 120, 50)
    assert (row.response, row.reasoning, row.tokens_in, row.tokens_out) == expected
    assert serving["upstream"] == {"id": "resp_1", "model": "gpt-5-mini-2026-08-07"}
    assert serving["usage"]["completion_tokens_details"] == {"reasoning_tokens": 40}
    assert serving["cost_usd"] == pytest.approx((120 + 500) / 1e6)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_are_called(client: openai.OpenAI, stub: ModelServer, stream: bool) -> None:
    hosted(stub.url, dialect="responses")
    say(stub, [MESSAGE, *CALLS], stream)
    one: Any = {"type": "function", "function": {"name": "look"}}
    answer = ask(client, stream=stream, tools=[LOOK], tool_choice=one)
    if stream:
        assert [c.choices[0].finish_reason for c in list(answer) if c.choices][-1] == "tool_calls"
    (row,) = recorded()
    calls = json.loads(row.response)[0]["tool_calls"]
    expected = [("call_1", '{"q": 1}'), ("call_2", '{"q": 2}')]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == expected
    tool = {"type": "function", "strict": False, **LOOK["function"]}
    expected = ([tool], {"type": "function", "name": "look"})
    assert (stub.bodies[0]["tools"], stub.bodies[0]["tool_choice"]) == expected
    results: Any = [{"role": "tool", "tool_call_id": f"call_{n}", "content": "4"} for n in (1, 2)]
    said: Any = {"role": "assistant", "content": None, "tool_calls": calls}
    say(stub, [MESSAGE], False)
    client.chat.completions.create(model="bot", messages=[*HELLO, said, *results], tools=[LOOK])
    body = stub.bodies[1]
    TypeAdapter(ResponseCreateParamsNonStreaming).validate_python(body)
    assert [item.get("type", item.get("role")) for item in body["input"]] == (
        "system user function_call function_call function_call_output function_call_output"
    ).split()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (response([MESSAGE], "incomplete", incomplete_details={"reason": "max_output_tokens"}), "length"),
        (
            response([MESSAGE], "incomplete", incomplete_details={"reason": "content_filter"}),
            "content_filter",
        ),
        (response([{**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]}]), "stop"),
    ],
)
def test_an_answer_ends(client: openai.OpenAI, stub: ModelServer, body: Any, reason: str) -> None:
    hosted(stub.url, dialect="responses")
    stub.sends = ("application/json", json.dumps(body).encode())
    choice = ask(client).choices[0]
    assert choice.finish_reason == reason
    assert bool(choice.message.refusal) is ("refusal" in json.dumps(body["output"]))
