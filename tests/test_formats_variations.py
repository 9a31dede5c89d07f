"""Exports as other versions and providers write them: shapes of a call, traces of several spans, missing parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from feedback.models import Decision, Rating
from feedback.transfer import formats
from feedback.transfer.formats.calls import answers_of, call_decision, prompt_of
from feedback.transfer.formats.declared import NamedScore, word_thumb
from feedback.transfer.formats.records import ImportedDecision, RowError, RowSkipped
from tests.support.formats import ASKED, BRIEF, GOOD, QUESTION, one, written
from tests.support.imports import file_import

TOOLS = Path(__file__).parent / "formats" / "tools"
BAD = "No idea."
TEXT = {"type": "input_text", "text": QUESTION}
SAID = {"type": "output_text", "text": GOOD}
CALL = {"function": {"name": "stock", "arguments": '{"item":"red lamp"}'}, "type": "function", "id": "c1"}


def rows_of(name: str) -> list[Any]:
    text = (TOOLS / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]


def _generation(**more: Any) -> dict[str, Any]:
    """What LangChain logs of an answer without words."""
    message = {"kwargs": {"content": "", "type": "ai", **more}}
    return {"generations": [[{"text": "", "message": message}]]}


# --- Calls of other providers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_body",
    [
        {"messages": BRIEF},
        {"system": "Be brief.", "messages": ASKED},
        {"system": [{"type": "text", "text": "Be brief."}], "messages": ASKED},
        {"instructions": "Be brief.", "input": ASKED},
        {"instructions": "Be brief.", "input": [{"role": "user", "content": [TEXT]}]},
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [{"role": "user", "parts": [{"text": QUESTION}]}],
        },
        [{"role": "developer", "content": "Be brief."}, {"type": "human", "content": QUESTION}],
        [
            [
                {"type": "system", "data": {"content": "Be brief."}},
                {"type": "human", "data": {"content": QUESTION}},
            ]
        ],
        json.dumps({"messages": BRIEF}),
    ],
)
def test_one_prompt_in_the_words_of_many_providers(request_body: Any) -> None:
    assert prompt_of(request_body, "request") == BRIEF


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        json.dumps(GOOD),
        {"choices": [{"message": {"role": None, "content": GOOD}}]},
        {"choices": [{"text": GOOD}]},
        {"role": "assistant", "content": [{"type": "text", "text": GOOD}]},
        {"content": [{"type": "text", "text": GOOD}], "stop_reason": "end_turn"},
        {"candidates": [{"content": {"role": "model", "parts": [{"text": GOOD}]}}]},
        {"output": [{"type": "reasoning"}, {"type": "message", "role": "assistant", "content": [SAID]}]},
        {"messages": [{"type": "human", "content": QUESTION}, {"type": "ai", "content": GOOD}]},
        {"answer": GOOD, "sources": ["returns.md"]},
        [{"message": {"content": GOOD}}][0],
    ],
)
def test_one_response_in_the_words_of_many_providers(answer: Any) -> None:
    assert answers_of(answer, "response") == [GOOD]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": None, "tool_calls": [CALL]}}]},
        _generation(tool_calls=[{"id": "c1", "name": "stock", "args": '{"item":"red lamp"}'}]),
        _generation(additional_kwargs={"tool_calls": [CALL]}),
        {
            "output": [
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "stock",
                    "arguments": '{"item":"red lamp"}',
                }
            ]
        },
    ],
)
def test_a_tool_call_stays_a_message(answer: Any) -> None:
    ((message,),) = answers_of(answer, "response")
    assert (message["role"], message["content"], message["tool_calls"]) == ("assistant", "", [CALL])  # type: ignore[index, call-overload]


THINKING = {"type": "thinking", "thinking": "It is Friday.", "signature": "s"}
SUMMARY = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is Friday."}]}


@pytest.mark.parametrize(
    "answer",
    [
        f"<think>It is Friday.</think>{GOOD}",
        {"choices": [{"message": {"content": GOOD, "reasoning_content": "It is Friday."}}]},
        {"choices": [{"text": f"<think>It is Friday.</think>{GOOD}"}]},
        {"role": "assistant", "content": [THINKING, {"type": "text", "text": GOOD}]},
        [THINKING, {"type": "text", "text": GOOD}],
        {"output": [SUMMARY, {"type": "message", "role": "assistant", "content": [SAID]}]},
        {
            "candidates": [
                {"content": {"parts": [{"text": "It is Friday.", "thought": True}, {"text": GOOD}]}}
            ]
        },
        {
            "output": {
                "message": {
                    "role": "assistant",
                    "content": [
                        {"reasoningContent": {"reasoningText": {"text": "It is Friday."}}},
                        {"text": GOOD},
                    ],
                }
            }
        },
        {"message": {"role": "assistant", "content": GOOD, "thinking": "It is Friday."}, "done": True},
        {"response": GOOD, "thinking": "It is Friday.", "done": True},
        {
            "type": "ai",
            "data": {"content": GOOD, "additional_kwargs": {"reasoning_content": "It is Friday."}},
        },
    ],
)
def test_reasoning_of_any_provider_stands_beside_the_answer(answer: Any) -> None:
    record = call_decision(1, "", {"messages": ASKED}, answer)
    assert (record.response, record.reasoning) == (GOOD, "It is Friday.")


SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}}


@pytest.mark.parametrize(
    ("request_body", "kept"),
    [
        ({"model": "m", "messages": ASKED, "temperature": 0.2}, {"model": "m", "temperature": 0.2}),
        ({"input": QUESTION, "tool_choice": "auto"}, {"tool_choice": "auto"}),
        ({"contents": ASKED, "generationConfig": {"topK": 3}}, {"generationConfig": {"topK": 3}}),
        ({"messages": ASKED, "inferenceConfig": {"maxTokens": 9}}, {"inferenceConfig": {"maxTokens": 9}}),
        ({"question": QUESTION, "context": "Terms"}, {"context": "Terms"}),
        ({"input": {"messages": ASKED, "language": "en"}}, {"language": "en"}),
    ],
)
def test_what_stands_beside_a_question_is_kept(request_body: Any, kept: Any) -> None:
    record = call_decision(
        1, "", request_body, {"choices": [{"message": {"content": GOOD}, "finish_reason": "x"}]}
    )
    assert record.messages == ASKED
    assert record.metadata == {"request": kept, "answer": {"choices": [{"finish_reason": "x"}]}}


@pytest.mark.parametrize(
    "tools",
    [
        {"tools": [{"type": "function", "function": {"name": "stock", "parameters": SCHEMA}}]},
        {"tools": [{"type": "function", "name": "stock", "parameters": SCHEMA}]},
        {"tools": [{"name": "stock", "input_schema": SCHEMA}]},
        {"tools": [{"functionDeclarations": [{"name": "stock", "parameters": SCHEMA}]}]},
        {"toolConfig": {"tools": [{"toolSpec": {"name": "stock", "inputSchema": {"json": SCHEMA}}}]}},
        {"functions": [{"name": "stock", "parameters": SCHEMA}]},
    ],
)
def test_tools_of_any_provider_are_those_of_one(tools: dict[str, Any]) -> None:
    record = call_decision(1, "", {"messages": ASKED, **tools}, GOOD)
    assert record.metadata == {
        "tools": [{"type": "function", "function": {"name": "stock", "parameters": SCHEMA}}]
    }


def test_an_answer_states_its_model_and_tokens() -> None:
    said = {
        "role": "assistant",
        "model": "claude",
        "usage": {"input_tokens": 7, "output_tokens": 2},
        "content": GOOD,
    }
    record = call_decision(1, "", {"messages": ASKED}, said)
    assert (record.policy, record.tokens_in, record.tokens_out) == ("claude", 7, 2)


def test_a_refusal_is_the_answer() -> None:
    answer = {"choices": [{"message": {"role": "assistant", "content": None, "refusal": "I cannot."}}]}
    record = call_decision(1, "", {"messages": ASKED}, answer)
    assert (record.response, record.metadata["refusal"]) == ("I cannot.", True)


def test_steps_before_the_last_answer_stand_beside_it() -> None:
    turns = [
        {"type": "human", "content": QUESTION},
        {"type": "ai", "content": "", "tool_calls": [CALL]},
        {"type": "tool", "content": "3", "tool_call_id": "c1"},
        {"type": "ai", "content": GOOD},
    ]
    record = call_decision(1, "", {"messages": ASKED}, {"messages": turns})
    assert record.response == GOOD
    assert [step["role"] for step in record.metadata["answer"]["steps"]] == ["assistant", "tool"]


def test_words_that_are_json_stay_the_words_a_model_wrote() -> None:
    assert answers_of('{"stars": 4, "why": ["short"]}', "response") == ['{"stars": 4, "why": ["short"]}']
    assert answers_of("[1] Yes, see the terms.", "response") == ["[1] Yes, see the terms."]


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"inlineData": {"data": "x"}}]
)
def test_an_image_in_a_prompt_is_refused_by_name(part: dict[str, Any]) -> None:
    key = "parts" if "inlineData" in part else "content"
    with pytest.raises(RowError, match="not_text"):
        prompt_of([{"role": "user", key: [part]}], "request")


@pytest.mark.parametrize(
    "request_body",
    [
        None,
        {},
        "",
        [],
        {"model": "m", "user": "u"},
        {"messages": [{"role": "user", "content": None}], "model": "m"},
    ],
)
def test_a_call_whose_prompt_was_not_recorded_is_skipped_and_refuses_no_file(
    request_body: Any, tmp_path: Path
) -> None:
    rows = rows_of("flywheel_logs.jsonl")
    rows[0]["request"] = request_body
    skipped, kept = formats.read(written(tmp_path / "x.jsonl", rows))
    assert isinstance(skipped, RowSkipped)
    assert skipped.reason
    assert isinstance(kept, ImportedDecision)


def test_a_log_that_begins_with_a_failure_is_recognised(tmp_path: Path) -> None:
    rows = rows_of("flywheel_logs.jsonl")
    rows[0]["response"] = None
    assert formats.detect(written(tmp_path / "x.jsonl", rows)) == "flywheel"


# --- Traces of several spans ------------------------------------------------------------------------------


@pytest.mark.django_db
def test_feedback_on_the_root_of_a_weave_trace_is_of_its_last_model_call(tmp_path: Path) -> None:
    call = rows_of("weave_calls.jsonl")[0]
    root = call | {
        "id": "0194a000-0000-7000-8000-00000000000a",
        "op_name": "weave:///shop/op/answer:1",
        "attributes": {},
    }
    child = call | {"parent_id": root["id"]}
    feedback = rows_of("weave_feedback.jsonl")[0] | {"weave_ref": f"weave:///shop/call/{root['id']}"}
    report = file_import(written(tmp_path / "calls.jsonl", [root, child]))
    assert (report.decisions, report.skipped) == (1, 1)
    file_import(written(tmp_path / "feedback.jsonl", [feedback]))
    assert str(Rating.objects.get().decision_id) == child["id"]


@pytest.mark.django_db
def test_an_annotation_of_a_phoenix_chain_is_of_its_last_llm_span(tmp_path: Path) -> None:
    span = rows_of("phoenix_spans.json")[0]["data"][0]
    root = span | {
        "context": span["context"] | {"span_id": "aaaa"},
        "span_kind": "CHAIN",
        "attributes": {"input.value": "q"},
    }
    note = rows_of("phoenix_span_annotations.json")[0]["data"][0] | {"span_id": "aaaa"}
    file_import(written(tmp_path / "spans.jsonl", [root, span | {"parent_id": "aaaa"}]))
    file_import(written(tmp_path / "notes.jsonl", [note]))
    assert Rating.objects.get().decision.response == BAD
    assert Decision.objects.count() == 1


def _otlp(attributes: dict[str, str], events: list[dict[str, Any]]) -> dict[str, Any]:
    listed = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    span = {"traceId": "AB", "spanId": "CD", "attributes": listed, "events": events}
    return {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}


def test_spans_without_content_are_skipped(tmp_path: Path) -> None:
    record = one(tmp_path, _otlp({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}, []))
    assert isinstance(record, RowSkipped)
    assert record.reason == "its content was not recorded"


# --- Parts that are missing -------------------------------------------------------------------------------


def test_feedback_that_says_nothing_is_skipped_and_refuses_no_file(tmp_path: Path) -> None:
    rows = rows_of("langsmith_feedback.jsonl")
    rows[4]["comment"] = None
    *_, skipped = sorted(
        formats.read(written(tmp_path / "x.jsonl", rows)), key=lambda record: isinstance(record, RowSkipped)
    )
    assert isinstance(skipped, RowSkipped)
    assert {"score", "comment", "correction"} <= set(skipped.reason.replace(",", "").split())


def test_langfuse_cells_of_a_table_are_texts(tmp_path: Path) -> None:
    row = rows_of("langfuse_blob_scores.jsonl")[1] | {"value": "0.9"}
    assert one(tmp_path, row).rating.score == 0.9  # type: ignore[union-attr]
    trace = json.loads((TOOLS / "langfuse_ui_traces.json").read_text())[0]
    cells = {key: value if isinstance(value, str) else json.dumps(value) for key, value in trace.items()}
    record = one(tmp_path, cells)
    assert isinstance(record, ImportedDecision)
    assert len(record.ratings) == 5
    assert record.tags == ("shop",)


@pytest.mark.django_db
def test_the_report_says_what_was_not_verified(tmp_path: Path) -> None:
    report = file_import(TOOLS / "weave_calls.jsonl")
    assert any(note.startswith("weave: ") for note in report.notes)


def test_the_test_run_that_deepeval_keeps_is_read(tmp_path: Path) -> None:
    run = json.loads((TOOLS / "deepeval_test_run.json").read_text())
    wrapped = list(
        formats.read(written(tmp_path / "latest.jsonl", [{"testRunData": run, "testRunLink": None}]))
    )
    assert [r.response for r in wrapped] == [  # type: ignore[union-attr]
        r.response
        for r in formats.read(TOOLS / "deepeval_test_run.json")  # type: ignore[union-attr]
    ]


def test_a_labelled_response_of_trl_with_more_columns_is_no_capybara(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "completion": [{"role": "assistant", "content": GOOD}], "label": True}
    assert formats.detect(written(tmp_path / "x.jsonl", [row | {"rating": 4, "model": "m"}])) != "capybara"


def test_runs_and_feedback_in_one_archive_find_each_other(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "export.zip", "w") as archive:
        for name in ("openai_stored_messages.json", "openai_stored_completions.json"):
            archive.write(TOOLS / name, name)
    found = [r for r in formats.read(tmp_path / "export.zip") if isinstance(r, ImportedDecision)]
    assert [(r.messages, r.response) for r in found] == [(BRIEF, BAD)]


# --- What a score says ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "label", "thumb", "score", "outcome"),
    [
        ("correct", True, None, "up", None, None),
        ("correct", 0, None, "down", None, None),
        ("quality", 0.25, None, "", 0.25, None),
        ("quality", 4, None, "", None, 4.0),
        ("quality", -0.5, None, "", None, -0.5),
        ("toxicity", 0.9, None, "", None, 0.9),
        ("toxicity", True, None, "", None, None),
        ("verdict", None, "Incorrect", "down", None, None),
        ("verdict", None, "\U0001f44e\U0001f3fd", "down", None, None),
        ("tone", None, "polite", "", None, None),
    ],
)
def test_a_named_score_is_never_guessed(
    name: str, value: Any, label: str | None, thumb: str, score: float | None, outcome: float | None
) -> None:
    rating, measured = NamedScore(name, value, label=label).facts()
    assert (rating.thumb if rating else "", rating.score if rating else None) == (thumb, score)
    assert (measured.value if measured else None) == outcome


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, [1], {"a": 1}])
def test_what_is_no_value_of_a_score_is_refused(value: Any) -> None:
    with pytest.raises(RowError, match="quality: expected a number"):
        NamedScore("quality", value).facts()


def test_a_word_in_a_label_is_no_verdict_by_chance() -> None:
    assert [word_thumb(word) for word in ("nothing", "passable", "yesterday", "", None, 1)] == [""] * 6
