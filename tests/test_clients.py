"""The code of docs/clients.md is run: each client library asks the running gateway, and rates what was recorded."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Rating
from rl.serving.gateway import recorder
from tests.support.server import ROOT, free_port, program_started
from tests.support.serving import support_bot_allowed  # noqa: F401
from tests.support.stub_openai import ModelServer
from tests.test_readme import FENCE

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("support_bot"),
    pytest.mark.timeout(300),
]

OPENING, *SECTIONS = (ROOT / "docs" / "clients.md").read_text("utf-8").split("\n## ")
WORDS = "It is at the depot."
CHOSEN = 4
"""Version of the UUIDs that the clients choose; Ratchet's own are of version 7."""
TEXTS = {section.partition("\n")[0]: section for section in SECTIONS}


def code(text: str, language: str) -> str:
    return "\n".join(found[2] for found in FENCE.finditer(text) if found[1] == language)


@pytest.fixture
def stub(settings: Any) -> Iterator[ModelServer]:
    """Calls the tool that it is offered, once; answers with JSON if the request has a schema."""
    with ModelServer() as server:

        def answer(body: dict[str, Any]) -> None:
            server.tool_calls = []
            if body.get("tools") and body["messages"][-1]["role"] != "tool":
                tool = body["tools"][0]["function"]
                arguments = json.dumps(dict.fromkeys(tool["parameters"]["properties"], "7"))
                call = {"name": tool["name"], "arguments": arguments}
                server.tool_calls = [{"id": "call_1", "type": "function", "function": call}]
            schema = body.get("response_format", {}).get("json_schema", {}).get("schema")
            server.said = json.dumps(dict.fromkeys(schema["properties"], "7")) if schema else WORDS

        server.asked = answer
        settings.LOCAL_BACKENDS = [server.url]
        yield server


@pytest.fixture
def address(live_server: Any, stub: ModelServer) -> dict[str, str]:
    """What stands on the page -> what stands in its place here."""
    key = key_create("app", ["ingest", "read", "rate"])[1]
    return {"http://localhost:8000": live_server.url, "rk_...": key}


def program(variable: str) -> str:
    if not (found := os.environ.get(variable)):
        pytest.skip(f"{variable} names no environment with the client libraries")
    return found


def ran(command: list[str], text: str, address: dict[str, str], **more: Any) -> str:
    for shown, real in address.items():
        text = text.replace(shown, real)
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    done = subprocess.run(
        command,
        input=text,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=environment,
        **more,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def in_python(section: str, address: dict[str, str]) -> str:
    text = code(OPENING, "python") + code(TEXTS[section], "python")
    return ran([program("CLIENTS_PYTHON"), "-"], text, address)


def recorded() -> list[Decision]:
    """Each decision, oldest first."""
    assert recorder.drain(10)
    rows = list(Decision.objects.order_by("created_at"))
    assert {(row.agent, row.source) for row in rows} == {("support-bot", "gateway")}
    return rows


def whole_and_streamed(printed: str, *, shown: bool = True) -> tuple[Decision, Rating]:
    """The whole answer, and the rating of the streamed one, whose id the client chose, and saw if `shown`."""
    whole, streamed = recorded()
    assert Rating.objects.get(decision=whole).thumb == "up"
    assert (streamed.pk.version, whole.pk.version) == (CHOSEN, 7)
    assert (str(streamed.pk) in printed) is shown
    assert streamed.response.strip() == WORDS
    rating = Rating.objects.get(decision=streamed)
    assert (rating.thumb, rating.rater) == ("down", "app")
    return whole, rating


def called(row: Decision) -> list[tuple[str, str]]:
    """Name and arguments of the calls that a decision's response makes."""
    functions = [call["function"] for call in json.loads(row.response)[0]["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


@contextmanager
def proxy(home: Path, port: int, address: dict[str, str]) -> Iterator[None]:
    text = code(TEXTS["LiteLLM"], "yaml")
    for shown, real in address.items():
        text = text.replace(shown, real)
    (home / "config.yaml").write_text(text)
    litellm = str(Path(program("CLIENTS_PYTHON")).parent / "litellm")
    environment = {name: os.environ[name] for name in ("PATH", "HOME")}
    command = [litellm, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    health = f"http://127.0.0.1:{port}/health/liveliness"
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with program_started(command, health, home, 120, env=environment, cwd=home):
        yield


def test_langchain(address: dict[str, str]) -> None:
    call, down = whole_and_streamed(in_python("LangChain", address), shown=False)
    assert called(call) == [("track", {"parcel": "7"})]
    assert down.correction == "It left this morning."


def test_openai_agents(address: dict[str, str]) -> None:
    printed = in_python("OpenAI Agents SDK", address)
    rows = recorded()
    for (call, words), run, given in ((rows[:2], "", ("up", None)), (rows[2:], "run-42", ("", 2))):
        assert called(call) == [("track", {"parcel": "7"})]
        assert not call.ratings.exists()
        rating = words.ratings.get()
        assert (rating.thumb, rating.stars) == given
        assert words.response.strip() == WORDS
        for row in (call, words):
            assert row.run_id == run
            assert (str(row.pk) in printed) is bool(run)


def test_pydantic_ai(address: dict[str, str]) -> None:
    printed = in_python("pydantic-ai", address)
    assert "parcel='7'" in printed
    call, _ = whole_and_streamed(printed)
    assert called(call) == [("final_result", {"parcel": "7"})]


def test_litellms_proxy(address: dict[str, str], tmp_path: Path) -> None:
    port = free_port()
    address |= {"http://localhost:4000": f"http://127.0.0.1:{port}", "sk-...": f"sk-{secrets.token_hex(32)}"}
    with proxy(tmp_path, port, address):
        whole, _ = whole_and_streamed(in_python("LiteLLM", address))
    assert whole.response.strip() == WORDS


def test_vercels_ai_sdk(address: dict[str, str]) -> None:
    folder = program("CLIENTS_NODE")
    text = code(TEXTS["Vercel AI SDK"], "js")
    made, _ = whole_and_streamed(ran(["node", "--input-type=module", "-"], text, address, cwd=folder))
    assert json.loads(made.response) == {"parcel": "7"}
