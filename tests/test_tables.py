"""Tables and plain rows: what a file is recognised as, which column is what, what its ratings mean."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap, files, tables
from feedback.transfer.formats.columns import Scale, is_verdict, map_guessed, value_at
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    ImportedRating,
    Record,
    Row,
    RowRefused,
    RowSkipped,
)
from tests.support.formats import ASKED, BAD, GOOD, HERE, ODD, QUESTION, places, put, written

Q = "prompt=q,response=a"


def kinds(records: list[Record]) -> dict[str, int]:
    return dict(Counter(type(record).__name__ for record in records))


def text(path: Path, content: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(content.encode(encoding))
    return path


def ratings(path: Path, columns: ColumnMap | None = None) -> list[Any]:
    """thumb, stars or score of each decision; None where it has no rating."""
    found = []
    for record in formats.read(path, columns=columns):
        assert isinstance(record, ImportedDecision), record
        rating = record.ratings[0] if record.ratings else None
        found.append(None if rating is None else rating.thumb or rating.stars or rating.score)
    return found


def rated(tmp_path: Path, values: list[Any], name: str = "rating", map: str = "") -> list[Any]:
    path = written(
        tmp_path / "r.jsonl", [{"prompt": f"q{i}", "response": "a", name: v} for i, v in enumerate(values)]
    )
    return ratings(path, ColumnMap.parse(map) if map else None)


# --- A plain row is a decision ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"agent": "support-bot", "messages": ASKED, "response": GOOD},
        {"messages": ASKED, "response": GOOD, "temperature": 0.2, "whatever": {"a": 1}},
        {"prompt": QUESTION, "response": GOOD},
        {"prompt": ASKED, "response": [{"role": "assistant", "content": GOOD}], "language": "en"},
        {"messages": [*ASKED, {"role": "assistant", "content": GOOD}], "response": GOOD},
        {"question": QUESTION, "answer": GOOD},
    ],
)
def test_a_row_of_prompt_and_response_is_a_decision_whatever_else_it_has(
    row: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path / "d.jsonl", [row])
    (decision,) = formats.read(path)
    assert isinstance(decision, ImportedDecision)
    assert (decision.messages, decision.response, decision.ratings, decision.tags) == (ASKED, GOOD, (), ())
    assert decision.agent == row.get("agent", "")


@pytest.mark.parametrize("column", ["thumb", "rating", "label", "feedback"])
@pytest.mark.parametrize(
    "base",
    [{"messages": [*ASKED, {"role": "assistant", "content": BAD}]}, {"prompt": QUESTION, "completion": BAD}],
)
def test_thirty_thumbs_down_are_no_demonstrations(base: dict[str, Any], column: str, tmp_path: Path) -> None:
    path = written(tmp_path / "d.jsonl", [{**base, column: "down"}] * 30)
    found = list(formats.read(path))
    assert len(found) == 30
    for decision in found:
        assert isinstance(decision, ImportedDecision)
        assert decision.tags == ()
        assert [rating.thumb for rating in decision.ratings] == ["down"]


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


def test_a_preference_beside_the_messages_is_a_preference(tmp_path: Path) -> None:
    row = {
        "prompt": QUESTION,
        "prompt_id": "6f1e",
        "chosen": [*ASKED, {"role": "assistant", "content": GOOD}],
        "rejected": [*ASKED, {"role": "assistant", "content": BAD}],
        "messages": [*ASKED, {"role": "assistant", "content": GOOD}],
    }
    (record,) = formats.read(written(tmp_path / "d.jsonl", [row]))
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    assert (record.left.response, record.preference) == (GOOD, "left")


@pytest.mark.parametrize("name", ["ultrafeedback_binarized.jsonl", "ultrafeedback_binarized.parquet"])
def test_ultrafeedback_binarized_is_read_as_published(name: str) -> None:
    found = list(formats.read(HERE / name))
    pairs = [record for record in found if isinstance(record, ImportedComparison)]
    # scores of 5 and 5 are sold as a preference
    assert [(pair.preference, pair.rater_kind) for pair in pairs] == [
        ("left", "simulated"),
        ("tie", "simulated"),
    ]
    scores = [record.ratings[0] for record in found if isinstance(record, ImportedDecision)]
    # 8.5 and 3 on a scale of 1 to 10
    assert [round(rating.score or 0, 6) for rating in scores[:2]] == [round(7.5 / 9, 6), round(2 / 9, 6)]
    assert {rating.rater_kind for rating in scores} == {"simulated"}


def test_the_rows_vote_for_the_format_not_the_first_one(tmp_path: Path) -> None:
    odd = {"entry_id": "x", "prompt": "q"}
    pairs = [{"prompt": f"q{i}", "chosen": "a", "rejected": "b"} for i in range(3)]
    assert formats.detect(written(tmp_path / "x.jsonl", [odd, *pairs])) == "trl"


@pytest.mark.parametrize("label", [1, 0, True, False, 1.0])
def test_labels_of_1_and_0_are_true_and_false(label: Any, tmp_path: Path) -> None:
    for row in (
        {"prompt": "q", "completion": "a", "label": label},
        {"messages": [*ASKED, {"role": "assistant", "content": "a"}], "label": label},
    ):
        found = rated_rows(written(tmp_path / "x.jsonl", [row, {**row, "label": 0}]))
        assert found == ["up" if label else "down", "down"]


def rated_rows(path: Path) -> list[str]:
    return [record.ratings[0].thumb for record in formats.read(path) if isinstance(record, ImportedDecision)]


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


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("table_ratings.csv", [5, 1, None, 4]),
        ("table_ratings.parquet", [5, 1, None]),
        ("table_ratings_excel.csv", [0.25, 1.0]),
        ("table_ratings_variants.tsv", ["up", "down", "down", None]),
    ],
)
def test_the_tables_of_ratings_are_read(name: str, found: list[Any]) -> None:
    assert ratings(HERE / name) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("table_pairs.csv", ["left", "right", "tie", "nobody said which response is better"]),
        ("table_pairs.parquet", ["left", "right"]),
        ("table_pairs_variants.tsv", ["left", "right", "right", "both_bad"]),
    ],
)
def test_the_tables_of_pairs_are_read(name: str, found: list[str]) -> None:
    records = list(formats.read(HERE / name))
    assert [
        r.preference if isinstance(r, ImportedComparison) else r.reason
        for r in records
        if not isinstance(r, RowRefused)
    ] == found  # type: ignore[union-attr]


def test_a_table_keeps_what_its_columns_say() -> None:
    first, second, *_ = formats.read(HERE / "table_ratings_variants.tsv")
    assert isinstance(second, ImportedDecision)
    assert second.messages == [{"role": "user", "content": "Do you ship to Norway?"}]
    at = datetime(2025, 1, 2, 4, tzinfo=UTC)
    assert second.ratings == (ImportedRating(rater="bob", thumb="down", notes="too vague", created_at=at),)
    assert (second.run_id, second.created_at) == ("8", at)
    assert isinstance(first, ImportedDecision)
    assert first.ratings[0].notes == ""
    excel, _ = formats.read(HERE / "table_ratings_excel.csv")
    assert isinstance(excel, ImportedDecision)
    assert excel.ratings == (ImportedRating(score=0.25, correction=GOOD),)
    (*_, quoted) = formats.read(HERE / "table_ratings.csv")
    assert isinstance(quoted, ImportedDecision)
    assert quoted.messages[0]["content"] == 'Say "hi", then stop.\nThanks.'
    assert quoted.line == 5


def test_what_was_decided_for_a_file_is_told() -> None:
    with formats.readings(HERE / "table_ratings.csv") as (file,):
        assert file.notes == ("rating: whole numbers 1 to 5 read as stars, 1 to 5",)


# --- What ratings mean is decided by the file ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "found"),
    [
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
    ],
)
def test_what_ratings_mean_is_decided_from_all_of_them(
    values: list[Any], found: list[Any], tmp_path: Path
) -> None:
    assert rated(tmp_path, values) == found


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([10, 7, 1], "scale unknown: numbers from 1 to 10"),
        ([85, 40], "scale unknown: numbers from 40 to 85"),
        ([4.5, 1, 3], "scale unknown: numbers from 1 to 4.5"),
        ([0, 3, 5], "scale unknown: numbers from 0 to 5"),
        ([-0.5, 0.5], "scale unknown"),
        ([1, 1, 1], "thumb up or one star"),
        (["spam", "ham"], "expected ratings, found ham, spam"),
        (["up", 3], "expected ratings"),
        ([["a"], "up"], "expected ratings"),
        ([10**400, 1], "expected ratings"),
    ],
)
def test_a_scale_nobody_stated_is_refused_with_the_map_that_states_it(
    values: list[Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatRefused, match=reason) as refused:
        rated(tmp_path, values)
    assert "--map" in str(refused.value)


@pytest.mark.parametrize(
    ("values", "map", "found"),
    [
        ([85, 40, 0], "rating=rating:0..100", [0.85, 0.4, 0.0]),
        ([10, 1], "rating=rating:1..10", [1.0, 0.0]),
        ([1, 5], "rating=rating:5..1", [1.0, 0.0]),
        (["spam", "ham", None], "rating=rating:ham/spam", ["down", "up", None]),
        ([2, 1], "rating=rating:1/2", ["down", "up"]),
        ([1, 1], "stars=rating", [1, 1]),
        ([1, 1], "thumb=rating", ["up", "up"]),
        ([0, 1], "score=rating", [0.0, 1.0]),
    ],
)
def test_a_map_states_scale_words_or_kind(
    values: list[Any], map: str, found: list[Any], tmp_path: Path
) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": f"q{i}", "response": "a", "rating": v} for i, v in enumerate(values)],
    )
    got = []
    for record in formats.read(path, columns=ColumnMap.parse(map)):
        assert isinstance(record, ImportedDecision)
        rating = record.ratings[0] if record.ratings else ImportedRating()
        got.append(rating.score if rating.score is not None else rating.stars or rating.thumb or None)
    assert got == found


def test_a_number_outside_the_scale_said_is_a_refused_row(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", [{"prompt": "q", "response": "a", "rating": v} for v in (50, 101)])
    good, bad = formats.read(path, columns=ColumnMap.parse("rating=rating:0..100"))
    assert isinstance(good, ImportedDecision)
    assert isinstance(bad, RowRefused)
    assert "expected a number from 0 to 100, found 101" in bad.reason


def test_two_verdicts_of_different_kinds_are_both_read_and_of_one_kind_refused(tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "response": "a",
        "thumb": "up",
        "stars": 4,
        "score": 0.5,
        "correction": "b",
        "tags": "x, y",
        "comment": "c",
    }
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedDecision)
    assert record.ratings == (
        ImportedRating(thumb="up", stars=4, score=0.5, correction="b", tags=("x", "y"), notes="c"),
    )
    with pytest.raises(FormatRefused, match="vote: looks like"):
        list(formats.read(written(tmp_path / "r.jsonl", [{**row, "vote": "down"}])))


def test_feedback_in_prose_is_a_note(tmp_path: Path) -> None:
    row = {"prompt": "q", "response": "a", "feedback": "Too long and beside the point."}
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedDecision)
    assert record.ratings == (ImportedRating(notes="Too long and beside the point."),)


# --- Which of two -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "value", "found"),
    [
        (("response_a", "response_b"), "A", "left"),
        (("response_a", "response_b"), "response_b", "right"),
        (("response1", "response2"), "2", "right"),
        (("output_1", "output_2"), "output_1", "left"),
        (("left", "right"), "right", "right"),
        (("answer_a", "answer_b"), "model_a", "left"),
        (("Candidate 1", "Candidate 2"), "Candidate 2", "right"),
        (("response_a", "response_b"), "Tie", "tie"),
        (("response_a", "response_b"), "neither", "both_bad"),
    ],
)
def test_words_for_the_preferred_one(
    columns: tuple[str, str], value: str, found: str, tmp_path: Path
) -> None:
    row = {"prompt": "q", columns[0]: "x", columns[1]: "y", "preferred": value}
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedComparison)
    assert record.preference == found


def test_the_name_of_a_model_says_which_was_preferred(tmp_path: Path) -> None:
    row = {
        "prompt": "q",
        "response_a": "x",
        "response_b": "y",
        "model_a": "m1",
        "model_b": "m2",
        "winner": "m2",
        "rater": "ann",
    }
    (record,) = formats.read(written(tmp_path / "r.jsonl", [row]))
    assert isinstance(record, ImportedComparison)
    assert (record.preference, record.rater) == ("right", "ann")
    assert [side.policy for side in (record.left, record.right) if isinstance(side, ImportedDecision)] == [
        "m1",
        "m2",
    ]


@pytest.mark.parametrize("values", [[0, 1], ["0", "1"], [True, False], [1, 0]])
def test_0_and_1_do_not_say_which_was_preferred(values: list[Any], tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": "q", "response_a": "x", "response_b": "y", "winner": v} for v in values],
    )
    with pytest.raises(FormatRefused, match=r"winner: 0 and 1.*preferred=winner:0/1"):
        list(formats.read(path))


def test_a_map_says_what_0_and_1_are(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r.jsonl",
        [{"prompt": "q", "response_a": "x", "response_b": "y", "winner": v} for v in (0, 1, 2)],
    )
    found = list(formats.read(path, columns=ColumnMap.parse("preferred=winner:1/0/2")))
    assert [r.preference for r in found if isinstance(r, ImportedComparison)] == ["right", "left", "tie"]


def test_two_responses_without_a_preference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match="no column that says which was preferred"):
        list(
            formats.read(
                written(tmp_path / "r.jsonl", [{"prompt": "q", "response_a": "x", "response_b": "y"}])
            )
        )


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


# --- CSV as programs write it -------------------------------------------------------------------------------


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_delimiters_newlines_and_byte_order_marks(
    delimiter: str, newline: str, encoding: str, tmp_path: Path
) -> None:
    out = io.StringIO(newline="")
    sheet = csv.writer(out, delimiter=delimiter, lineterminator=newline)
    sheet.writerows(
        [["prompt", "response", "rating"], [f'a{delimiter} "b"{newline}c, d;', "ü", "5"], ["q", "r", "1"]]
    )
    path = text(tmp_path / "t.csv", out.getvalue(), encoding)
    first, second = rows(path)
    assert first == Row(2, {"prompt": f'a{delimiter} "b"{newline}c, d;', "response": "ü", "rating": "5"})
    assert second == Row(4, {"prompt": "q", "response": "r", "rating": "1"})


def test_the_same_table_is_read_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    table = [
        {"prompt": f"q{i}", "response": f"a{i}", "rating": i % 5 + 1, "rater": None if i % 3 else "ann"}
        for i in range(20)
    ]
    (tmp_path / "t.json").write_text(json.dumps(table))
    written(tmp_path / "t.jsonl", table)
    for name, delimiter in (("t.csv", ","), ("t.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            sheet = csv.DictWriter(file, list(table[0]), delimiter=delimiter)
            sheet.writeheader()
            sheet.writerows(table)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "t.parquet")
    found = {
        name: [
            (r.messages, r.response, r.ratings)
            for r in formats.read(tmp_path / name)
            if isinstance(r, ImportedDecision)
        ]
        for name in ("t.json", "t.jsonl", "t.csv", "t.tsv", "t.parquet")
    }
    assert len(found["t.json"]) == 20
    assert all(one == found["t.json"] for one in found.values())


def test_formats_of_texts_alone_are_read_from_csv_too(tmp_path: Path) -> None:
    path = text(tmp_path / "pairs.csv", f'prompt,chosen,rejected\n{QUESTION},"{GOOD}",{BAD}\n')
    assert formats.detect(path) == "trl"
    (record,) = formats.read(path)
    assert isinstance(record, ImportedComparison)
    labels = text(tmp_path / "kto.csv", f"prompt,completion,label\n{QUESTION},x,True\n{QUESTION},y,0\n")
    assert formats.detect(labels) == "trl"
    assert rated_rows(labels) == ["up", "down"]
    turns = json.dumps([*ASKED, {"role": "assistant", "content": GOOD}]).replace('"', '""')
    chats = text(tmp_path / "chats.csv", f'messages\n"{turns}"\n')
    assert formats.detect(chats) == "openai"


def test_cells_that_cannot_be_rows_are_refused_and_the_next_read(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", 'prompt,response\na,b\nc,d,e\nf\n\n"g" h,i\nj,k\n')
    found = list(rows(path))
    assert [row.value for row in found if isinstance(row, Row)] == [
        {"prompt": "a", "response": "b"},
        {"prompt": "j", "response": "k"},
    ]
    assert [(row.line, row.reason[:36]) for row in found if isinstance(row, RowRefused)] == [
        (3, "expected 2 cells as in the header, f"),
        (4, "expected 2 cells as in the header, f"),
        (6, "not CSV: ',' expected after '\"'"),
    ]


def test_a_cell_of_a_spreadsheet_loses_its_apostrophe_and_a_numbers_cell_stays_text(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", "prompt,response,rating\nWhat is 6*7?,42,5\nSum?,'=A1+B1,1\n")
    first, second = formats.read(path)
    assert isinstance(first, ImportedDecision)
    assert isinstance(second, ImportedDecision)
    assert (first.response, type(first.response)) == ("42", str)
    assert second.response == "=A1+B1"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("prompt,response,prompt\na,b,c\n", "prompt more than once"),
        (",".join(f"c{i}" for i in range(2000)) + "\n1\n", "at most 1000 columns, found 2000"),
        ("\n", "empty file"),
        (",,\na,b,c\n", "expected a header"),
        ('prompt,response\nq,"never closed\n', "not CSV"),
    ],
)
def test_a_table_that_cannot_be_read_says_why(content: str, reason: str, tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", content)
    try:
        found = [row.reason for row in rows(path) if isinstance(row, RowRefused)]
    except FormatRefused as error:
        found = [str(error)]
    assert any(reason in one for one in found), found


def test_a_cell_without_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_CELL", 10_000)
    path = text(tmp_path / "t.csv", 'prompt,response\nq,"' + "x\n" * 10_000)
    with pytest.raises(FormatRefused, match="line 2: a cell longer than"):
        list(rows(path))


def test_a_text_file_is_a_table_only_where_its_header_says_so(tmp_path: Path) -> None:
    assert formats.detect(text(tmp_path / "t.txt", "question;answer;stars\nq;a;5\n")) == "table"
    with pytest.raises(FormatRefused, match="expected JSON, or a table whose first line names"):
        formats.detect(text(tmp_path / "u.txt", "Dear all, this is a letter.\nYours\n"))


@pytest.mark.parametrize(
    ("values", "odd"),
    [(["up", "down"] * 10, "maybe not"), ([1, 0] * 10, "oops"), ([5, 1, 3] * 7, "n.b.")],
    ids=["words", "numbers", "stars"],
)
def test_one_odd_word_costs_its_row_and_not_the_table(tmp_path: Path, values: list[Any], odd: str) -> None:
    rows = [{"prompt": f"q{i}", "response": "a", "thumb" if odd != "n.b." else "stars": v}
            for i, v in enumerate([*values, odd])]  # fmt: skip
    found = list(formats.read(written(tmp_path / "r.jsonl", rows)))
    assert kinds(found) == {"ImportedDecision": len(values), "RowSkipped": 1}
    assert isinstance(found[-1], RowSkipped)
    assert found[-1].line == len(rows)
    assert f"line {len(rows)}: " in found[-1].reason
    assert odd in found[-1].reason


def test_a_column_with_many_odd_words_is_still_refused(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"q{i}", "response": "a", "thumb": v}
        for i, v in enumerate(["up", "down", "so", "so la la"])
    ]
    with pytest.raises(FormatRefused, match="thumb"):
        list(formats.read(written(tmp_path / "r.jsonl", rows)))


def test_a_log_of_choices_lists_the_arms_that_stand_in_it(tmp_path: Path) -> None:
    """The columns of Open Bandit: the item shown, with which probability, and whether it was clicked."""
    lines = ["timestamp,item_id,position,click,propensity_score"]
    lines += [
        f"2019-11-24 00:0{n}:00+00:00,{item},3,{n % 2},0.25" for n, item in enumerate((14, 9, 2, 14, 9))
    ]
    path = text(tmp_path / "men.csv", "\n".join(lines) + "\n")
    columns = ColumnMap.parse("prompt=position,response=item_id,propensity=propensity_score,reward=click")
    found = list(formats.read(path, columns=columns))
    assert [(one.response, one.candidates, one.propensity) for one in found] == [
        (arm, ["2", "9", "14"], 0.25) for arm in ("14", "9", "2", "14", "9")
    ]
    # without a propensity nothing says that the rows are choices
    plain = list(
        formats.read(
            path, columns=ColumnMap.parse("prompt=position,response=item_id,ignore=propensity_score")
        )
    )
    assert {one.candidates for one in plain} == {None}


@pytest.mark.slow
def test_an_odd_value_in_a_table_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    base = {
        "prompt": ASKED,
        "response": GOOD,
        "rating": 5,
        "rater": "ann",
        "created_at": 5,
        "tags": ["a"],
        "id": "x",
        "propensity": 0.5,
        "candidates": [GOOD, BAD],
        "state": {"a": 1},
    }
    pair = {"prompt": QUESTION, "response_a": GOOD, "response_b": BAD, "preferred": "a", "notes": "n"}
    for row in (base, pair):
        for place in places(row):
            for odd in ODD:
                mutant = put(row, place, odd)
                path = written(tmp_path / "odd.jsonl", [mutant, row])
                try:
                    found = list(formats.read(path, "table"))
                except FormatRefused:
                    continue
                assert len(found) == 2
                assert not isinstance(found[1], RowRefused), (mutant, found)


def test_nearly_nothing_but_refused_rows_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_REFUSED", 100)
    path = text(tmp_path / "t.jsonl", '{"prompt": "q", "chosen": "a", "rejected": "b"}\n' + "oops\n" * 5000)
    with pytest.raises(FormatRefused, match="given up after 101 refused rows of 102"):
        list(formats.read(path))


# --- Before it is imported ----------------------------------------------------------------------------------


def test_a_preview_says_what_each_column_is_taken_for() -> None:
    (seen,) = formats.preview(HERE / "table_ratings_variants.tsv", demonstration_rows=2)
    assert (seen.format, seen.problem) == ("table", "")
    assert {column.name: column.field for column in seen.columns} == {
        "id": "id", "Question": "prompt", "Answer": "response", "Thumb": "thumb", "User": "rater", "Comment": "notes",
        "Created At": "created_at",
    }  # fmt: skip
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
        "messages": ("one", "two", "three"), "response": ("", "b", "d"), "correction": ("", "c", ""),
    }  # fmt: skip


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


def test_a_row_of_a_prompt_alone_is_skipped(tmp_path: Path) -> None:
    found = list(
        formats.read(
            written(
                tmp_path / "r.jsonl", [{"prompt": "q", "response": "a"}, {"prompt": "q", "response": None}]
            )
        )
    )
    assert isinstance(found[1], RowSkipped)


# --- As people have them ------------------------------------------------------------------------------------


def test_names_of_a_scale_a_person_and_a_question(tmp_path: Path) -> None:
    path = text(tmp_path / "t.csv", "Prompt,Response,User Rating (1-10)\nq,a,10\nr,b,5.5\n")
    assert ratings(path) == [1.0, 0.5]
    with formats.readings(path) as (file,):
        assert file.notes == ("User Rating (1-10): read as scores on the scale 1 to 10, as said",)
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
