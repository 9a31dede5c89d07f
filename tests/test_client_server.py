"""The client package against Ratchet's own API, and its alias `feedback.collector`."""

import asyncio
import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from feedback.accounts.authentication import key_create
from feedback.models import Decision, Outcome, Rating, Trace
from feedback.recording.ingest import trace_record
from ratchet_client import CheckpointLoader, Client, RequestRefused, TraceCollector
from tests.support.serving import Parrot, parrot_only, policy_made  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
KEY = "7b0d8f4e-6a51-4d0e-9a2e-0c4a58f0a001"


@pytest.mark.django_db(transaction=True)
def test_ratchets_own_api_takes_what_a_collector_sends(live_server: Any, tmp_path: Path) -> None:
    _, secret = key_create("app", ["ingest", "rate", "rate_as"])
    with TraceCollector("support-bot", live_server.url, secret, tmp_path) as collector:
        with collector.trace("run-7", unit="u7", policy="rules-v1") as trace:
            trace.step("plan")
            trace.reasoning("think")
            with trace.tool_call("search", {"q": float("nan")}) as call:
                call.result("nul \x00 and \ud800")
            trace.task_failed("close", TimeoutError("busy"))
            key = trace.decision("Where?", "There", candidates=["There", "Here"], propensity=0.5, tags=["a"])
        collector.rate(key, rater="u7", thumb="up")
        collector.outcome(key, "ticket_reopened", 1)
        assert collector.flush(20)
        assert collector.status().refused == 0
    decision = Decision.objects.get(pk=key)
    stored = Trace.objects.get()
    assert decision.trace_id == stored.pk == uuid.UUID(trace.id)
    assert (decision.unit, decision.policy, decision.propensity) == ("u7", "rules-v1", 0.5)
    assert [step["kind"] for step in stored.steps] == ["step", "reasoning", "tool_call", "task", "decision"]
    assert Rating.objects.get().thumb == "up"
    assert Outcome.objects.get().name == "ticket_reopened"


@pytest.mark.django_db(transaction=True)
def test_a_decision_is_rated_and_gets_its_outcome(live_server: Any, tmp_path: Path, parrot: Parrot) -> None:
    policy_made("support-bot-v1", agent="support-bot")
    _, secret = key_create("app", ["ingest", "rate"])

    async def session(client: Client) -> str:
        listed = await client.adecide("charged twice", candidates=["billing", "sales"], unit="u7", id=KEY)
        assert (listed.id, listed.policy) == (KEY, "support-bot-v1")
        assert listed.response in ("billing", "sales")
        assert 0 < listed.propensity <= 1
        again = client.decide("charged twice", candidates=["billing", "sales"], unit="u7", id=KEY)
        assert (again.response, again.propensity) == (listed.response, listed.propensity)
        with pytest.raises(RequestRefused) as conflict:
            client.decide("something else", candidates=["billing", "sales"], unit="u7", id=KEY)
        assert (conflict.value.status, conflict.value.code) == (409, "conflict")
        assert (await client.arate(listed, thumb="up")).state == "stored"
        assert (await client.aoutcome(listed, "ticket_reopened", 0)).state == "stored"
        return client.decide("Where is my order?").id

    with Client("support-bot", live_server.url, secret) as client:
        written = asyncio.run(session(client))
    with Client("support-bot", live_server.url, secret, tmp_path, fsync=False) as offline:
        assert offline.rate(written, score=0.25, notes="too short").state == "queued"
        assert offline.flush(20)
        assert offline.collector.status().refused == 0
    assert Decision.objects.get(pk=written).response == parrot.said
    expected = [("up", None, "app"), ("", 0.25, "app")]
    assert [(r.thumb, r.score, r.rater) for r in Rating.objects.order_by("created_at")] == expected
    assert str(Outcome.objects.get().decision_id) == KEY


@pytest.mark.django_db(transaction=True)
def test_what_the_server_refuses_says_what_to_do(live_server: Any) -> None:
    _, rates = key_create("rates", ["rate"])
    refusals = [
        (None, lambda client: client.rate(KEY, thumb="up"), 401, "unauthorized"),
        (rates, lambda client: client.decide("Where?"), 403, "forbidden"),
        (rates, lambda client: client.rate(KEY, thumb="up", rater="ada"), 403, "forbidden"),
        (rates, lambda client: client.rate(KEY, thumb="up"), 404, "not_found"),
    ]
    for key, call, status, code in refusals:
        with Client("support-bot", live_server.url, key) as client, pytest.raises(RequestRefused) as caught:
            call(client)
        assert (caught.value.status, caught.value.code) == (status, code)


@pytest.mark.django_db
def test_traces_of_checkpoints_are_stored_once(tmp_path: Path) -> None:
    chat = [
        {"role": role, "content": f"{role} {number}"} for number in range(2) for role in ("user", "assistant")
    ]
    (tmp_path / "1.json").write_text(json.dumps({"session_id": "s", "messages": chat[:2]}))
    (tmp_path / "2.jsonl").write_text(
        json.dumps({"session_id": "t", "messages": chat, "tasks": {"a": "failed"}})
    )
    for again in (False, True):
        stored = [trace_record(**trace).created for trace in CheckpointLoader(tmp_path).traces()]
        assert stored == [not again] * 2
    assert Decision.objects.count() == 3


ALIAS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from feedback.collector import (
    CheckpointLoader, CheckpointRefused, CollectorStatus, Hook, Span, Trace, TraceCollector, hook_into_agent,
    records_decision, records_tool, redact_keys,
)
import ratchet_client
assert ratchet_client.TraceCollector is TraceCollector
collector = TraceCollector("support-bot", None, None, sys.argv[2])
collector.decision("Where?", "There")
(record,) = collector.outbox.pending()
print(json.dumps(record.body))
"""


def alias(*arguments: Path) -> subprocess.CompletedProcess[str]:
    """A Python with nothing installed that imports feedback.collector."""
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", ALIAS, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_alias_works_from_a_checkout_where_nothing_is_installed(tmp_path: Path) -> None:
    process = alias(ROOT, tmp_path)
    assert process.returncode == 0, process.stderr
    (step,) = json.loads(process.stdout)["body"]["steps"]
    assert (step["messages"], step["response"]) == ([{"role": "user", "content": "Where?"}], "There")
