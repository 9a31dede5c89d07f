"""Traces from saved checkpoints: every message once, whatever shape it was saved in, with ids that never change."""

import json
from pathlib import Path
from typing import Any

import pytest

from fake_server import spooled
from ratchet_client import CheckpointLoader, TraceCollector, checkpoints

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


OPENAI_CALL = {
    "role": "assistant",
    "content": "Let me look.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "search", "arguments": '{"q": "sun"}'}}
    ],
}
OPENAI_RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "shines"}
ANTHROPIC_CALL = {
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "look it up", "signature": "x"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "toolu_1", "name": "search", "input": {"q": "sun"}},
    ],
}
ANTHROPIC_RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True, "content": "no network"}],
}


def save(folder: Path, name: str, content: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def kinds(trace: dict[str, Any]) -> list[str]:
    return [step["kind"] for step in trace["steps"]]


def decisions(traces: list[dict[str, Any]]) -> list[tuple[list[str], str]]:
    """Each decision's prompt, as texts, and its response."""
    return [
        ([str(m["content"]) for m in step["messages"]], step["response"])
        for trace in traces
        for step in trace["steps"]
        if step["kind"] == "decision"
    ]


def test_answers_become_decisions_with_everything_said_before(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        user("Hi"),
        assistant("Hello"),
        user("Sun?"),
        assistant("Up"),
    ]
    path = save(tmp_path, "s.json", {"session_id": "s1", "agent": "support-bot", "messages": messages})
    (trace,) = CheckpointLoader(path).traces()
    assert (trace["agent"], trace["run_id"]) == ("support-bot", "s1")
    assert kinds(trace) == ["step", "decision", "step", "decision"]
    expected = [(["Be brief.", "Hi"], "Hello"), (["Be brief.", "Hi", "Hello", "Sun?"], "Up")]
    assert decisions([trace]) == expected
    assert [step["n"] for step in trace["steps"]] == [0, 1, 2, 3]


def test_openai_tool_calls_are_paired_with_their_results(tmp_path: Path) -> None:
    messages = [user("Sun?"), OPENAI_CALL, OPENAI_RESULT, assistant("It shines.")]
    (trace,) = CheckpointLoader(save(tmp_path, "s.json", {"messages": messages})).traces()
    assert kinds(trace) == ["step", "step", "tool_call", "decision"]
    call = trace["steps"][2]
    assert (call["name"], call["arguments"], call["result"]) == ("search", {"q": "sun"}, "shines")
    assert [response for _, response in decisions([trace])] == ["It shines."]


def test_anthropic_blocks_are_read_with_thoughts_and_errors(tmp_path: Path) -> None:
    messages = [user("Sun?"), ANTHROPIC_CALL, ANTHROPIC_RESULT, assistant("I cannot look.")]
    path = save(tmp_path, "s.json", {"system": "Be kind.", "messages": messages})
    (trace,) = CheckpointLoader(path).traces()
    assert kinds(trace) == ["step", "reasoning", "step", "tool_call", "decision"]
    _, thought, said, call, decision = trace["steps"]
    assert (thought["text"], said["text"]) == ("look it up", "Let me look.")
    assert (call["name"], call["arguments"], call["error"]) == ("search", {"q": "sun"}, "no network")
    assert decision["messages"][0] == {"role": "system", "content": "Be kind."}
    assert decision["messages"][-1] == ANTHROPIC_RESULT


def test_a_call_without_a_result_is_unfinished(tmp_path: Path) -> None:
    (trace,) = CheckpointLoader(save(tmp_path, "s.json", [user("Sun?"), OPENAI_CALL])).traces()
    assert trace["steps"][-1]["unfinished"] is True
    assert decisions([trace]) == []


@pytest.mark.parametrize(
    "document",
    [
        {
            "session_data": {"id": "s1", "messages": [user("Hi"), assistant("Hello")]},
            "task_state": {"name": "t", "status": "done"},
        },
        {
            "session": {"session_id": "s1", "history": [user("Hi"), assistant("Hello")]},
            "tasks": [{"title": "t", "state": "SUCCESS"}],
        },
        {
            "configurable": {"thread_id": "s1"},
            "channel_values": {
                "messages": [{"type": "human", "content": "Hi"}, {"type": "ai", "content": "Hello"}]
            },
            "tasks": {"t": {"status": "completed"}},
        },
        {
            "conversation_id": "s1",
            "state": {
                "chat_history": [
                    {"type": "human", "data": {"content": "Hi"}},
                    {"type": "ai", "data": {"content": "Hello"}},
                ]
            },
            "todos": [{"content": "t", "done": True}],
        },
        {
            "sessions": [
                {"id": "s1", "messages": [user("Hi"), assistant("Hello")], "tasks": {"t": "finished"}}
            ]
        },
    ],
)
def test_sessions_and_tasks_are_found_wherever_they_are_kept(tmp_path: Path, document: Any) -> None:
    (trace,) = CheckpointLoader(save(tmp_path, "x.json", document)).traces()
    assert trace["run_id"] == "s1"
    assert decisions([trace]) == [(["Hi"], "Hello")]
    (task,) = [step for step in trace["steps"] if step["kind"] == "task"]
    assert (task["name"], task["status"]) == ("t", "completed")


def test_a_failed_task_keeps_its_error(tmp_path: Path) -> None:
    path = save(tmp_path, "x.json", {"task": {"goal": "move", "status": "errored", "error": "disk full"}})
    (trace,) = CheckpointLoader(path).traces()
    assert [(s["name"], s["status"], s["error"]) for s in trace["steps"]] == [("move", "failed", "disk full")]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ("2026-11-21T10:00:00Z", "2026-11-21T10:00:00+00:00"),
        ("2026-11-21T10:00:00", "2026-11-21T10:00:00+00:00"),
        (1_795_255_200, "2026-11-21T10:00:00+00:00"),
        (1_795_255_200_000, "2026-11-21T10:00:00+00:00"),
        ("yesterday", None),
    ],
)
def test_times_are_read_or_left_out(tmp_path: Path, stated: Any, expected: str | None) -> None:
    path = save(tmp_path, "x.json", [{**user("Hi"), "timestamp": stated}])
    (trace,) = CheckpointLoader(path).traces()
    assert trace["started_at"] == expected
    assert trace["steps"][0].get("at") == expected


