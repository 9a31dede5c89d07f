"""The client side: what is recorded, and that it never stands in the way of the app."""

import asyncio
import json
import logging
import re
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_server import ROOT, Ratchet, spooled, steps
from ratchet_client import TraceCollector, records_decision, records_tool, redact_keys, traces
from ratchet_client.json_values import to_json


@pytest.fixture
def collector(tmp_path: Path) -> TraceCollector:
    """One without a server: what it records is read back from the spool."""
    return TraceCollector("support-bot", spool_dir=tmp_path / "spool", fsync=False)


@pytest.fixture
def ratchet() -> Iterator[Ratchet]:
    server = Ratchet()
    yield server
    server.stop()


def test_a_trace_holds_its_steps_in_order_with_what_was_given_and_returned(collector: TraceCollector) -> None:
    with collector.trace("run-7", unit="user-1", policy="rules-v1") as trace:
        trace.step("plan", goal="answer")
        trace.reasoning("look it up first")
        with trace.tool_call("search", {"q": 1}) as call:
            call.result([{"title": "a"}])
        trace.task_completed("answer the ticket")
        trace.task_failed("close the ticket", TimeoutError("no lock"))
        key = trace.decision("Where?", "There", candidates=["There", "Here"], propensity=0.5)
    (sent,) = spooled(collector)
    assert (sent["agent"], sent["run_id"]) == ("support-bot", "run-7")
    assert sent["metadata"] == {"unit": "user-1", "status": "ended"}
    assert sent["started_at"] <= sent["finished_at"]
    kinds = [(step["kind"], step["name"]) for step in sent["steps"]]
    assert kinds == [
        ("step", "plan"),
        ("reasoning", ""),
        ("tool_call", "search"),
        ("task", "answer the ticket"),
        ("task", "close the ticket"),
        ("decision", ""),
    ]
    plan, thought, tool, done, failed, decision = sent["steps"]
    assert plan["goal"] == "answer"
    assert thought["text"] == "look it up first"
    assert (tool["arguments"], tool["result"]) == ({"q": 1}, [{"title": "a"}])
    assert tool["duration_ms"] >= 0
    assert done["status"] == "completed"
    assert (failed["status"], failed["error"]) == ("failed", "TimeoutError: no lock")
    assert decision["id"] == key == str(uuid.UUID(key))
    assert decision["messages"] == [{"role": "user", "content": "Where?"}]
    expected = ("There", ["There", "Here"], 0.5)
    assert (decision["response"], decision["candidates"], decision["propensity"]) == expected
    assert (decision["unit"], decision["policy"], decision["run_id"]) == ("user-1", "rules-v1", "run-7")


def test_an_error_within_a_tool_call_is_recorded_and_raised_on(collector: TraceCollector) -> None:
    with pytest.raises(KeyError), collector.trace() as trace, trace.tool_call("search"):
        raise KeyError("q")
    (sent,) = spooled(collector)
    assert sent["steps"][0]["error"] == "KeyError: 'q'"
    assert sent["metadata"]["status"] == "failed"


def test_what_happens_within_a_step_belongs_to_it(collector: TraceCollector) -> None:
    with collector.trace() as trace:
        with trace.step("outer"):
            trace.step("inner")
        trace.step("after")
    expected = [("outer", None), ("inner", 0), ("after", None)]
    assert [(s["name"], s["parent"]) for s in steps(collector)] == expected


def test_a_tool_call_that_never_ends_is_marked_so(collector: TraceCollector) -> None:
    with collector.trace() as trace:
        trace.tool_call("hangs", {})
        trace.tool_call("ends", {}).result(1)
    hangs, ends = steps(collector)
    assert hangs["unfinished"] is True
    assert "unfinished" not in ends


def test_threads_may_record_into_one_trace(collector: TraceCollector) -> None:
    with collector.trace() as trace, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: trace.step(str(i)), range(400)))
    found = steps(collector)
    assert {step["name"] for step in found} == {str(i) for i in range(400)}
    assert [step["n"] for step in found] == list(range(400))


