"""Three upstreams at once: llama-cpp-python's own server, Anthropic's dialect, and one that fails in every way."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from feedback.models import Decision
from rl.models import Policy, ServingSettings, Upstream
from rl.serving import endpoint
from rl.serving.gateway import recorder
from rl.upstreams import upstream_add
from tests.support.hosted import FORMAT, HELLO
from tests.support.llama_server import llama_server
from tests.support.serving import openai_client  # noqa: F401
from tests.support.stub_anthropic import KEY, AnthropicServer
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)

AGENTS = ("llama-bot", "claude-bot", "failing-bot")


@pytest.fixture(scope="module")
def llama() -> Iterator[str]:
    with llama_server() as url:
        yield url


@pytest.fixture
def failing(llama: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelServer]:
    """The three upstreams, each the champion of an agent; `claude-bot`'s steps in for the one that fails."""
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)
    with AnthropicServer() as claude, ModelServer() as server:
        rows = [
            upstream_add({"name": "llama", "url": llama, "model": "m-1"}),
            upstream_add({"name": "claude", "url": claude.url, "model": "c-1", "dialect": "anthropic"}, KEY),
            upstream_add({"name": "failing", "url": server.url, "model": "f-1", "timeout_s": 0.3}),
        ]
        for agent, row in zip(AGENTS, rows, strict=True):
            champion(agent, row)
        champion("failing-bot", rows[1], stage="candidate")
        ServingSettings.objects.create(agent="failing-bot", fallbacks=["failing-bot-claude"])
        yield server


def champion(agent: str, row: Upstream, stage: str = "champion") -> None:
    Policy.objects.create(
        name=f"{agent}-{row.name}",
        agent=agent,
        kind="hosted",
        stage=stage,
        upstream=row,
        base_model=row.model,
    )


def ask(client: openai.OpenAI, agent: str, stream: bool) -> str:
    more: Any = {"max_tokens": 8}
    if stream:
        chunks = client.chat.completions.create(model=agent, messages=HELLO, stream=True, **more)
        return [chunk.model for chunk in chunks][-1]
    return client.chat.completions.create(model=agent, messages=HELLO, **more).model


@pytest.mark.slow
def test_a_failing_one_keeps_no_other_away(client: openai.OpenAI, failing: ModelServer) -> None:
    failing.statuses = [0, 429, 500, 502, 503, 504, 401, 400] * 8
    asked = [(agent, stream) for agent in AGENTS for stream in (False, True)] * 4
    with ThreadPoolExecutor(8) as pool:
        answers = Counter(pool.map(lambda one: answered(client, *one), asked))
    assert answers["llama-bot-llama"] == answers["claude-bot-claude"] == 8
    assert set(answers) <= {"llama-bot-llama", "claude-bot-claude", "failing-bot-claude", "400"}
    assert recorder.drain(20)
    kinds = {
        one["kind"]
        for row in Decision.objects.filter(agent="failing-bot")
        for one in row.metadata["serving"]["fallbacks"]
    }
    assert kinds <= {"failed", "busy", "refused", "open", "timeout"}
    assert kinds


def answered(client: openai.OpenAI, agent: str, stream: bool) -> str:
    try:
        return ask(client, agent, stream)
    except openai.BadRequestError:
        return "400"  # a fault of the request is nobody's to make good


@pytest.mark.parametrize("how", ["slow", "cut off", "slow and cut off"])
def test_what_is_slow_falls_back(client: openai.OpenAI, failing: ModelServer, how: str) -> None:
    failing.delay_s = 1.0 if "slow" in how else 0.0
    failing.statuses = [0] * 3 if "cut" in how else []
    assert ask(client, "failing-bot", stream=False) == "failing-bot-claude"
    assert ask(client, "llama-bot", stream=True) == "llama-bot-llama"


def test_llama_cpps_server_holds_to_a_schema(client: openai.OpenAI, failing: ModelServer) -> None:
    for _ in range(2):
        answer = client.chat.completions.create(
            model="llama-bot", messages=HELLO, max_tokens=30, response_format=FORMAT
        )
        assert set(json.loads(answer.choices[0].message.content or "")) == {"ok"}
        assert (answer.model_extra or {})["ratchet"]["left_out"] == ["json_schema"]
    assert ask(client, "claude-bot", stream=False) == "claude-bot-claude"  # no circuit is open
    assert ask(client, "llama-bot", stream=False) == "llama-bot-llama"
