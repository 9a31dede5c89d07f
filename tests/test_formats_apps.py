"""Files of applications and annotation tools: who said what of which answer."""

from __future__ import annotations

import csv
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.base import NO_RATING, columns_watched
from feedback.transfer.formats.chats import NO_CHAT
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    RowRefused,
)
from tests.support.formats import (
    BAD,
    BRIEF,
    GOOD,
    HERE,
    QUESTION,
    one,
    read,
    refusal,
    written,
)
from tests.support.imports import file_import

# --- Two files --------------------------------------------------------------------------------------------


def test_faults_in_simulation_ratings_are_told_with_their_file(tmp_path: Path) -> None:
    ratings = written(
        tmp_path / "r.jsonl",
        [
            {"entry_id": "e1", "rating": "sideways"},
            {"entry_id": "unknown", "rating": "up"},
            {"rating": "up"},
        ],
    )
    refused = [r for r in read("simulation_entries.json", ratings_path=ratings) if isinstance(r, RowRefused)]
    assert {r.line for r in refused} == {1, 2, 3}
    reasons = {r.line: r.reason for r in refused}
    assert "expected up or down, found 'sideways'" in reasons[1]
    assert "does not hold" in reasons[2]
    assert "entry_id: expected" in reasons[3]
    assert all("r.jsonl" in reason for reason in reasons.values())


def test_an_entry_that_stands_there_twice_is_refused(tmp_path: Path) -> None:
    row = {"entry_id": "e1", "prompt": "q", "response": "a"}
    found = list(formats.read(written(tmp_path / "x.jsonl", [row, row])))
    assert isinstance(found[1], RowRefused)
    assert "twice" in found[1].reason


def test_feedback_on_an_episode_of_several_inferences_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "tensorzero_chat_inference.jsonl").read_text())
    both = [row, {**row, "id": "0195e000-0000-7000-8000-000000000009"}]
    feedback = {
        "id": "0195e000-0000-7000-8000-000000000003",
        "target_id": row["episode_id"],
        "metric_name": "accepted",
        "value": True,
    }
    said = written(tmp_path / "said.jsonl", [feedback])
    alone = list(formats.read(written(tmp_path / "one.jsonl", [row]), ratings_path=said))
    assert [len(r.ratings) for r in alone if isinstance(r, ImportedDecision)] == [1]
    several = list(formats.read(written(tmp_path / "two.jsonl", both), ratings_path=said))
    assert any(isinstance(r, RowRefused) and "several inferences" in r.reason for r in several)


def test_a_float_metric_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "x", "target_id": "t", "metric_name": "seconds", "value": 12.5}
    assert "unknown scale" in refusal(tmp_path, row, "tensorzero")


# --- Annotation tools -------------------------------------------------------------------------------------


