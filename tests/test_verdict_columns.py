"""Columns that look like a verdict are read the right way round, or named and refused, in every format."""

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.columns import ColumnMap, is_adverse, map_guessed
from feedback.transfer.formats.records import FormatRefused, ImportedComparison, ImportedDecision, RowRefused
from tests.support.formats import HERE


def lines(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


def thumbs(path: Path) -> list[str]:
    return [record.ratings[0].thumb for record in formats.read(path) if isinstance(record, ImportedDecision)]


def chat(n: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Where is {n}?"}, {"role": "assistant", "content": f"At {n}."}]


@pytest.mark.parametrize("column", ["thumbs_down", "disliked", "unhelpful", "user_downvoted"])
def test_yes_to_thumbs_down_is_a_thumb_down(column: str, tmp_path: Path) -> None:
    said = [{"messages": chat(1), column: True}, {"messages": chat(2), column: False}]
    plain = [{"prompt": "a", "response": "b", column: 1}, {"prompt": "c", "response": "d", column: 0}]
    assert thumbs(lines(tmp_path, *said)) == ["down", "up"]
    assert thumbs(lines(tmp_path, *plain)) == ["down", "up"]


def test_thumbs_up_or_down_in_one_column_is_no_question_of_down() -> None:
    assert not is_adverse("thumbs_up_down")
    assert is_adverse("thumbsDown")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"is_good": 1}, "is_good"),
        ({"quality": 4}, "quality"),
        ({"nps": 9}, "nps"),
        ({"harmful": "no"}, "harmful"),
        # within an object, too
        ({"meta": {"rating": 1}}, "meta.rating"),
        ({"meta": {"user_thumb": "down", "page": 3}}, "meta.user_thumb"),
    ],
)
def test_what_may_be_a_verdict_is_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match=f"{said}: looks like what somebody said.*--map rating={said}"):
        formats.read(lines(tmp_path, {"prompt": "a", "response": "b", **row}))


def test_an_object_of_verdicts_says_which_part_to_map(tmp_path: Path) -> None:
    path = lines(
        tmp_path,
        {"prompt": "a", "response": "b", "feedback": {"thumb": "down"}},
        {"prompt": "c", "response": "d", "feedback": {"thumb": "up"}},
    )
    with pytest.raises(FormatRefused, match=r"--map rating=feedback\.thumb"):
        formats.read(path)
    read = list(formats.read(path, columns=ColumnMap.parse("rating=feedback.thumb")))
    assert [record.ratings[0].thumb for record in read] == ["down", "up"]  # type: ignore[union-attr]


ROWS = sorted(
    name
    for name in (
        "hh_rlhf.jsonl openai_dpo.jsonl llamafactory_v1_dpo.jsonl ultrafeedback_binarized.jsonl "
        "tools/alpacaeval_outputs.json tools/arena_conversations.json tools/capybara_kto.jsonl "
        "tools/flywheel_logs.jsonl tools/helicone_requests.jsonl tools/helpsteer_ratings.jsonl "
        "tools/langsmith_runs.jsonl tools/litellm_spend_logs.json tools/mlflow_search_traces.jsonl "
        "tools/nectar_rankings.jsonl tools/openai_eval_output_items.json tools/portkey_logs.jsonl "
        "tools/shp_pairs.jsonl tools/ultrafeedback_raw.jsonl tools/weave_calls.jsonl pandalm.json "
        "argilla_to_list_nested.json feedback_collector.jsonl label_studio_chat.json "
        "label_studio_pairwise.json label_studio_rating.json langfuse_scores.json librechat_messages.json "
        "oasst_tree.jsonl open_webui_feedback_export.json tensorzero_boolean_feedback.jsonl "
        "tensorzero_chat_inference.jsonl tools/deepeval_test_run.json tools/open_webui_chats.json "
        "tools/opik_trace.json tools/otlp_genai_trace.json tools/phoenix_span_annotations.json "
        "tools/phoenix_spans.json tools/promptfoo_results.json vw_dsjson.jsonl"
    ).split()
)
"""Examples whose rows somebody may write a column beside."""