def test_a_session_log_of_one_message_a_line(tmp_path: Path) -> None:
    lines = [
        {"type": "user", "sessionId": "s1", "message": user("Hi"), "timestamp": "2026-11-21T10:00:00Z"},
        {
            "type": "assistant",
            "sessionId": "s1",
            "message": {"role": "assistant", "content": [{"type": "text", "text": "Hello"}]},
        },
        {"type": "user", "sessionId": "s2", "message": user("Sun?")},
    ]
    path = save(tmp_path, "log.jsonl", "\n".join(map(json.dumps, lines)))
    first, second = CheckpointLoader(path).traces()
    assert (first["run_id"], second["run_id"]) == ("s1", "s2")
    assert decisions([first, second]) == [(["Hi"], "Hello")]


def chat(turns: int, start: int = 0) -> list[Message]:
    return [m for i in range(start, turns) for m in (user(f"question {i}"), assistant(f"answer {i}"))]


def test_each_message_comes_once_from_a_growing_session(tmp_path: Path) -> None:
    for turns in (1, 2, 2, 10):
        save(tmp_path, f"session/checkpoint-{turns}.json", {"messages": chat(turns)})
    loader = CheckpointLoader(tmp_path)
    traces = list(loader.traces())
    assert [response for _, response in decisions(traces)] == [f"answer {i}" for i in range(10)]
    assert [len(trace["steps"]) for trace in traces] == [2, 2, 16]
    assert {trace["run_id"] for trace in traces} == {"session/checkpoint"}
    assert loader.overlapping == 2 + 4


def test_growing_sessions(tmp_path: Path) -> None:
    # an earlier checkpoint read later adds nothing
    save(tmp_path, "a.json", {"session_id": "s", "messages": chat(3)})
    save(tmp_path, "b.json", {"session_id": "s", "messages": chat(2)})
    assert len(list(CheckpointLoader(tmp_path).traces())) == 1
    # a branch gives its own answer to the same prompt
    save(tmp_path, "a.json", {"session_id": "s", "messages": [*chat(1), user("q"), assistant("first try")]})
    save(tmp_path, "b.json", {"session_id": "s", "messages": [*chat(1), user("q"), assistant("second try")]})
    found = decisions(list(CheckpointLoader(tmp_path).traces()))
    assert found[1:] == [
        (["question 0", "answer 0", "q"], "first try"),
        (["question 0", "answer 0", "q"], "second try"),
    ]
    # a window that slid on adds its new end alone
    save(tmp_path, "a.json", {"session_id": "s", "messages": chat(4)})
    save(tmp_path, "b.json", {"session_id": "s", "messages": chat(6, start=2)})
    _, second = CheckpointLoader(tmp_path).traces()
    assert [response for _, response in decisions([second])] == ["answer 4", "answer 5"]
    assert decisions([second])[0][0][0] == "question 2"  # what the model saw, not what was dropped


def test_a_system_prompt_that_changes_is_no_new_session(tmp_path: Path) -> None:
    for turns, day in ((1, "Monday"), (2, "Tuesday")):
        messages = [{"role": "system", "content": f"Today is {day}."}, *chat(turns)]
        save(tmp_path, f"{turns}.json", {"session_id": "s", "messages": messages})
    _, second = CheckpointLoader(tmp_path).traces()
    assert decisions([second]) == [
        (["Today is Tuesday.", "question 0", "answer 0", "question 1"], "answer 1")
    ]


