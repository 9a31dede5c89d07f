"""Maps of columns: stated, guessed, and previewed before anything is imported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap
from feedback.transfer.formats.columns import Scale, is_verdict, map_guessed, value_at
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedDecision,
    ImportedRating,
)
from tests.support.formats import ASKED, GOOD, HERE, QUESTION, written
from tests.support.table_files import kinds, rated, text

# --- A map of the columns -----------------------------------------------------------------------------------


def test_a_map_is_parsed() -> None:
    found = ColumnMap.parse("prompt=question, response=answer,rating=stars:1..5", rater="who")
    assert found.columns_by_field() == {
        "prompt": "question",
        "response": "answer",
        "rating": "stars",
        "rater": "who",
    }
    assert found.scale == Scale(1, 5)
    assert ColumnMap.parse("rating=a:b").rating == "a:b"
    assert not ColumnMap()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prompt", "expected field=column, found 'prompt'"),
        ("prompt=", "expected field=column"),
        ("promt=q", "no field 'promt'; there are prompt, messages"),
        ("prompt=a,prompt=b", "prompt stands there twice"),
        ("rating=a:3..3", "two different ends"),
        ("rating=a:x/y/z", "expected two words"),
    ],
)
def test_a_map_with_a_fault_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match=reason):
        rated(tmp_path, ["x"], "a", text)


def test_a_map_reaches_into_nested_json(tmp_path: Path) -> None:
    row = {
        "request": {"messages": ASKED},
        "answer": {"choices": [{"message": {"content": GOOD}}]},
        "meta": {"who": "ann", "points": 7},
    }
    map = "prompt=request.messages,response=answer.choices.0.message.content,rating=meta.points:0..10,rater=meta.who"
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]), columns=ColumnMap.parse(map))
    assert isinstance(record, ImportedDecision)
    assert (record.messages, record.response) == (ASKED, GOOD)
    assert record.ratings == (ImportedRating(rater="ann", score=0.7),)


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FormatRefused,
        match=r"--map rating=starz: no row has a column 'starz'; there are prompt, response, stars",
    ):
        rated(tmp_path, [5, 1], "stars", "rating=starz")


def test_a_map_with_a_format_of_fixed_names_is_refused() -> None:
    with pytest.raises(FormatRefused, match="format hh has columns of fixed names"):
        formats.read(HERE / "hh_rlhf.jsonl", "hh", columns=ColumnMap.parse("prompt=x"))


def test_a_dot_in_a_columns_own_name_wins() -> None:
    assert value_at({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    assert value_at({"a": [{"b": 2}]}, "a.0.b") == 2


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("thumb", None, True),
        ("userFeedback", None, True),
        ("Star Rating", None, True),
        ("helpful", True, True),
        ("helpful", "text", False),
        ("scoreboard", None, False),
        ("language", None, False),
        ("is_english", True, False),
    ],
)
def test_which_names_look_like_a_verdict(name: str, value: Any, verdict: bool) -> None:
    assert is_verdict(name, value) == verdict


# --- Before it is imported ----------------------------------------------------------------------------------


def test_a_preview_says_what_each_column_is_taken_for() -> None:
    (seen,) = formats.preview(HERE / "table_ratings_variants.tsv", demonstration_rows=2)
    assert (seen.format, seen.problem) == ("table", "")
    assert {column.name: column.field for column in seen.columns} == {
        "id": "id",
        "Question": "prompt",
        "Answer": "response",
        "Thumb": "thumb",
        "User": "rater",
        "Comment": "notes",
        "Created At": "created_at",
    }
    assert {column.name for column in seen.columns if column.verdict} == {"Thumb"}
    assert seen.columns[1].samples == (QUESTION, "Do you ship to Norway?")
    assert seen.notes == ("Thumb: read as thumbs",)


def test_a_preview_keeps_the_values_of_a_row_in_its_row(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}]},
        {"messages": "two", "response": "b", "correction": "c"},
        {"messages": "three", "response": "d"},
    ]
    path = text(tmp_path / "t.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    (seen,) = formats.preview(path)
    assert {column.name: column.samples for column in seen.columns} == {
        "messages": ("one", "two", "three"),
        "response": ("", "b", "d"),
        "correction": ("", "c", ""),
    }


@pytest.mark.parametrize(
    ("names", "map"),
    [
        (
            "question bot_reply stars reviewer date",
            "--map prompt=question,response=bot_reply,rating=stars --rater reviewer",
        ),
        (
            "text userPrompt aiAnswer user_rating",
            "--map prompt=userPrompt,response=aiAnswer,rating=user_rating",
        ),
        ("Kundenfrage Antwort Bewertung", "--map prompt=COLUMN,response=COLUMN,rating=Bewertung"),
        ("a b", "--map prompt=COLUMN,response=COLUMN,rating=COLUMN"),
    ],
)
def test_a_map_is_guessed_from_words_in_the_names(names: str, map: str) -> None:
    assert map_guessed(names.split()) == map


def test_a_preview_of_what_needs_a_map_shows_the_columns_and_the_problem(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", "frage,antwort,punkte\nq,a,85\n")
    (seen,) = formats.preview(path)
    assert (seen.format, [column.name for column in seen.columns]) == ("", ["frage", "antwort", "punkte"])
    assert "of no known format" in seen.problem
    assert "--map prompt=COLUMN,response=COLUMN,rating=COLUMN" in seen.problem
    map = ColumnMap.parse("prompt=frage,response=antwort,rating=punkte:0..100")
    (seen,) = formats.preview(path, map)
    assert [column.field for column in seen.columns] == ["prompt", "response", "score"]
    assert kinds(list(formats.read(path, columns=map))) == {"ImportedDecision": 1}
