"""Instrumentors of OpenTelemetry export ten model calls to the running server; each is recorded as it was sent.

Set INSTRUMENTORS_PYTHON to a folder that holds an environment for each key of PROGRAMS.
openai-v2 2.3b0 starts only beside openai<3 and wrapt<2.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from feedback.accounts.authentication import key_create
from feedback.models import Decision
from tests.support.stub_openai import ModelServer

pytestmark = [pytest.mark.campaign, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]

EXPORT = """
import asyncio
from opentelemetry import trace
from opentelemetry._logs import set_logger_provider
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

spans, logs = TracerProvider(), LoggerProvider()
spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
logs.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
trace.set_tracer_provider(spans)
set_logger_provider(logs)
"""
CLIENT = """
from openai import OpenAI

def ask(messages, **more):
    answer = OpenAI().chat.completions.create(model="shop-a", messages=messages, **more)
    if more.get("stream"):
        return list(answer)
    return answer.choices[0].message.model_dump(exclude_none=True)

def user(text):
    return {"role": "user", "content": text}

parameters = {"type": "object", "properties": {"parcel": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "track", "parameters": parameters}}]
for number in range(4):
    ask([{"role": "system", "content": "Be brief."}, user(f"Where is parcel {number}?")])
talk = [user("Track parcel 7.")]
talk.append(ask(talk, tools=tools))
talk.append({"role": "tool", "tool_call_id": "call_1", "content": "in Kassel"})
ask(talk, tools=tools)
for number in range(2):
    ask([user(f"Stream {number}.")], stream=True)
talk = [user("Hello.")]
talk.append(ask(talk))
ask([*talk, user("And now?")])
"""
AGENTS = """
from agents import Agent, Runner, function_tool, set_default_openai_api
set_default_openai_api("chat_completions")

@function_tool
def track(parcel: str) -> str:
    return "in Kassel"

async def main():
    plain = Agent(name="plain", instructions="Be brief.", model="shop-a")
    for number in range(4):
        await Runner.run(plain, f"Where is parcel {number}?")
    await Runner.run(Agent(name="tracker", model="shop-a", tools=[track]), "Track parcel 7.")
    for number in range(2):
        async for _ in Runner.run_streamed(plain, f"Stream {number}.").stream_events():
            pass
    first = await Runner.run(plain, "Hello.")
    await Runner.run(plain, [*first.to_input_list(), {"role": "user", "content": "And now?"}])

asyncio.run(main())
"""
PYDANTIC_AI = """
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
Agent.instrument_all()

async def main():
    plain = Agent(OpenAIChatModel("shop-a"), instructions="Be brief.")
    for number in range(4):
        await plain.run(f"Where is parcel {number}?")
    tracker = Agent(OpenAIChatModel("shop-a"))

    @tracker.tool_plain
    def track(parcel: str) -> str:
        return "in Kassel"

    await tracker.run("Track parcel 7.")
    for number in range(2):
        async with plain.run_stream(f"Stream {number}.") as answer:
            async for _ in answer.stream_text():
                pass
    first = await plain.run("Hello.")
    await plain.run("And now?", message_history=first.all_messages())

asyncio.run(main())
"""
LANGCHAIN = """
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

@tool
def track(parcel: str) -> str:
    "Tracks a parcel."

model = ChatOpenAI(model="shop-a")
for number in range(4):
    model.invoke([SystemMessage("Be brief."), HumanMessage(f"Where is parcel {number}?")])
talk = [HumanMessage("Track parcel 7.")]
talk.append(model.bind_tools([track]).invoke(talk))
talk.append(ToolMessage("in Kassel", tool_call_id="call_1"))
model.bind_tools([track]).invoke(talk)
for number in range(2):
    list(model.stream(f"Stream {number}."))
talk = [HumanMessage("Hello.")]
talk.append(model.invoke(talk))
model.invoke([*talk, HumanMessage("And now?")])
"""
PROGRAMS = {
    "openai-v2": ("opentelemetry.instrumentation.openai_v2.OpenAIInstrumentor", CLIENT),
    "openinference": ("openinference.instrumentation.openai.OpenAIInstrumentor", CLIENT),
    "traceloop": ("opentelemetry.instrumentation.openai.OpenAIInstrumentor", CLIENT),
    "agents": ("openinference.instrumentation.openai_agents.OpenAIAgentsInstrumentor", AGENTS),
    "pydantic-ai": ("", PYDANTIC_AI),
    "langchain": ("openinference.instrumentation.langchain.LangChainInstrumentor", LANGCHAIN),
}
"""Environment -> (its instrumentor, the ten calls)."""
CALL = {"id": "call_1", "type": "function", "function": {"name": "track", "arguments": '{"parcel": "7"}'}}


@pytest.fixture
def stub() -> Iterator[ModelServer]:
    """Calls the tool that it is offered, once; repeats the question otherwise."""
    with ModelServer() as server:
        server.more = {"model": "shop-a", "created": 1_735_787_045}

        def answer(body: dict[str, Any]) -> None:
            last = body["messages"][-1]
            server.tool_calls = [CALL] if body.get("tools") and last["role"] != "tool" else []
            server.said = "" if server.tool_calls else f"You said: {_text(last)}"

        server.asked = answer
        yield server


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _plain(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """(role, text, calls, call that is answered) of a message."""
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], _text(message).strip(), calls, message.get("tool_call_id")


def _sent(body: Mapping[str, Any]) -> tuple[Any, ...]:
    """(prompt, answer) of a request to the stub."""
    prompt = [_plain(message) for message in body["messages"]]
    if body.get("tools") and prompt[-1][0] != "tool":
        return prompt, ("assistant", "", [("call_1", "track", {"parcel": "7"})], None)
    return prompt, ("assistant", f"You said: {prompt[-1][1]}", [], None)


def _recorded(row: Decision) -> tuple[Any, ...]:
    said = {"role": "assistant", "content": row.response}
    if row.response.startswith("["):
        (said,) = json.loads(row.response)
    return [_plain(message) for message in row.messages], _plain(said)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ten_calls_are_ten_decisions_with_what_was_sent(
    name: str, live_server: Any, stub: ModelServer
) -> None:
    if not (folder := os.environ.get("INSTRUMENTORS_PYTHON")):
        pytest.skip("INSTRUMENTORS_PYTHON names no folder of environments with the instrumentors")
    instrumentor, calls = PROGRAMS[name]
    module, _, kind = instrumentor.rpartition(".")
    # the first request loads the program; exporters wait ten seconds, and then drop what they have
    httpx.post(f"{live_server.url}/v1/logs", json={}, timeout=120)
    start = f"from {module} import {kind}\n{kind}().instrument()\n" if kind else ""
    done = subprocess.run(
        [Path(folder) / name / "bin" / "python", "-"],
        input=EXPORT + start + calls + "\nspans.shutdown()\nlogs.shutdown()\n",
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={variable: os.environ[variable] for variable in ("PATH", "HOME")}
        | {
            "OPENAI_API_KEY": "not-used",
            "OPENAI_BASE_URL": stub.url,
            "OTEL_EXPORTER_OTLP_ENDPOINT": live_server.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"Authorization=Bearer%20{key_create('app', ['ingest'])[1]}",
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "true",
            "OTEL_SERVICE_NAME": "support-bot",
        },
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(stub.bodies) == 10
    rows = Decision.objects.order_by("created_at")
    # openai-v2 has the content in log events and the model's name in the span, which comes in another request
    assert {(row.agent, row.source, row.policy) for row in rows} == {("support-bot", "otlp", "shop-a")}
    assert [_recorded(row) for row in rows] == [_sent(body) for body in stub.bodies]