def test_two_sessions_that_begin_alike_are_both_kept(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save(tmp_path, f"{name}.json", {"session_id": name, "messages": chat(1)})
    traces = list(CheckpointLoader(tmp_path).traces())
    assert [trace["run_id"] for trace in traces] == ["one", "two"]
    assert len({trace["id"] for trace in traces}) == 2


def test_a_result_that_comes_with_the_next_checkpoint_is_told_then(tmp_path: Path) -> None:
    save(tmp_path, "1.json", {"session_id": "s", "messages": [user("Sun?"), OPENAI_CALL]})
    save(
        tmp_path,
        "2.json",
        {"session_id": "s", "messages": [user("Sun?"), OPENAI_CALL, OPENAI_RESULT, assistant("It shines.")]},
    )
    _, second = CheckpointLoader(tmp_path).traces()
    assert kinds(second) == ["tool_call", "decision"]
    assert (second["steps"][0]["name"], second["steps"][0]["result"]) == ("search", "shines")


def test_a_task_is_told_when_its_status_changes(tmp_path: Path) -> None:
    for number, status in enumerate(("running", "running", "done")):
        save(tmp_path, f"{number}.json", {"session_id": "s", "tasks": [{"name": "t", "status": status}]})
    traces = list(CheckpointLoader(tmp_path).traces())
    assert [step["status"] for trace in traces for step in trace["steps"]] == ["running", "completed"]


def test_ids_follow_from_the_content(tmp_path: Path) -> None:
    save(tmp_path / "a", "1.json", {"session_id": "s", "messages": chat(1)})
    first = list(CheckpointLoader(tmp_path / "a").traces())
    save(tmp_path / "b/moved", "1.json", {"session_id": "s", "messages": chat(1)})
    save(tmp_path / "b/moved", "2.json", {"session_id": "s", "messages": chat(3)})
    later = list(CheckpointLoader(tmp_path / "b").traces())
    assert later[0] == first[0]
    # with the first checkpoint gone, the decisions still have the ids they had
    save(tmp_path / "c", "2.json", {"session_id": "s", "messages": chat(3)})
    (whole,) = CheckpointLoader(tmp_path / "c").traces()
    ids = [step["id"] for step in whole["steps"] if step["kind"] == "decision"]
    assert ids == [s["id"] for t in later for s in t["steps"] if s["kind"] == "decision"]


def test_broken_files_are_named_with_their_line_and_stop_nothing(tmp_path: Path) -> None:
    save(tmp_path, "a.json", '{"messages": [\n{"role": "user",\n')
    save(tmp_path, "b.jsonl", json.dumps({"session_id": "s", "messages": chat(1)}) + "\n{broken\n\n7\n")
    save(tmp_path, "c.json", {"nothing": "here"})
    save(tmp_path, "d.json", "[" * 100_000)
    (tmp_path / "e.json").write_bytes(b"\xff\xfe\xfd")
    save(tmp_path, "f.txt", "not a checkpoint, not looked at")
    loader = CheckpointLoader(tmp_path)
    assert [response for _, response in decisions(list(loader.traces()))] == ["answer 0"]
    named = [(Path(refused.path).name, refused.line) for refused in loader.refused]
    assert named == [
        ("a.json", 3),
        ("b.jsonl", 2),
        ("b.jsonl", 4),
        ("c.json", None),
        ("d.json", None),
        ("e.json", None),
    ]
    assert "messages or tasks" in loader.refused[3].reason


def test_a_decision_too_long_for_the_server_is_refused_and_the_rest_kept(tmp_path: Path) -> None:
    messages = [user("x" * 900_000), assistant("long"), user("Hi"), assistant("Hello")]
    loader = CheckpointLoader(save(tmp_path, "a.json", {"messages": [*chat(1), *messages]}))
    assert [response for _, response in decisions(list(loader.traces()))] == ["answer 0"]
    assert all("at most 900,000 characters" in refused.reason for refused in loader.refused)
    assert len(loader.refused) == 2


def test_a_long_session_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PART_SIZE", 4_000)
    traces = list(CheckpointLoader(save(tmp_path, "a.json", {"messages": chat(20)})).traces())
    assert len(traces) > 3
    assert len({trace["id"] for trace in traces}) == len(traces)
    assert [response for _, response in decisions(traces)] == [f"answer {i}" for i in range(20)]
    assert max(len(json.dumps(trace["steps"])) for trace in traces) < 4_200


def test_a_path_that_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a checkpoint file or a folder"):
        CheckpointLoader(tmp_path / "none")


def test_loaded_traces_go_through_a_collector(tmp_path: Path) -> None:
    save(tmp_path, "saved/1.json", {"session_id": "s", "messages": chat(1)})
    collector = TraceCollector("support-bot", spool_dir=tmp_path / "spool")
    traces = list(CheckpointLoader(tmp_path / "saved", agent="support-bot").traces())
    assert all(collector.add(trace) for trace in traces)
    assert spooled(collector) == traces