def examples(name: str) -> list[dict[str, Any]]:
    text = (HERE / name).read_text("utf-8")
    found = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
    return found.get("data", [found]) if isinstance(found, dict) else found


@pytest.mark.parametrize("name", ROWS)
def test_a_thumb_somebody_wrote_beside_a_row_is_never_passed_over(name: str, tmp_path: Path) -> None:
    rows = examples(name)
    path = lines(tmp_path, *({**row, "user_rating": "thumbs_down"} for row in rows))
    read = list(formats.read(path))
    refused = [record.reason for record in read if isinstance(record, RowRefused)]
    assert len(refused) == len(rows) == len(read)
    assert all(reason.startswith("user_rating: looks like") for reason in refused)
    # left out on demand, the file says what it says without the column
    ignoring = list(formats.read(path, columns=ColumnMap.parse("ignore=user_rating")))
    assert ignoring == list(formats.read(lines(tmp_path, *rows)))


def test_leaving_out_a_column_that_is_not_there_is_refused(tmp_path: Path) -> None:
    path = lines(
        tmp_path, {"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}
    )
    with pytest.raises(FormatRefused, match="no row has a column 'ratting'"):
        formats.read(path, columns=ColumnMap.parse("ignore=ratting"))


def test_a_column_left_out_is_told_and_shown(tmp_path: Path) -> None:
    path = lines(tmp_path, *({**row, "score": 3} for row in examples("hh_rlhf.jsonl")))
    (seen,) = formats.preview(path, ColumnMap.parse("ignore=score"))
    assert (seen.format, seen.problem, seen.notes) == ("hh", "", ("left out: score",))
    assert {column.name for column in seen.columns if column.ignored} == {"score"}


@pytest.mark.parametrize(
    "answers",
    [("g", "b"), ([{"role": "assistant", "content": "g"}], [{"role": "assistant", "content": "b"}])],
)
def test_messages_beside_two_answers_are_their_prompt(answers: tuple[Any, Any], tmp_path: Path) -> None:
    """As ultrafeedback_binarized and others have it: `messages` with or without the chosen answer at its end."""
    asked = {"role": "user", "content": "a"}
    row = {"chosen": answers[0], "rejected": answers[1]}
    for messages in ([asked], [asked, {"role": "assistant", "content": "g"}]):
        (pair,) = formats.read(lines(tmp_path, {**row, "messages": messages}))
        assert isinstance(pair, ImportedComparison)
        assert pair.left.messages == pair.right.messages == [asked]  # type: ignore[union-attr]
        assert (pair.left.response, pair.right.response) == ("g", "b")  # type: ignore[union-attr]


def test_a_table_of_phoenix_spans_has_empty_attributes(tmp_path: Path) -> None:
    """A data frame written to Parquet has a column for whatever any span has."""
    span = {"name": "llm", "span_kind": "LLM", "context": {"span_id": "s", "trace_id": "t"}}
    said = {"llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "Where?"}
    missing = {"llm.input_messages.1.message.role": None, "llm.input_messages.1.message.content": None}
    path = lines(tmp_path, {**span, "attributes": {**said, **missing, "output.value": "There."}})
    (decision,) = formats.read(path)
    assert isinstance(decision, ImportedDecision)
    assert (decision.messages, decision.response) == ([{"role": "user", "content": "Where?"}], "There.")


def test_a_log_of_choices_is_offered_a_map_with_a_reward_and_no_rating() -> None:
    names = "timestamp item_id position click propensity_score user_feature_0 user_feature_1".split()
    assert map_guessed(names) == (
        "--map prompt=user_feature_0,response=COLUMN,propensity=propensity_score,reward=click"
    )
    assert map_guessed(["question", "answer", "mark_score", "reviewer"]) == (
        "--map prompt=question,response=answer,rating=mark_score --rater reviewer"
    )
