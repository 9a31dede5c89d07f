"""Hosted policies for tests: what is asked, a stub for their upstream, and what was recorded."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from feedback.models import Decision
from feedback.services import decision_record
from rl.models import Policy, Upstream
from rl.serving.gateway import recorder
from tests.support.stub_openai import ModelServer

HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
LOOK: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"q": {"type": "integer"}}}},
}
SCHEMA: Any = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
SCHEMA |= {"additionalProperties": False}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA, "strict": True}}


@pytest.fixture(name="stub")
def model_server() -> Iterator[ModelServer]:
    with ModelServer() as server:
        yield server


def hosted(
    url: str,
    name: str = "bot-hosted",
    *,
    agent: str = "bot",
    stage: str = "champion",
    parameters: Any = None,
    **upstream: Any,
) -> Policy:
    """A hosted policy on an upstream of its own."""
    row = Upstream.objects.create(name=f"{name}-upstream", url=url, model="m-1", **upstream)
    return Policy.objects.create(
        name=name,
        agent=agent,
        kind="hosted",
        stage=stage,
        upstream=row,
        base_model=row.model,
        parameters=parameters or {},
    )


def answer_of(cost_usd: float | None, **facts: Any) -> Decision:
    """A decision as serving records it, with what its provider took."""
    row = decision_record(**{"source": "gateway", **facts}).row
    row.metadata = {"serving": {"backend": "x", **({} if cost_usd is None else {"cost_usd": cost_usd})}}
    row.save(update_fields=["metadata"])
    return row


def recorded() -> list[Decision]:
    assert recorder.drain(10)
    return list(Decision.objects.order_by("created_at"))


def ask(client: openai.OpenAI, model: str = "bot", **more: Any) -> Any:
    return client.chat.completions.create(model=model, messages=HELLO, **more)
