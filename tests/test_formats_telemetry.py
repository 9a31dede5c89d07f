"""Traces, calls, logs and evaluations of other tools: who said what of which answer."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from feedback.models import Comparison, Decision, Outcome, Rating
from feedback.transfer import formats
from feedback.transfer.formats.records import ImportedDecision
from feedback.transfer.import_ import ImportRefused
from tests.support.formats import ASKED, BRIEF, GOOD, QUESTION, refusal, written
from tests.support.formats import read as read_example
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

TOOLS = Path(__file__).parent / "formats" / "tools"
BAD = "No idea."
DAYS = "Yes, in 3 to 5 working days."


def read(name: str) -> list[Any]:
    return read_example(f"tools/{name}")


def rows_of(name: str) -> list[Any]:
    return [json.loads(line) for line in (TOOLS / name).read_text("utf-8").splitlines()]


def verdicts(decision: Decision) -> dict[str, tuple[Any, ...]]:
    """What each rater said: thumb, score, correction, kind."""
    return {
        r.rater: (r.thumb, r.score, r.correction, r.rater_kind)
        for r in Rating.objects.filter(decision=decision)
    }


# --- LangSmith --------------------------------------------------------------------------------------------


def test_langsmith_feedback_says_who_and_what() -> None:
    file_import(TOOLS / "langsmith_runs.jsonl")
    file_import(TOOLS / "langsmith_feedback.jsonl")
    by_user, by_ann = (Decision.objects.get(run_id=f"00000000-0000-4000-8000-00000000000{n}") for n in (1, 2))
    assert verdicts(by_user) == {"api: user_score": ("down", None, GOOD, "human")}
    assert verdicts(by_ann) == {
        "ann: correctness": ("up", None, None, "human"),
        "ann: tone": ("", None, None, "human"),
        "auto_eval: helpfulness": ("", 0.75, None, "simulated"),
    }
    assert Rating.objects.get(rater="ann: tone").tags == ["tone: polite"]


def test_feedback_before_its_runs_is_refused_with_what_to_import_first() -> None:
    with pytest.raises(ImportRefused, match=r"import the decisions first \(the runs, traces or calls"):
        file_import(TOOLS / "langsmith_feedback.jsonl")
    assert not Rating.objects.exists()
    file_import(TOOLS / "langsmith_runs.jsonl")
    assert file_import(TOOLS / "langsmith_feedback.jsonl").ratings == 5


@pytest.mark.parametrize("order", [1, -1])
def test_runs_and_feedback_in_one_call_in_either_order(order: int) -> None:
    runs, feedback = [TOOLS / "langsmith_runs.jsonl", TOOLS / "langsmith_feedback.jsonl"][::order]
    report = file_import(runs, ratings_path=feedback)
    assert (report.decisions, report.ratings, report.corrections) == (3, 5, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_several_files_come_in_with_their_decisions_first(order: int) -> None:
    files = [str(TOOLS / f"{name}.jsonl") for name in ("weave_calls", "weave_feedback")]
    call_command("import_feedback", *files[::order], stdout=StringIO())
    assert (Decision.objects.count(), Rating.objects.count()) == (2, 5)


def test_feedback_on_the_root_of_a_trace_is_of_its_last_llm_run(tmp_path: Path) -> None:
    run = rows_of("langsmith_runs.jsonl")[0]
    root, first, last = (
        run
        | {
            "id": f"00000000-0000-4000-8000-00000000010{n}",
            "trace_id": "00000000-0000-4000-8000-000000000100",
        }
        | {
            "start_time": f"2025-01-02T03:04:0{n}Z",
            "run_type": "llm" if n else "chain",
            "parent_run_id": n or None,
        }
        for n in range(3)
    )
    last["outputs"] = {"choices": [{"message": {"role": "assistant", "content": GOOD}}]}
    feedback = rows_of("langsmith_feedback.jsonl")[1] | {"run_id": root["id"], "trace_id": root["id"]}
    file_import(written(tmp_path / "runs.jsonl", [root, last, first]))
    file_import(written(tmp_path / "feedback.jsonl", [feedback]))
    assert Rating.objects.get().decision.response == GOOD
    assert Decision.objects.count() == 2


def test_langsmith_pairs_of_one_question_are_comparisons(tmp_path: Path) -> None:
    runs = rows_of("langsmith_runs.jsonl")
    for run in runs:
        run |= {
            "inputs": {"messages": ASKED},
            "run_type": "llm",
            "parent_run_id": None,
            "trace_id": run["id"],
        }
    runs[3] |= {"outputs": {"output": "Perhaps."}, "error": None}
    file_import(written(tmp_path / "runs.jsonl", runs))
    report = file_import(TOOLS / "langsmith_feedback_pairwise.jsonl")
    assert report.comparisons == 2
    judged = {frozenset((c.left.response, c.right.response)): c for c in Comparison.objects.all()}
    better = judged[frozenset((BAD, DAYS))]
    assert {"left": better.left, "right": better.right}[better.preference].response == DAYS
    assert judged[frozenset(("Bananas are yellow.", "Perhaps."))].preference == "tie"
    assert better.rater == "ann"


def test_a_langsmith_queue_says_which_files_hold_the_verdicts() -> None:
    (queue,) = read("langsmith_annotation_queue.json")
    assert "list_runs" in queue.reason
    assert "list_feedback, keys correctness" in queue.reason


# --- OpenAI -----------------------------------------------------------------------------------------------


def test_stored_completions_get_their_prompts_from_the_other_file() -> None:
    file_import(TOOLS / "openai_stored_completions.json", ratings_path=TOOLS / "openai_stored_messages.json")
    decision = Decision.objects.get()
    assert (decision.messages, decision.response, decision.run_id) == (BRIEF, BAD, "chatcmpl-1")
    assert decision.metadata["stored"] == {"app": "shop", "user_rating": "down"}


def test_a_stored_completion_alone_says_which_file_is_missing() -> None:
    with pytest.raises(ImportRefused, match="bring the listing of its messages as --ratings-file"):
        file_import(TOOLS / "openai_stored_completions.json")
    with pytest.raises(
        ImportRefused, match="listing of the completions with this file as its --ratings-file"
    ):
        file_import(TOOLS / "openai_stored_messages.json")


def test_a_stored_completion_with_its_own_messages_is_a_decision_and_calls_a_tool(tmp_path: Path) -> None:
    completion = json.loads((TOOLS / "openai_stored_completions.json").read_text())["data"][1]
    file_import(written(tmp_path / "x.jsonl", [completion | {"messages": ASKED}]))
    (message,) = json.loads(Decision.objects.get().response)
    assert message["tool_calls"][0]["function"] == {"name": "stock", "arguments": '{"item":"red lamp"}'}


# --- Traces -----------------------------------------------------------------------------------------------


def test_phoenix_annotations_in_json_and_csv_say_the_same() -> None:
    file_import(TOOLS / "phoenix_spans.json")
    assert file_import(TOOLS / "phoenix_span_annotations.json").ratings == 4
    first, second = Decision.objects.order_by("run_id")
    assert first.messages == BRIEF
    assert verdicts(first) == {
        "api: user_feedback": ("down", None, None, "human"),
        "judge-1: correctness": ("down", None, None, "simulated"),
    }
    assert verdicts(second)["VXNlcjox: quality"] == ("", 0.8, None, "human")
    assert Rating.objects.get(rater="VXNlcjox: note").notes == "look again"
    assert file_import(TOOLS / "phoenix_annotations_dataframe.csv").ratings == 0


def test_a_phoenix_image_is_refused_by_name(tmp_path: Path) -> None:
    span = json.loads((TOOLS / "phoenix_spans.json").read_text())["data"][0]
    part = "llm.input_messages.1.message.contents.0.message_content"
    span["attributes"] |= {f"{part}.type": "image", f"{part}.image.image.url": "data:..."}
    assert "not_text" in refusal(tmp_path, span, "phoenix")


def test_weave_feedback_of_every_type_finds_its_call() -> None:
    file_import(TOOLS / "weave_calls.jsonl")
    file_import(TOOLS / "weave_feedback.jsonl")
    first, second = Decision.objects.order_by("run_id")
    assert verdicts(first) == {
        "ann: reaction": ("down", None, None, "human"),
        "ann: note": ("", None, None, "human"),
    }
    assert verdicts(second) == {
        "relevance.relevant": ("up", None, None, "simulated"),
        "relevance.score": ("", 0.9, None, "simulated"),
        "ann: custom.correction": ("", None, DAYS, "human"),
    }
    assert [(o.name, o.value, o.decision) for o in Outcome.objects.all()] == [("quality", 4.0, second)]


def test_a_scorers_score_inside_a_weave_call_counts_too(tmp_path: Path) -> None:
    call, reaction = rows_of("weave_calls.jsonl")[0], rows_of("weave_feedback.jsonl")[0]
    call["summary"]["weave"]["feedback"] = [reaction]
    report = file_import(written(tmp_path / "x.jsonl", [call]))
    assert (report.decisions, report.ratings) == (1, 1)
    assert file_import(written(tmp_path / "y.jsonl", [reaction])).already_here == 1


def test_langfuse_scores_find_observations_and_the_last_generation_of_a_trace(tmp_path: Path) -> None:
    early = rows_of("langfuse_blob_observations.jsonl")[0]
    late = early | {"id": "o2", "start_time": "2025-01-02 03:04:07.100", "output": json.dumps(GOOD)}
    file_import(written(tmp_path / "observations.jsonl", [late, early]))
    file_import(TOOLS / "langfuse_blob_scores.jsonl")
    first, last = Decision.objects.order_by("run_id")
    assert (first.messages, first.response, last.response) == (BRIEF, BAD, GOOD)
    assert verdicts(first) == {"annotation: quality": ("", 0.9, None, "human")}
    assert verdicts(last) == {
        "api: user-feedback": ("down", None, None, "human"),
        "eval: tone": ("", None, None, "simulated"),
        "annotation: remark": ("", None, None, "human"),
    }


RAW = {
    "id": "t9",
    "timestamp": "2026-02-23T14:05:00Z",
    "userId": "u1",
    "sessionId": "s1",
    "tags": ["vip"],
    "name": "chat",
    "input": {"messages": ASKED, "model": "gpt-x", "temperature": 0.2},
    "output": {
        "choices": [
            {"message": {"role": "assistant", "content": GOOD, "reasoning_content": "It is Friday."}}
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 4},
    },
    "scores": [
        {"id": "x", "name": "thumb", "value": 1, "dataType": "BOOLEAN", "source": "ANNOTATION"},
        {"id": "y", "name": "tone", "value": None, "dataType": "NUMERIC"},
    ],
}


@pytest.mark.parametrize("kind", ["objects", "texts", "page", "generation inside"])
def test_a_langfuse_trace_of_a_raw_request_keeps_its_user_tags_and_scores(kind: str, tmp_path: Path) -> None:
    row: dict[str, Any] = dict(RAW)
    if kind == "texts":
        row = {key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()}
    elif kind == "page":
        row = {"data": [row], "meta": {"page": 1}}
    elif kind == "generation inside":
        call = {"type": "GENERATION", "model": "gpt-x", "startTime": "2", "input": row["input"]}
        early = {**call, "startTime": "1", "output": "no"}
        row |= {"input": None, "output": None, "observations": [{**call, "output": row["output"]}, early]}
    (record,) = formats.read(written(tmp_path / "x.jsonl", [row]))
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response, record.reasoning) == (ASKED, GOOD, "It is Friday.")
    assert (record.run_id, record.unit, record.tags, record.policy) == ("t9", "u1", ("vip",), "gpt-x")
    assert (record.metadata["trace_id"], record.metadata["session_id"]) == ("t9", "s1")
    assert (record.tokens_in, record.tokens_out) == (9, 4)
    assert [(rating.thumb, rating.rater) for rating in record.ratings] == [("up", "annotation: thumb")]


def test_langfuse_scores_in_a_second_file_rate_the_traces_of_the_first(tmp_path: Path) -> None:
    score = {"id": "s", "traceId": "t9", "name": "good", "value": 0, "dataType": "BOOLEAN", "timestamp": None}
    empty = score | {"id": "n", "value": None}
    traces = written(tmp_path / "traces.jsonl", [RAW | {"scores": []}])
    report = file_import(
        traces, agent="shop", ratings_path=written(tmp_path / "scores.jsonl", [score, empty])
    )
    assert (report.decisions, report.ratings, report.refused_count) == (1, 1, 0)
    assert Rating.objects.get().thumb == "down"


def test_a_generation_of_a_table_is_a_decision(tmp_path: Path) -> None:
    row = {
        "id": "o1",
        "traceId": "t1",
        "type": "GENERATION",
        "startTime": "2026-02-23T14:05:00Z",
        "model": "gpt-x",
        "input": json.dumps(RAW["input"]),
        "output": json.dumps(RAW["output"]),
        "userId": "u1",
        "usageDetails": '{"input": 9, "output": 4}',
        "latency": "1.5",
        "traceTags": '["vip"]',
    }
    with (tmp_path / "x.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(row))
        table.writeheader()
        table.writerow(row)
    (record,) = formats.read(tmp_path / "x.csv")
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response, record.reasoning) == (ASKED, GOOD, "It is Friday.")
    assert (record.policy, record.unit, record.tags, record.latency_ms) == ("gpt-x", "u1", ("vip",), 1500)
    assert (record.tokens_in, record.tokens_out) == (9, 4)


THOUGHT = {"role": "assistant", "content": GOOD, "reasoning_content": "It is Friday."}


def test_parameters_and_tools_of_a_span_are_kept(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "stock", "parameters": {}}}
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.temperature": "0.3",
        "gen_ai.tool.definitions": json.dumps([{"type": "function", "name": "stock", "parameters": {}}]),
        "gen_ai.input.messages": json.dumps(
            [{"role": "user", "parts": [{"type": "text", "content": QUESTION}]}]
        ),
        "gen_ai.output.messages": json.dumps([THOUGHT]),
    }
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    spans = [{"traceId": "aa", "spanId": "bb", "attributes": listed}]
    phoenix = {
        "context": {"span_id": "s", "trace_id": "t"},
        "span_kind": "LLM",
        "parent_id": None,
        "attributes": {
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": QUESTION,
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.content": f"<think>It is Friday.</think>{GOOD}",
            "llm.invocation_parameters": '{"temperature": "0.3"}',
            "llm.tools.0.tool.json_schema": json.dumps(tool),
        },
    }
    for row in ({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}, phoenix):
        (record,) = formats.read(written(tmp_path / "x.jsonl", [row]))
        assert isinstance(record, ImportedDecision)
        assert (record.messages, record.response, record.reasoning) == (ASKED, GOOD, "It is Friday.")
        assert (record.metadata["tools"], record.metadata["request"]) == ([tool], {"temperature": "0.3"})


def test_a_tensorzero_thought_and_calls_in_promptfoo_are_read(tmp_path: Path) -> None:
    blocks = [{"type": "thought", "text": "It is Friday."}, {"type": "text", "text": GOOD}]
    inference = {
        "id": "i",
        "function_name": "f",
        "variant_name": "v",
        "episode_id": "e",
        "output": json.dumps(blocks),
        "input": json.dumps({"messages": ASKED}),
    }
    (record,) = formats.read(written(tmp_path / "tz.jsonl", [inference]))
    assert isinstance(record, ImportedDecision)
    assert (record.response, record.reasoning) == (GOOD, "It is Friday.")
    call = {"id": "c", "type": "function", "function": {"name": "stock", "arguments": "{}"}}
    result = {"promptIdx": 0, "testIdx": 0, "prompt": {"raw": QUESTION}, "response": {"output": [call]}}
    (record,) = formats.read(written(tmp_path / "pf.jsonl", [result]))
    assert isinstance(record, ImportedDecision)
    assert record.response == [{"role": "assistant", "content": "", "tool_calls": [call]}]


def test_of_an_observation_that_comes_again_the_latest_state_counts(tmp_path: Path) -> None:
    row = rows_of("langfuse_blob_observations.jsonl")[0]
    newer = row | {"output": json.dumps(GOOD), "updated_at": "2025-01-02 03:05:00.000"}
    report = file_import(written(tmp_path / "x.jsonl", [newer, row]))
    assert (report.decisions, report.skipped) == (1, 1)
    assert Decision.objects.get().response == GOOD


# --- Gateways ---------------------------------------------------------------------------------------------


def test_further_choices_are_candidates_and_no_turns(tmp_path: Path) -> None:
    row = rows_of("flywheel_logs.jsonl")[0]
    other = {"index": 1, "message": {"role": "assistant", "content": GOOD}}
    row["response"]["choices"].insert(0, other)
    file_import(written(tmp_path / "x.jsonl", [row]))
    decision = Decision.objects.get()
    assert (decision.response, decision.candidates) == (BAD, [BAD, GOOD])


def test_a_portkey_row_is_a_decision_and_a_failed_one_is_not(tmp_path: Path) -> None:
    (row,) = rows_of("portkey_logs.jsonl")
    report = file_import(written(tmp_path / "x.jsonl", [row, row | {"is_success": 0}]))
    assert (report.decisions, report.skipped_because) == (1, {"no response (error)": 1})
    assert Decision.objects.get().latency_ms == 800.0


# --- Evaluations and chats --------------------------------------------------------------------------------


def test_the_best_of_a_promptfoo_test_is_compared_and_the_others_are_not_bad(tmp_path: Path) -> None:
    def result(number: int, output: str, best: bool, prompt: str = "Where?") -> dict[str, Any]:
        assertion = {"type": "select-best", "value": "shorter"}
        part = {"pass": best, "score": int(best), "reason": "", "assertion": assertion}
        return {
            "id": f"00000000-0000-4000-8000-00000000000{number}",
            "promptIdx": 0,
            "testIdx": 3,
            "failureReason": 0,
            "provider": {"id": f"m{number}"},
            "prompt": {"raw": prompt, "label": ""},
            "vars": {},
            "response": {"output": output},
            "gradingResult": {"pass": best, "componentResults": [part]},
        }

    results = [
        result(1, "In the second drawer.", False),
        result(2, "There.", True),
        result(3, "Hm.", False, "Why?"),
    ]
    path = tmp_path / "out.json"
    path.write_text(json.dumps({"evalId": "e", "results": {"version": 3, "results": results}}))
    report = file_import(path)
    # the third answered another prompt
    assert (report.decisions, report.ratings, report.comparisons, report.refused_count) == (3, 0, 1, 0)
    pair = Comparison.objects.get()
    better = pair.left if pair.preference == "left" else pair.right
    assert (better.response, pair.rater, pair.rater_kind) == ("There.", "select-best: shorter", "simulated")
    assert file_import(path).stored_rows == 0
