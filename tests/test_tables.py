"""Tables: what a file is recognised as, how its columns are mapped, and what ratings in it mean."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap
from feedback.transfer.formats.columns import map_guessed
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    RowRefused,
)
from tests.support.figures import figures_of
from tests.support.formats import ASKED, BAD, GOOD, HERE, QUESTION, written
from tests.support.table_files import kinds, rated, ratings, text

SAID, OTHER = ({"role": "assistant", "content": text} for text in (GOOD, BAD))
PLAIN: list[dict[str, Any]] = [
    {"messages": [*ASKED, OTHER]},
    {"prompt": QUESTION, "completion": BAD},
    {"instruction": QUESTION, "output": BAD},
    {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": BAD}]},
    {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
    {"prompt": QUESTION, "response": GOOD},
]


@pytest.mark.parametrize("column", ["quality_score", "annotatorVerdict", "star-rating-2", "upvotes"])
def test_a_column_that_looks_like_a_verdict_is_named_and_refused(column: str, tmp_path: Path) -> None:
    for row in PLAIN:
        path = written(tmp_path / "d.jsonl", [{**row, column: 3}])
        with pytest.raises(FormatRefused, match=rf"{column}: looks like.*--map ignore={column}"):
            list(formats.read(path))
        (record,) = formats.read(path, columns=ColumnMap.parse(f"ignore={column}"))
        assert isinstance(record, (ImportedDecision, ImportedComparison))


@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
def test_images_are_refused_by_name(column: str, tmp_path: Path) -> None:
    pair = {"chosen": [*ASKED, SAID], "rejected": [*ASKED, OTHER], "score_chosen": 8}
    for row in (*PLAIN[:3], PLAIN[5], pair):
        (record,) = formats.read(written(tmp_path / "x.jsonl", [{**row, column: ["lamp.jpg"]}]))
        assert isinstance(record, RowRefused)
        assert record.reason.startswith(f"{column}: holds an image")
        for record in formats.read(written(tmp_path / "x.jsonl", [{**row, column: []}])):
            assert not isinstance(record, RowRefused)


def test_the_rows_vote_for_the_format_not_the_first_one(tmp_path: Path) -> None:
    odd = {"entry_id": "x", "prompt": "q"}
    pairs = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(3)]
    assert formats.detect(written(tmp_path / "x.jsonl", [odd, *pairs])) == "trl"


def test_what_was_decided_for_a_file_is_told() -> None:
    with formats.readings(HERE / "table_ratings.csv") as (file,):
        (note,) = file.notes
        assert note.startswith("rating: ")
        assert "stars" in note
        assert figures_of(note) == [1, 5, 1, 5]


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


def test_a_verdict_is_not_dropped_whatever_it_is_called(tmp_path: Path) -> None:
    path = written(tmp_path / "t.jsonl", [{"prompt": "q", "response": "a", "column 7": "down"}] * 2)
    with pytest.raises(FormatRefused, match="column 7: looks like"):
        list(formats.read(path))
    path = text(tmp_path / "t.csv", "Frage;Antwort;Bewertung (1-10)\nq;a;10\n")
    map = "prompt=Frage,response=Antwort"
    with pytest.raises(FormatRefused, match=r"Bewertung \(1-10\): looks like"):
        list(formats.read(path, columns=ColumnMap.parse(map)))
    assert ratings(path, ColumnMap.parse(f"{map},rating=Bewertung (1-10)")) == [1.0]


@pytest.mark.parametrize(("name", "content"), [("t.csv", "prompt,response,rating\n"), ("t.json", "[]")])
def test_a_table_without_rows_is_refused(name: str, content: str, tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match="expected rows below the header, or in the list, found none"):
        formats.detect(text(tmp_path / name, content))


def test_a_map_with_a_fault_is_refused(tmp_path: Path) -> None:
    for map, reason in {
        "prompt": "found 'prompt'",
        "prompt=": "expected field=column",
        "promt=q": "no field 'promt'",
        "prompt=a,prompt=b": "twice",
        "rating=a:3..3": "two different ends",
        "rating=a:x/y/z": "two words",
        "rating=starz": "no row has a column 'starz'; there are prompt, response, a",
    }.items():
        with pytest.raises(FormatRefused, match=reason):
            rated(tmp_path, [5, 1], "a", map)
    with pytest.raises(FormatRefused, match="hh has columns of fixed names"):
        formats.read(HERE / "hh_rlhf.jsonl", "hh", columns=ColumnMap.parse("prompt=x"))


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
    expected = {"messages": ("one", "two", "three"), "response": ("", "b", "d"), "correction": ("", "c", "")}
    assert {column.name: column.samples for column in seen.columns} == expected


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
        (
            "message routed expected",
            "--map prompt=message,response=routed,rating=COLUMN,correction=expected",
        ),
    ],
)
def test_a_map_is_guessed_from_words_in_the_names(names: str, map: str) -> None:
    assert map_guessed(names.split()) == map


def test_a_guessed_map_is_quoted_for_a_shell() -> None:
    """The columns of a spreadsheet have spaces and question marks."""
    names = ["customer message", "routed to", "ok?", "should have been"]
    assert shlex.split(map_guessed(names)) == [
        "--map",
        "prompt=customer message,response=routed to,rating=ok?,correction=should have been",
    ]


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


MEANINGS: list[tuple[list[Any], list[Any]]] = [
    (["up", "down", "neutral", ""], ["up", "down", None, None]),
    (["👍", "👎🏽", "👍"], ["up", "down", "up"]),
    (["Yes", "no", "N/A"], ["up", "down", None]),
    ([True, False, None], ["up", "down", None]),
    ([1, 0, 1], ["up", "down", "up"]),
    (["1.0", "0.0", "NaN"], ["up", "down", None]),
    ([1, -1, 0], ["up", "down", None]),
    ([5, 1, 3], [5, 1, 3]),
    (["5.0", "1.0", None], [5, 1, None]),
    ([1, 1, 2], [1, 1, 2]),
    ([0.25, 1, 0.5], [0.25, 1.0, 0.5]),
    (["0,25", "1,0", "none"], [0.25, 1.0, None]),
    (["80%", "25 %", "-"], [0.8, 0.25, None]),
    (["8/10", "5/10"], [0.8, 0.5]),
    (["★★★★☆", "⭐"], [4, 1]),
    (["4 stars", "1 star"], [4, 1]),
]
UNKNOWN: list[tuple[list[Any], str]] = [
    ([10, 7, 1], "from 1 to 10"),
    ([85, 40], "from 40 to 85"),
    ([4.5, 1, 3], "from 1 to 4.5"),
    ([0, 3, 5], "from 0 to 5"),
    ([-0.5, 0.5], "scale unknown"),
    ([1, 1, 1], "thumb up or one star"),
    (["spam", "ham"], "found ham, spam"),
    (["up", 3], "expected ratings"),
    ([["a"], "up"], "expected ratings"),
    ([10**400, 1], "expected ratings"),
]
MAPPED: list[tuple[list[Any], str, list[Any]]] = [
    ([85, 40, 0], "rating=rating:0..100", [0.85, 0.4, 0.0]),
    ([10, 1], "rating=rating:1..10", [1.0, 0.0]),
    ([1, 5], "rating=rating:5..1", [1.0, 0.0]),
    (["spam", "ham", None], "rating=rating:ham/spam", ["down", "up", None]),
    ([2, 1], "rating=rating:1/2", ["down", "up"]),
    ([1, 1], "stars=rating", [1, 1]),
    ([1, 1], "thumb=rating", ["up", "up"]),
    ([0, 1], "score=rating", [0.0, 1.0]),
]


def test_what_ratings_mean_is_decided_from_all_of_them_or_stated_by_a_map(tmp_path: Path) -> None:
    for values, found in MEANINGS:
        assert rated(tmp_path, values) == found
    for values, reason in UNKNOWN:
        with pytest.raises(FormatRefused, match=f"{reason}.*--map"):
            rated(tmp_path, values)
    for values, map, found in MAPPED:
        got = []
        rows = [{"prompt": f"q{i}", "response": "a", "rating": value} for i, value in enumerate(values)]
        for record in formats.read(written(tmp_path / "r.jsonl", rows), columns=ColumnMap.parse(map)):
            assert isinstance(record, ImportedDecision)
            rating = record.ratings[0] if record.ratings else ImportedRating()
            got.append(rating.score if rating.score is not None else rating.stars or rating.thumb or None)
        assert got == found, map


def test_a_number_outside_the_scale_said_is_a_refused_row(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [{"prompt": "q", "response": "a", "rating": v} for v in (50, 101)])
    good, bad = formats.read(path, columns=ColumnMap.parse("rating=rating:0..100"))
    assert isinstance(good, ImportedDecision)
    assert isinstance(bad, RowRefused)
    assert "expected a number from 0 to 100, found 101" in bad.reason


def test_two_verdicts_of_different_kinds_are_both_read_and_of_one_kind_refused(tmp_path: Path) -> None:
    row = {"prompt": "q", "response": "a", "thumb": "up", "stars": 4, "score": 0.5, "correction": "b"}
    row |= {"tags": "x, y", "comment": "c"}
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedDecision)
    assert record.ratings == (
        ImportedRating(thumb="up", stars=4, score=0.5, correction="b", tags=("x", "y"), notes="c"),
    )
    with pytest.raises(FormatRefused, match="vote: looks like"):
        list(formats.read(written(tmp_path / "r.jsonl", [{**row, "vote": "down"}])))


def test_0_and_1_do_not_say_which_was_preferred_unless_a_map_does(tmp_path: Path) -> None:
    pair = {"prompt": "q", "response_a": "x", "response_b": "y"}
    for values in ([0, 1], ["0", "1"], [True, False], [1, 0]):
        path = written(tmp_path / "r.jsonl", [{**pair, "winner": value} for value in values])
        with pytest.raises(FormatRefused, match=r"winner: 0 and 1.*preferred=winner:0/1"):
            list(formats.read(path))
    path = written(tmp_path / "r.jsonl", [{**pair, "winner": value} for value in (0, 1, 2)])
    found = list(formats.read(path, columns=ColumnMap.parse("preferred=winner:1/0/2")))
    assert [r.preference for r in found if isinstance(r, ImportedComparison)] == ["right", "left", "tie"]
    with pytest.raises(FormatRefused, match="which was preferred"):
        list(formats.read(written(tmp_path / "r.jsonl", [pair])))