def test_a_long_trace_is_sent_in_parts(collector: TraceCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PART_SIZE", 5_000)
    with collector.trace() as trace, trace.step("all"):
        for i in range(100):
            trace.step(f"step {i}", text="x" * 200)
    parts = spooled(collector)
    assert len(parts) > 3
    assert len({part["id"] for part in parts}) == len(parts)
    assert {part["run_id"] for part in parts} == {trace.run_id}
    assert sorted(step["n"] for part in parts for step in part["steps"]) == list(range(101))
    assert max(len(json.dumps(part["steps"])) for part in parts) < 5_500
    assert parts[-1]["id"] == trace.id
    assert [part["metadata"]["part"] for part in parts] == list(range(1, len(parts) + 1))


def test_a_decision_outside_a_trace_makes_one_of_its_own(collector: TraceCollector) -> None:
    key = collector.decision("Hello", {"folder": "mail"}, unit="u")
    (step,) = steps(collector)
    assert (step["id"], step["response"], step["unit"]) == (key, '{"folder": "mail"}', "u")
    assert collector.last_decision_id == key


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"messages": []}, "expected messages"),
        ({"messages": [{"content": "no role"}]}, "expected a message with role and content"),
        ({"response": object()}, "expected a response of text or JSON"),
        ({"propensity": 0.0}, "expected propensity in (0, 1]"),
        ({"propensity": float("nan")}, "expected propensity in (0, 1]"),
        ({"unit": "u" * 201}, "expected a unit of at most 200 characters"),
        ({"candidates": [{"response": "a", "score": 2}]}, "expected score in [0, 1]"),
        ({"id": "seven"}, "badly formed"),
        ({"tokens_in": 1.5}, "expected tokens_in as a whole number"),
        ({"tags": "short"}, "expected a list of at most 50 tags"),
        ({"response": "x" * 900_001}, "expected a decision of at most 900,000 characters"),
    ],
)
def test_a_decision_the_server_would_refuse_is_logged_and_not_sent(
    collector: TraceCollector, facts: dict[str, Any], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole: dict[str, Any] = {"messages": "Where?", "response": "There", **facts}
    with collector.trace() as trace:
        trace.step("before")
        trace.decision(**whole)
    before, left_out = steps(collector)
    assert (before["kind"], left_out["kind"]) == ("step", "step")
    assert fault in left_out["error"]
    assert fault in caplog.text


def test_a_long_prompt_is_never_cut(collector: TraceCollector) -> None:
    prompt = "é" * 100_000
    collector.decision(prompt, "ok")
    assert steps(collector)[0]["messages"][0]["content"] == prompt


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


@dataclass
class Point:
    x: int
    y: Any


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("inf"), "inf"),
        (2**200, "<int of 201 bits>"),
        ("a\x00b\ud800c", "a\ufffdb\ufffdc"),
        ({1: {2}}, {"1": [2]}),
        (Point(1, b"abc"), {"x": 1, "y": "<bytes of 3>"}),
        (ValueError("bad"), "ValueError: bad"),
        (Rude(), "<Rude whose repr raised RuntimeError>"),
        (list(range(300)), [*range(200), "… 100 more"]),
        ("x" * 20_005, "x" * 20_000 + "… [5 more characters]"),
    ],
)
def test_any_value_becomes_bounded_json(value: Any, expected: Any) -> None:
    assert to_json(value) == expected
    json.dumps(to_json(value), allow_nan=False)


def test_a_value_that_contains_itself_ends() -> None:
    value: list[Any] = []
    value.append(value)
    assert len(json.dumps(to_json(value))) < 1_000


@pytest.mark.parametrize("leaf", ["leaf", 1])
def test_a_value_of_many_small_parts_is_bounded(leaf: Any) -> None:
    value: Any = leaf
    for _ in range(7):
        value = [value] * 200
    assert len(json.dumps(to_json(value))) < 500_000


def test_an_iterator_is_not_consumed() -> None:
    numbers = iter([1, 2, 3])
    to_json({"numbers": numbers})
    assert list(numbers) == [1, 2, 3]


def test_a_spool_that_cannot_be_written_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    collector = TraceCollector("support-bot", spool_dir=tmp_path / "spool")
    for _ in range(3):
        collector.decision("Where?", "There")
    assert (
        sum(
            "cannot be written" in record.message
            for record in caplog.records
            if record.levelno >= logging.ERROR
        )
        == 1
    )
    assert collector.status().waiting == 3
    (tmp_path / "spool").unlink()
    assert collector.flush()
    assert len(spooled(collector)) == 3


def test_a_fault_in_recording_reaches_the_log_and_not_the_app(
    collector: TraceCollector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traces, "to_json", lambda *_: 1 / 0)
    with collector.trace() as trace, trace.tool_call("search", 1) as call:
        call.result(2)
    assert "ZeroDivisionError" in caplog.text


def test_a_dead_server_does_not_hold_up_the_app(tmp_path: Path) -> None:
    silent = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)  # accepts, never answers
    url = f"http://127.0.0.1:{silent.server_address[1]}"
    collector = TraceCollector("support-bot", url, spool_dir=tmp_path / "spool", fsync=False, timeout_s=30)
    for _ in range(20):
        collector.decision("Where?", "There")
    assert len(spooled(collector)) == 20
    assert collector.flush(0.1) is False
    collector._sender.stop(0)
    silent.server_close()


