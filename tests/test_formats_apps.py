"""Files of applications and annotation tools: who said what of which answer."""

from __future__ import annotations

import csv
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.base import NO_RATING, columns_watched
from feedback.transfer.formats.chats import NO_CHAT
from feedback.transfer.formats.records import (
    ImportedComparison,
    ImportedDecision,
    ImportedReference,
    RowRefused,
    RowSkipped,
)
from feedback.transfer.import_ import file_import
from tests.support.formats import (
    ASKED,
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

# --- Two files --------------------------------------------------------------------------------------------


def test_simulation_entries_are_joined_with_their_ratings() -> None:
    first, second, third = read("simulation_entries.json", ratings_path=HERE / "simulation_ratings.json")
    assert isinstance(first, ImportedDecision)
    assert (first.agent, first.messages, first.response) == ("helper", ASKED, GOOD)
    assert [(r.thumb, r.tags, r.notes) for r in first.ratings] == [("up", ("clear",), "good")]
    assert isinstance(second, ImportedDecision)
    assert second.response == '{"answer": "No idea."}'
    assert [r.thumb for r in second.ratings] == ["down"]
    assert isinstance(third, ImportedDecision)
    assert third.messages == []
    assert third.metadata == {"entry": {"entry_id": "e3", "scenario": "trend-001", "widget": "line_chart"}}


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


def test_tensorzero_inferences_are_joined_with_their_feedback() -> None:
    (record,) = read(
        "tensorzero_chat_inference.jsonl", ratings_path=HERE / "tensorzero_boolean_feedback.jsonl"
    )
    assert isinstance(record, ImportedDecision)
    assert str(record.id) == "0195e000-0000-7000-8000-000000000001"
    assert (record.agent, record.policy, record.latency_ms) == ("answer", "v1", 812.0)
    assert (record.messages, record.response) == (BRIEF, GOOD)
    # UUIDv7 0195e000-0000 is 0x0195e0000000 = 1743219851264 ms after 1970
    assert record.created_at == datetime(2025, 3, 29, 3, 44, 11, 264000, tzinfo=UTC)
    assert [(r.rater, r.thumb, r.tags) for r in record.ratings] == [("Alice (accepted)", "up", ("accepted",))]


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


def test_a_tensorzero_demonstration_is_a_correction() -> None:
    (record,) = read("tensorzero_demonstration.jsonl")
    assert isinstance(record, ImportedReference)
    assert record.reference == "0195e000-0000-7000-8000-000000000001"
    assert record.rating.correction == GOOD


def test_a_float_metric_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "x", "target_id": "t", "metric_name": "seconds", "value": 12.5}
    assert "unknown scale" in refusal(tmp_path, row, "tensorzero")


# --- Annotation tools -------------------------------------------------------------------------------------


def test_label_studio_pairs_keep_their_sides_and_cancelled_ones_are_skipped() -> None:
    first, second, third = read("label_studio_pairwise.json")
    assert isinstance(first, ImportedComparison)
    assert isinstance(second, ImportedComparison)
    assert isinstance(third, RowSkipped)
    assert (first.preference, first.rater, second.preference, second.rater) == (
        "left",
        "annotator 1",
        "right",
        "annotator 2",
    )
    assert first.ordered
    assert isinstance(first.left, ImportedDecision)
    assert (first.left.messages, first.left.response) == (ASKED, GOOD)
    assert "cancelled" in third.reason


def test_label_studio_sides_follow_the_name_the_result_is_about(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["annotations"] = task["annotations"][:1]
    for to_name, left in (("answer2", BAD), ("answer1", GOOD), ("comparison", GOOD)):
        task["annotations"][0]["result"][0]["to_name"] = to_name
        record = one(tmp_path, task)
        assert isinstance(record, ImportedComparison)
        assert isinstance(record.left, ImportedDecision)
        assert record.left.response == left


def test_label_studio_stars_choices_and_text_are_one_rating() -> None:
    (record,) = read("label_studio_rating.json")
    assert isinstance(record, ImportedDecision)
    (rating,) = record.ratings
    assert (rating.stars, rating.thumb, rating.tags, rating.notes) == (4, "up", ("accept",), "fine")
    assert rating.rater == "rater@example.test"
    assert rating.created_at == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_label_studio_json_min_says_the_same_as_the_full_export() -> None:
    (flat,) = read("label_studio_json_min.json")
    full = read("label_studio_pairwise.json")[0]
    assert flat == full


def test_a_rated_message_of_a_label_studio_chat_is_a_decision() -> None:
    (record,) = read("label_studio_chat.json")
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response) == (ASKED, GOOD)
    assert [(r.stars, r.rater) for r in record.ratings] == [(5, "annotator 1")]