def test_label_studio_sides_follow_the_name_the_result_is_about(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["annotations"] = task["annotations"][:1]
    for to_name, left in (("answer2", BAD), ("answer1", GOOD), ("comparison", GOOD)):
        task["annotations"][0]["result"][0]["to_name"] = to_name
        record = one(tmp_path, task)
        assert isinstance(record, ImportedComparison)
        assert isinstance(record.left, ImportedDecision)
        assert record.left.response == left


def test_label_studio_json_min_says_the_same_as_the_full_export() -> None:
    (flat,) = read("label_studio_json_min.json")
    full = read("label_studio_pairwise.json")[0]
    assert flat == full


def test_a_task_with_three_answers_cannot_be_paired(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["data"]["answer3"] = "Perhaps."
    assert "expected two answers" in refusal(tmp_path, task, "label_studio")


# --- Chat applications ------------------------------------------------------------------------------------


@pytest.mark.django_db
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


@pytest.mark.parametrize("flat", [False, True])
def test_a_null_answer_of_argilla_says_nothing_and_the_system_prompt_is_a_turn(
    flat: bool, tmp_path: Path
) -> None:
    fields = {"system": "Be brief.", "prompt": QUESTION, "response": GOOD}
    said = [{"value": 4, "user_id": "u"}, {"value": None, "user_id": "v"}]
    row: dict[str, Any] = {"id": "1", "status": "completed", "_server_id": "1"}
    if flat:
        row |= {**fields, "extra": "x", "rating.responses": [4, None], "rating.responses.users": ["u", "v"]}
    else:
        row |= {"fields": fields, "responses": {"rating": said}}
    with columns_watched() as unread:
        record = one(tmp_path, row)
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response) == (BRIEF, GOOD)
    assert [(rating.rater, rating.stars) for rating in record.ratings] == [("u", 4)]
    assert not set(fields) & set(unread)
    assert ("extra" in unread) == flat


MIN = {"id": 7, "annotation_id": 4, "annotator": 1, "created_at": "2025-01-02T03:04:05Z", "lead_time": 3.2}


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize(
    "said",
    [
        {"rating": 4, "corrected": BAD},
        {"quality": [{"rating": 4}], "corrected": {"text": [BAD]}},
        {"rating": 4, "textarea": [BAD]},
        {"rating": 4, "corrected_response": [BAD], "verdict": "helpful"},
    ],
)
def test_a_label_studio_table_says_what_its_json_says(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    row = {"prompt": QUESTION, "answer": GOOD, "system": "Be brief.", **said, **MIN}
    path = tmp_path / f"x.{kind}"
    if kind == "csv":
        with path.open("w", newline="") as file:
            table = csv.DictWriter(file, list(row))
            table.writeheader()
            table.writerow({k: json.dumps(v) if isinstance(v, (list, dict)) else v for k, v in row.items()})
    else:
        written(path, [row])
    (record,) = formats.read(path)
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response) == (BRIEF, GOOD)
    (rating,) = record.ratings
    assert (rating.rater, rating.stars, rating.correction) == ("annotator 1", 4, BAD)
    assert rating.tags == (("helpful",) if "verdict" in said else ())


def test_thoughts_in_a_chat_of_open_webui_stand_beside_the_answer(tmp_path: Path) -> None:
    row = json.loads((HERE / "open_webui_feedback_export.json").read_text())[0]
    message = row["snapshot"]["chat"]["chat"]["history"]["messages"][row["meta"]["message_id"]]
    said = message["content"]
    message["content"] = (
        '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n'
        f"&gt; It is Friday.\n</details>\n{said}"
    )
    record = next(formats.read(written(tmp_path / "x.jsonl", [row])))
    assert isinstance(record, ImportedDecision)
    assert (record.response, record.reasoning) == (said, "It is Friday.")


def test_an_open_webui_arena_thumb_chooses_between_the_answers(tmp_path: Path) -> None:
    row = json.loads((HERE / "open_webui_feedback_export.json").read_text())[0]
    row["meta"]["arena"] = True
    row["data"]["rating"] = "-1"
    found = list(formats.read(written(tmp_path / "x.jsonl", [row])))
    (comparison,) = [r for r in found if isinstance(r, ImportedComparison)]
    assert isinstance(comparison.left, ImportedDecision)
    assert (comparison.left.response, comparison.preference) == (GOOD, "right")


def test_a_librechat_thumb_whose_question_is_missing_is_refused(tmp_path: Path) -> None:
    message = json.loads((HERE / "librechat_messages.json").read_text())[1]
    assert "not in the file" in refusal(tmp_path, message, "librechat")


def test_a_langfuse_score_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "s", "traceId": "t", "name": "n", "dataType": "NUMERIC", "value": 7}
    assert "unknown scale" in refusal(tmp_path, row, "langfuse")


# --- The others -------------------------------------------------------------------------------------------


def test_a_vw_event_whose_two_numberings_disagree_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "vw_dsjson.jsonl").read_text())
    assert "_labelIndex: expected 1" in refusal(tmp_path, {**row, "_labelIndex": 2}, "vw")
    assert "expected 1 to 2" in refusal(tmp_path, {**row, "_label_Action": 3}, "vw")


def test_a_vw_event_whose_probabilities_do_not_sum_to_1_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "vw_dsjson.jsonl").read_text())
    assert "p: expected probabilities that sum to 1, found a sum of 0.95" in refusal(
        tmp_path, {**row, "p": [0.85, 0.1]}, "vw"
    )


def test_an_answer_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (row,) = json.loads((HERE / "pandalm.json").read_text())
    assert "response1: expected a text, found True" in refusal(
        tmp_path, {**row, "response1": True}, "pandalm"
    )


def test_oasst_ranks_are_ordered_pairs_and_equal_ranks_ties(tmp_path: Path) -> None:
    tree = json.loads((HERE / "oasst_tree.jsonl").read_text())
    reply = tree["prompt"]["replies"][0]
    tree["prompt"]["replies"] = [
        {**reply, "message_id": name, "text": name, "rank": rank}
        for name, rank in (("c", 1), ("a", 0), ("b", 1))
    ]
    found = list(formats.read(written(tmp_path / "x.jsonl", [tree])))
    assert [(r.left.response, r.right.response, r.preference) for r in found] == [  # type: ignore[union-attr]
        ("a", "b", "left"),
        ("a", "c", "left"),
        ("b", "c", "tie"),
    ]


def test_an_unknown_key_in_a_ratchet_row_is_refused(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "a", "messages": "q", "response": "r", "colour": "red"}
    assert "unknown keys colour" in refusal(tmp_path, row, "ratchet")
