"""Tables and plain rows: what a file is recognised as, and its examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    RowRefused,
)
from tests.support.figures import figures_of
from tests.support.formats import ASKED, BAD, GOOD, HERE, QUESTION, written
from tests.support.table_files import ratings, text

# --- A plain row is a decision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "base",
    [
        {"messages": [*ASKED, {"role": "assistant", "content": BAD}]},
        {"prompt": QUESTION, "completion": BAD},
        {"instruction": QUESTION, "output": BAD},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": BAD}]},
        {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
        {"prompt": QUESTION, "response": GOOD},
    ],
)
@pytest.mark.parametrize("column", ["quality_score", "annotatorVerdict", "star-rating-2", "upvotes"])
def test_a_column_that_looks_like_a_verdict_is_named_and_refused(
    base: dict[str, Any], column: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "d.jsonl", [{**base, column: 3}])
    with pytest.raises(
        FormatRefused,
        match=rf"{column}: looks like what somebody said of a response, and is not read.*--map ignore={column}",
    ):
        list(formats.read(path))
    (record,) = formats.read(path, columns=ColumnMap.parse(f"ignore={column}"))
    assert isinstance(record, (ImportedDecision, ImportedComparison))


def test_the_rows_vote_for_the_format_not_the_first_one(tmp_path: Path) -> None:
    odd = {"entry_id": "x", "prompt": "q"}
    pairs = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(3)]
    assert formats.detect(written(tmp_path / "x.jsonl", [odd, *pairs])) == "trl"


@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "response": "a"},
        {"prompt": "q", "completion": "a"},
        {"messages": [*ASKED, {"role": "assistant", "content": GOOD}]},
        {"instruction": "q", "output": "a"},
        {
            "chosen": [*ASKED, {"role": "assistant", "content": GOOD}],
            "rejected": [*ASKED, {"role": "assistant", "content": BAD}],
            "score_chosen": 8,
        },
    ],
)
def test_images_are_refused_by_name(row: dict[str, Any], column: str, tmp_path: Path) -> None:
    (record,) = formats.read(written(tmp_path / "x.jsonl", [{**row, column: ["lamp.jpg"]}]))
    assert isinstance(record, RowRefused)
    assert record.reason.startswith(f"{column}: holds an image")
    for record in formats.read(written(tmp_path / "x.jsonl", [{**row, column: []}])):
        assert not isinstance(record, RowRefused)


# --- The examples -------------------------------------------------------------------------------------------


def test_what_was_decided_for_a_file_is_told() -> None:
    with formats.readings(HERE / "table_ratings.csv") as (file,):
        (note,) = file.notes
        assert note.startswith("rating: ")
        assert "stars" in note
        assert figures_of(note) == [1, 5, 1, 5]


# --- As people have them ------------------------------------------------------------------------------------


def test_names_of_a_scale_a_person_and_a_question(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", "Prompt,Response,User Rating (1-10)\nq,a,10\nr,b,5.5\n")
    assert ratings(path) == [1.0, 0.5]
    with formats.readings(path) as (file,):
        (note,) = file.notes
        assert note.startswith("User Rating (1-10): ")
        assert figures_of(note)[-2:] == [1, 10]
    path = text(
        tmp_path / "u.csv",
        "query,model_output,helpful,user_feedback\nq,a,True,nan\nr,b,False,Too long for me.\n",
    )
    up, down = formats.read(path)
    assert isinstance(up, ImportedDecision)
    assert isinstance(down, ImportedDecision)
    assert up.ratings == (ImportedRating(thumb="up"),)
    assert down.ratings == (ImportedRating(thumb="down", notes="Too long for me."),)
    path = text(tmp_path / "ab.tsv", "Prompt\tModel A\tModel B\tWhich is better?\nq\tx\ty\tModel B\n")
    (pair,) = formats.read(path)
    assert isinstance(pair, ImportedComparison)
    assert pair.preference == "right"


def test_a_column_of_nothing_but_up_and_down_is_a_verdict_whatever_it_is_called(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [{"prompt": "q", "response": "a", "column 7": "down"}] * 2)
    with pytest.raises(FormatRefused, match="column 7: looks like what somebody said"):
        list(formats.read(path))


def test_a_verdict_in_another_language_is_not_dropped(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", "Frage;Antwort;Bewertung (1-10)\nq;a;10\n")
    with pytest.raises(FormatRefused, match=r"Bewertung \(1-10\): looks like what somebody said"):
        list(formats.read(path, columns=ColumnMap.parse("prompt=Frage,response=Antwort")))
    map = "prompt=Frage,response=Antwort,rating=Bewertung (1-10)"
    assert ratings(path, ColumnMap.parse(map)) == [1.0]


@pytest.mark.parametrize(("name", "content"), [("t.csv", "prompt,response,rating\n"), ("t.json", "[]")])
def test_a_table_without_rows_is_refused(name: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match="expected rows below the header, or in the list, found none"):
        formats.detect(text(tmp_path / name, content))
