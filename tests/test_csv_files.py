"""CSV as programs write it: delimiters, encodings, odd cells, and what is refused."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap, files, tables
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Row,
    RowRefused,
    RowSkipped,
)
from tests.support.figures import figures_of
from tests.support.formats import ASKED, BAD, GOOD, ODD, QUESTION, places, put, written
from tests.support.table_files import kinds, rated_rows, text


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
    refused = [row for row in found if isinstance(row, RowRefused)]
    assert [row.line for row in refused] == [3, 4, 6]
    assert [figures_of(row.reason) for row in refused[:2]] == [[2, 3], [2, 1]]


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
    rows = [
        {"prompt": f"q{i}", "response": "a", "thumb" if odd != "n.b." else "stars": v}
        for i, v in enumerate([*values, odd])
    ]
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