def test_a_task_with_three_answers_cannot_be_paired(tmp_path: Path) -> None:
    (task,) = json.loads((HERE / "label_studio_pairwise.json").read_text())
    task["data"]["answer3"] = "Perhaps."
    assert "expected two answers" in refusal(tmp_path, task, "label_studio")


def test_argilla_preferences_and_rankings_become_comparisons() -> None:
    preference, ranking, skipped = read("argilla_to_list_nested.json")
    for record in (preference, ranking):
        assert isinstance(record, ImportedComparison)
        assert isinstance(record.left, ImportedDecision)
        assert isinstance(record.right, ImportedDecision)
        assert (record.left.response, record.right.response, record.preference) == (GOOD, BAD, "left")
        assert record.rater == "11111111-1111-4111-8111-111111111111"
    assert isinstance(skipped, RowSkipped)
    assert "which of 2 responses is meant cannot be told: quality" in skipped.reason


def test_argilla_drafts_do_not_count() -> None:
    (record,) = read("argilla_to_list_flatten.json")
    assert isinstance(record, ImportedComparison)
    assert record.rater == "11111111-1111-4111-8111-111111111111"


def test_an_argilla_ranking_of_three_is_three_comparisons_and_a_shared_rank_is_none(tmp_path: Path) -> None:
    fields = {"prompt": QUESTION, "response1": "a", "response2": "b", "response3": "c"}

    def pairs(value: Any) -> list[tuple[Any, Any]]:
        row = {"id": "r", "fields": fields, "responses": {"rank": [{"value": value, "user_id": "u"}]}}
        found = formats.read(written(tmp_path / "x.jsonl", [row]))
        return [(r.left.response, r.right.response) for r in found]  # type: ignore[union-attr]

    assert pairs(["response2", "response1", "response3"]) == [("b", "a"), ("b", "c"), ("a", "c")]
    tied = [
        {"value": "response1", "rank": 1},
        {"value": "response2", "rank": 1},
        {"value": "response3", "rank": 2},
    ]
    assert pairs(tied) == [("a", "c"), ("b", "c")]
    assert pairs("response3") == [("c", "a"), ("c", "b")]


def test_argilla_ratings_labels_and_texts_on_one_response_are_one_rating(tmp_path: Path) -> None:
    row = {
        "id": "r",
        "fields": {"prompt": QUESTION, "response": BAD},
        "responses": {
            "quality": [{"value": 2, "user_id": "u"}],
            "topics": [{"value": ["returns", "audio"], "user_id": "u"}],
            "corrected": [{"value": GOOD, "user_id": "u"}],
            "remark": [{"value": "short", "user_id": "u"}],
        },
    }
    record = one(tmp_path, row)
    assert isinstance(record, ImportedDecision)
    (rating,) = record.ratings
    assert (rating.stars, rating.tags, rating.correction, rating.notes) == (
        2,
        ("returns", "audio"),
        GOOD,
        "short",
    )


# --- Chat applications ------------------------------------------------------------------------------------


def test_open_webui_feedback_brings_its_chat_along() -> None:
    rated, sibling, elsewhere = read("open_webui_feedback_export.json")
    assert isinstance(rated, ImportedDecision)
    assert (rated.messages, rated.response, rated.policy, rated.run_id) == (ASKED, GOOD, "shop-b", "m3")
    (rating,) = rated.ratings
    # 9 on a scale of 1 to 10 is 8/9 of the way
    assert (rating.thumb, rating.score, rating.tags, rating.notes) == (
        "up",
        pytest.approx(8 / 9),
        ("returns",),
        "Accurate information",
    )
    assert isinstance(sibling, ImportedDecision)
    assert (sibling.response, sibling.policy, sibling.ratings) == (BAD, "shop-a", ())
    assert isinstance(elsewhere, ImportedReference)
    assert (elsewhere.reference, elsewhere.rating.thumb, elsewhere.rating.notes) == ("m2", "down", "wrong")


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


def test_librechat_thumbs_are_placed_in_their_conversation() -> None:
    skipped, rated = read("librechat_messages.json")
    assert isinstance(skipped, RowSkipped)
    assert isinstance(rated, ImportedDecision)
    assert (rated.messages, rated.response, rated.policy) == (ASKED, BAD, "m1")
    (rating,) = rated.ratings
    assert (rating.thumb, rating.tags, rating.notes) == ("down", ("inaccurate",), "wrong")