@pytest.mark.parametrize("agent", ["Support Bot", "", "a" * 65, "-x"])
def test_an_agent_that_cannot_be_is_refused_at_once(agent: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected an agent of 1 to 64"):
        TraceCollector(agent, spool_dir=tmp_path)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x/?a=1"])
def test_a_url_that_cannot_be_is_refused_at_once(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a url such as"):
        TraceCollector("support-bot", url, spool_dir=tmp_path)


def test_what_the_hook_masks_is_never_on_disk(tmp_path: Path) -> None:
    collector = TraceCollector(
        "support-bot", spool_dir=tmp_path / "spool", redact=redact_keys("Password", "token")
    )
    with collector.trace() as trace:
        trace.tool_call("login", {"user": "u", "password": "hunter2", "more": [{"TOKEN": "hunter2"}]}).result(
            "ok"
        )
    data = b"".join(path.read_bytes() for path in (tmp_path / "spool").iterdir())
    assert b"login" in data
    assert b"hunter2" not in data
    assert steps(collector)[0]["arguments"]["password"] == "[redacted]"


def test_a_hook_that_raises_drops_the_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    collector = TraceCollector("support-bot", spool_dir=tmp_path, redact=lambda trace: trace["no such key"])
    collector.decision("my secret", "ok")
    assert spooled(collector) == []
    assert "redact" in caplog.text


def test_a_hook_may_drop_a_trace(tmp_path: Path) -> None:
    collector = TraceCollector("support-bot", spool_dir=tmp_path, redact=lambda trace: None)
    collector.decision("private", "ok")
    assert spooled(collector) == []


def test_spooled_files_are_the_owners_alone(collector: TraceCollector) -> None:
    collector.decision("Where?", "There")
    files = [collector.outbox.folder, *collector.outbox.folder.iterdir()]
    assert len(files) > 1
    assert [path.stat().st_mode & 0o077 for path in files] == [0] * len(files)


def test_a_decorated_function_records_its_decisions(collector: TraceCollector) -> None:
    @records_decision(
        collector,
        prompt=lambda ticket: f"Queue for {ticket['text']}?",
        unit=lambda ticket: ticket["user"],
        candidates=lambda ticket: ["billing", "sales"],
        policy="rules-v2",
    )
    def choose_queue(ticket: dict[str, str]) -> str:
        """Which queue."""
        return "billing"

    assert choose_queue({"text": "refund", "user": "u7"}) == "billing"
    assert (choose_queue.__name__, choose_queue.__doc__) == ("choose_queue", "Which queue.")
    (step,) = steps(collector)
    assert step["messages"] == [{"role": "user", "content": "Queue for refund?"}]
    expected = ("billing", "u7", "rules-v2", "choose_queue")
    assert (step["response"], step["unit"], step["policy"], step["name"]) == expected
    assert step["candidates"] == ["billing", "sales"]
    assert collector.last_decision_id == step["id"]


def test_a_decorated_coroutine_records_within_the_trace_it_runs_in(collector: TraceCollector) -> None:
    @records_tool(collector)
    async def fetch(key: str) -> str:
        return key * 2

    @records_decision(collector, prompt=lambda x: x)
    async def choose(x: str) -> dict[str, str]:
        return {"folder": await fetch(x)}

    async def work() -> None:
        with collector.trace("outer"):
            await choose("a")

    asyncio.run(work())
    (sent,) = spooled(collector)
    assert sent["run_id"] == "outer"
    tool, decision = sent["steps"]
    assert (tool["name"], tool["arguments"], tool["result"]) == ("fetch", {"key": "a"}, "aa")
    assert decision["response"] == '{"folder": "aa"}'


def test_a_decision_that_raises_is_a_failed_task(collector: TraceCollector) -> None:
    @records_decision(collector, prompt=lambda x: x)
    def choose(x: str) -> str:
        raise LookupError("none")

    with pytest.raises(LookupError):
        choose("a")
    (step,) = steps(collector)
    expected = ("task", "choose", "failed", "LookupError: none")
    assert (step["kind"], step["name"], step["status"], step["error"]) == expected


def test_a_failing_prompt_is_logged(collector: TraceCollector, caplog: pytest.LogCaptureFixture) -> None:
    @records_decision(collector, prompt=lambda x: x.missing)
    def choose(x: str) -> str:
        return "ok"

    assert choose("a") == "ok"
    assert "AttributeError" in caplog.text
    assert [s for s in steps(collector) if s["kind"] == "decision"] == []


def test_documented_examples_run(ratchet: Ratchet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Agent:
        def run(self, question: str) -> str:
            return question

    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "checkpoints" / "1.json").write_text(json.dumps({"session_id": "s", "messages": messages}))
    examples = re.findall(
        r"```python\n(.*?)```", (ROOT.parent.parent / "docs" / "collector.md").read_text("utf-8"), re.S
    )
    names: dict[str, Any] = {"agent": Agent(), "session": SimpleNamespace(user="u7")}
    exec("\n".join(examples).replace("http://localhost:8000", ratchet.url), names)
    names["choose_queue"](SimpleNamespace(text="refund", user="u7"))
    assert names["collector"].close(20)
    decisions = [
        (step["messages"][-1]["content"], step["response"])
        for body in ratchet.taken.values()
        for step in body.get("steps", ())
        if step["kind"] == "decision"
    ]
    assert decisions == [
        ("Where is my order?", "It leaves tomorrow."),
        ("Where is my order?", "Where is my order?"),
        ("Hi", "Hello"),
        ("refund", "billing"),
    ]


def test_calls_of_tools_are_sent_as_messages(collector: TraceCollector) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "3"}
    collector.decision("How many?", said)
    collector.decision("How many?", [said, result])
    collector.decision("How many?", [{"role": "tea"}])
    found = [trace["steps"][0]["response"] for trace in spooled(collector)]
    assert found == [said, [said, result], '[{"role": "tea"}]']
