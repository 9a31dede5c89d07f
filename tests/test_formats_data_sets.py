"""Published data sets of preferences: which response was better, who said so, up to which turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.records import RowRefused, RowSkipped
from tests.support.formats import ASKED, GOOD, one, refusal, written
from tests.support.formats import read as read_example

TOOLS = Path(__file__).parent / "formats" / "tools"
BAD = "No idea."
NORWAY = [{"role": "user", "content": "Do you ship to Norway?"}]
DAYS = "Yes, in 3 to 5 working days."


def read(name: str) -> list[Any]:
    return read_example(f"tools/{name}")


def rows_of(name: str) -> list[Any]:
    text = (TOOLS / name).read_text("utf-8")
    found: list[Any] = (
        json.loads(text) if text.startswith("[") else [json.loads(x) for x in text.splitlines()]
    )
    return found


# --- Battles ----------------------------------------------------------------------------------------------


def test_contents_of_parts_are_texts_and_images_are_refused_by_name(tmp_path: Path) -> None:
    first, both_bad, _ = read("arena_preference_140k.jsonl")
    assert (first.left.messages, first.left.response) == (ASKED, GOOD)
    assert first.left.unit == "00000000-0000-4000-8000-000000000101"
    assert (both_bad.preference, both_bad.rater) == ("both_bad", "")
    row = rows_of("arena_preference_140k.jsonl")[0]
    image = {"type": "image", "text": None, "image": "AAAA", "mimeType": "image/png"}
    row["conversation_a"][0]["content"].append(image)
    assert "not_text" in refusal(tmp_path, row, "arena")


def test_the_55k_table_says_the_winner_in_three_columns(tmp_path: Path) -> None:
    first, second, third = read("arena_preference_55k.csv")
    assert [r.preference for r in (first, second, third)] == ["left", "right", "tie"]
    assert (first.left.messages, first.left.response, first.left.policy) == (ASKED, GOOD, "shop-a")
    assert [m["content"] for m in second.right.response] == [DAYS, "How long?", "3 to 5 working days."]
    assert third.right.response == ""
    row = {
        "id": 1,
        "model_a": "a",
        "model_b": "b",
        "prompt": '["q"]',
        "response_a": '["\\ud83d"]',
        "response_b": '["x"]',
        "winner_model_a": 1,
        "winner_model_b": 0,
        "winner_tie": 0,
    }
    assert one(tmp_path, row).left.response == "�"  # type: ignore[union-attr]
    assert "exactly one 1, found 2" in refusal(tmp_path, row | {"winner_tie": 1}, "arena")


def test_mt_bench_judgments_are_joined_with_their_answers(tmp_path: Path) -> None:
    answers = [
        {"question_id": 81, "category": "shop", "turns": ["Do you ship to Norway?", "How long?"]},
        {"question_id": 81, "model_id": "shop-a", "choices": [{"index": 0, "turns": ["Maybe.", "Long."]}]},
        {"question_id": 81, "model_id": "shop-b", "choices": [{"index": 0, "turns": [DAYS, "3 to 5 days."]}]},
    ]
    texts = written(tmp_path / "answers.jsonl", answers)
    (pair,) = formats.read(TOOLS / "mtbench_judgment_pair.jsonl", ratings_path=texts)
    # the two orders disagree: a tie
    assert (pair.left.response, pair.right.response, pair.preference) == ("Maybe.", DAYS, "tie")  # type: ignore[union-attr]
    assert (pair.rater, pair.rater_kind) == ("gpt-4: pair-v2", "simulated")  # type: ignore[union-attr]
    single, unreadable = formats.read(TOOLS / "mtbench_judgment_single.jsonl", ratings_path=texts)
    assert (single.messages, single.response) == (NORWAY, "Maybe.")  # type: ignore[union-attr]
    assert single.ratings[0].score == pytest.approx(2 / 9)  # type: ignore[union-attr]
    assert (type(unreadable), unreadable.line) == (RowSkipped, 2)
    (missing,) = formats.read(
        TOOLS / "mtbench_judgment_pair.jsonl", ratings_path=written(tmp_path / "few.jsonl", answers[:2])
    )
    assert isinstance(missing, RowRefused)
    assert "the answer of shop-b to question 81, turn 1: not in the file of answers" in missing.reason


# --- Ratings ----------------------------------------------------------------------------------------------


def test_without_single_votes_the_overall_one_counts(tmp_path: Path) -> None:
    row = rows_of("helpsteer3_preference.jsonl")[0]
    assert one(tmp_path, row | {"individual_preference": None}).preference == "left"  # type: ignore[union-attr]
    assert "expected -3 to 3" in refusal(
        tmp_path, row | {"individual_preference": [], "overall_preference": 7}, "helpsteer"
    )


def test_a_helpsteer_score_above_four_is_refused(tmp_path: Path) -> None:
    row = rows_of("helpsteer_ratings.jsonl")[0]
    assert "helpfulness: expected 0 to 4, found 5" in refusal(tmp_path, row | {"helpfulness": 5}, "helpsteer")


# --- Preferences ------------------------------------------------------------------------------------------


def test_an_alpacaeval_preference_of_three_is_refused(tmp_path: Path) -> None:
    row = rows_of("alpacaeval_annotations.json")[0] | {"preference": 3}
    assert "expected 1 to 2, or 0 for a draw" in refusal(tmp_path, row, "alpacaeval")


def test_in_shp_label_one_is_a_and_label_zero_is_b(tmp_path: Path) -> None:
    first, second = read("shp_pairs.jsonl")
    assert (first.left.response, first.preference) == (GOOD, "left")
    assert (second.left.response, second.preference) == (BAD, "right")
    row = rows_of("shp_pairs.jsonl")[0] | {"labels": 2}
    assert "expected 1 (A is better) or 0 (B is)" in refusal(tmp_path, row, "shp")


def test_capybara_uses_the_conversations_and_not_the_templated_prompt(tmp_path: Path) -> None:
    chosen, rejected, pair, _ = read("capybara_dpo.jsonl")
    assert [m["content"] for m in pair.left.messages] == ["Do you ship to Norway?", DAYS, "How long?"]
    assert (chosen.response, [r.stars for r in chosen.ratings]) == ("3 to 5 working days.", [5])
    assert (rejected.response, [r.stars for r in rejected.ratings]) == ("Long.", [2])
    assert (pair.preference, pair.rater_kind) == ("left", "simulated")
    row = rows_of("capybara_dpo.jsonl")[0] | {"rating_rejected": 5}
    records = list(formats.read(written(tmp_path / "x.jsonl", [row])))
    assert records[-1].preference == "tie"  # type: ignore[union-attr]