def test_a_librechat_thumb_whose_question_is_missing_is_refused(tmp_path: Path) -> None:
    message = json.loads((HERE / "librechat_messages.json").read_text())[1]
    assert "not in the file" in refusal(tmp_path, message, "librechat")


def test_langfuse_scores_are_ratings_of_decisions_elsewhere() -> None:
    found = read("langfuse_scores.json")
    assert all(isinstance(record, ImportedReference) for record in found)
    boolean, numeric, category = (r for r in found if isinstance(r, ImportedReference))
    assert (boolean.reference, boolean.also) == ("o1", ("t1",))
    assert (boolean.rating.thumb, boolean.rating.notes) == ("down", "wrong")
    assert (numeric.rating.score, numeric.rating.rater) == (0.9, "u1: quality")
    assert (category.rating.tags, category.rating.rater_kind) == (("tone: polite",), "simulated")


def test_a_langfuse_score_of_unknown_scale_is_refused(tmp_path: Path) -> None:
    row = {"id": "s", "traceId": "t", "name": "n", "dataType": "NUMERIC", "value": 7}
    assert "unknown scale" in refusal(tmp_path, row, "langfuse")


# --- The others -------------------------------------------------------------------------------------------


def test_a_vw_event_is_a_choice_with_its_propensity_and_reward() -> None:
    (record,) = read("vw_dsjson.jsonl")
    assert isinstance(record, ImportedDecision)
    assert (record.response, record.propensity) == ('{"_tag": "v2"}', 0.85)
    assert record.candidates == ['{"_tag": "v1"}', '{"_tag": "v2"}']
    assert [(o.name, o.value) for o in record.outcomes] == [("reward", 1.0)]
    assert record.created_at == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_vw_event_whose_two_numberings_disagree_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "vw_dsjson.jsonl").read_text())
    assert "_labelIndex: expected 1" in refusal(tmp_path, {**row, "_labelIndex": 2}, "vw")
    assert "expected 1 to 2" in refusal(tmp_path, {**row, "_label_Action": 3}, "vw")


def test_a_vw_event_whose_probabilities_do_not_sum_to_1_is_refused(tmp_path: Path) -> None:
    row = json.loads((HERE / "vw_dsjson.jsonl").read_text())
    assert "p: expected probabilities that sum to 1, found a sum of 0.95" in refusal(
        tmp_path, {**row, "p": [0.85, 0.1]}, "vw"
    )


def test_pandalm_annotators_are_three_raters() -> None:
    found = read("pandalm.json")
    assert [(r.rater, r.preference) for r in found if isinstance(r, ImportedComparison)] == [
        ("annotator1", "left"),
        ("annotator2", "tie"),
        ("annotator3", "right"),
    ]


def test_an_answer_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (row,) = json.loads((HERE / "pandalm.json").read_text())
    assert "response1: expected a text, found True" in refusal(
        tmp_path, {**row, "response1": True}, "pandalm"
    )


def test_feedback_collector_rows_hold_stars_thumbs_scores_and_corrections() -> None:
    found = [r for r in read("feedback_collector.jsonl") if isinstance(r, ImportedDecision)]
    said = [
        (r.ratings[0].stars, r.ratings[0].thumb, r.ratings[0].score, r.ratings[0].correction) for r in found
    ]
    assert said == [(2, "", None, GOOD), (None, "up", None, None), (None, "", 0.7, None)]
    assert found[0].ratings[0].rater == "u1"


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


def test_ratchet_rows_keep_ids_times_and_every_rating() -> None:
    first, _, comparison = read("ratchet.jsonl")
    assert isinstance(first, ImportedDecision)
    assert str(first.id).startswith("11111111")
    assert [(r.thumb, str(r.id)[:4]) for r in first.ratings] == [("up", "2222"), ("down", "3333")]
    assert first.outcomes[0].name == "ticket_reopened"
    assert isinstance(comparison, ImportedComparison)
    assert str(comparison.left).startswith("11111111")


def test_an_unknown_key_in_a_ratchet_row_is_refused(tmp_path: Path) -> None:
    row = {"type": "decision", "agent": "a", "messages": "q", "response": "r", "colour": "red"}
    assert "unknown keys colour" in refusal(tmp_path, row, "ratchet")
