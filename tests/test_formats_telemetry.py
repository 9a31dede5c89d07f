"""Traces, calls, logs, chats and evaluations of other tools: who said what of which answer."""

import json
import uuid
from io import StringIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from django.core.management import call_command

from feedback.models import Comparison, Decision, Rating
from feedback.transfer import formats
from feedback.transfer.formats.base import NO_RATING
from feedback.transfer.formats.chats import NO_CHAT
from feedback.transfer.formats.declared import NamedScore, word_thumb
from feedback.transfer.formats.records import ImportedDecision, RowError
from feedback.transfer.import_ import ImportRefused
from tests.support.formats import ASKED, BRIEF, GOOD, HERE, written
from tests.support.formats import read as read_example
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db


TOOLS = Path(__file__).parent / "formats" / "tools"
BAD = "No idea."
DAYS = "Yes, in 3 to 5 working days."


def read(name: str) -> list[Any]:
    return read_example(f"tools/{name}")


def rows_of(name: str) -> list[Any]:
    text = (TOOLS / name).read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()] if name.endswith("l") else [json.loads(text)]


def verdicts(decision: Decision) -> dict[str, tuple[Any, ...]]:
    """What each rater said: thumb, score, correction, kind."""
    return {
        r.rater: (r.thumb, r.score, r.correction, r.rater_kind)
        for r in Rating.objects.filter(decision=decision)
    }


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
    assert file_import(TOOLS / "langsmith_feedback_pairwise.jsonl").comparisons == 2
    judged = {frozenset((c.left.response, c.right.response)): c for c in Comparison.objects.all()}
    better = judged[frozenset((BAD, DAYS))]
    assert {"left": better.left, "right": better.right}[better.preference].response == DAYS
    assert judged[frozenset(("Bananas are yellow.", "Perhaps."))].preference == "tie"
    assert better.rater == "ann"


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


def test_langfuse_scores_in_a_second_file_rate_the_traces_of_the_first(tmp_path: Path) -> None:
    score = {"id": "s", "traceId": "t9", "name": "good", "value": 0, "dataType": "BOOLEAN", "timestamp": None}
    empty = score | {"id": "n", "value": None}
    traces = written(tmp_path / "traces.jsonl", [RAW | {"scores": []}])
    report = file_import(
        traces, agent="shop", ratings_path=written(tmp_path / "scores.jsonl", [score, empty])
    )
    assert (report.decisions, report.ratings, report.refused_count) == (1, 1, 0)
    assert Rating.objects.get().thumb == "down"


def test_of_an_observation_that_comes_again_the_latest_state_counts(tmp_path: Path) -> None:
    row = rows_of("langfuse_blob_observations.jsonl")[0]
    newer = row | {"output": json.dumps(GOOD), "updated_at": "2025-01-02 03:05:00.000"}
    report = file_import(written(tmp_path / "x.jsonl", [newer, row]))
    assert (report.decisions, report.skipped) == (1, 1)
    assert Decision.objects.get().response == GOOD


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


def test_open_webui_feedback_that_says_nothing_leaves_out_its_row_and_not_the_file(tmp_path: Path) -> None:
    row = json.loads((HERE / "open_webui_feedback_export.json").read_text())[0]
    unrated = row | {"id": str(uuid.uuid4()), "data": row["data"] | {"rating": None}}
    without_chat = row | {
        "id": str(uuid.uuid4()),
        "snapshot": None,
        "meta": row["meta"] | {"message_id": "gone"},
    }
    report = file_import(written(tmp_path / "x.jsonl", [row, unrated, without_chat]), agent="shop")
    assert (report.ratings, report.refused_count) == (1, 0)
    assert report.skipped_because == {NO_RATING: 1, NO_CHAT: 1}


def test_a_log_that_begins_with_a_failure_is_recognised(tmp_path: Path) -> None:
    rows = rows_of("flywheel_logs.jsonl")
    rows[0]["response"] = None
    assert formats.detect(written(tmp_path / "x.jsonl", rows)) == "flywheel"


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


def test_the_report_says_what_was_not_verified(tmp_path: Path) -> None:
    assert any(note.startswith("weave: ") for note in file_import(TOOLS / "weave_calls.jsonl").notes)


def test_a_labelled_response_of_trl_with_more_columns_is_no_capybara(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "completion": [{"role": "assistant", "content": GOOD}], "label": True}
    assert formats.detect(written(tmp_path / "x.jsonl", [row | {"rating": 4, "model": "m"}])) != "capybara"


def test_runs_and_feedback_in_one_archive_find_each_other(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "export.zip", "w") as archive:
        for name in ("openai_stored_messages.json", "openai_stored_completions.json"):
            archive.write(TOOLS / name, name)
    found = [r for r in formats.read(tmp_path / "export.zip") if isinstance(r, ImportedDecision)]
    assert [(r.messages, r.response) for r in found] == [(BRIEF, BAD)]


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
