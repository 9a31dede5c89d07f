"""Compressed files and archives: read as what they hold, within bounds; what is no feedback is refused by name."""

import csv
import gzip
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from backports import zstd

from feedback.transfer import formats
from feedback.transfer.formats import ColumnMap, compression, files, readers, tables
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
from tests.support.formats import ASKED, BAD, GOOD, HERE, ODD, QUESTION, places, put, written
from tests.support.table_files import kinds, rated_rows, text

LINES = b'{"prompt": "q", "response": "a", "rating": 5}\n{"prompt": "r", "response": "b", "rating": 1}\n'
TABLE = b"prompt,response,rating\nq,a,5\nr,b,1\n"


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def stars(path: Path) -> list[int | None]:
    return [r.ratings[0].stars for r in formats.read(path) if isinstance(r, ImportedDecision) and r.ratings]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.jsonl", LINES),
        ("t.csv", TABLE),
        ("t.tsv", TABLE.replace(b",", b"\t")),
        ("t.json", b"[" + LINES.strip().replace(b"\n", b",\n") + b"]"),
        ("table_ratings.parquet", None),
    ],
)
@pytest.mark.parametrize("ending", ["", ".packed"])
def test_compressed_is_read(pack: Any, name: str, content: bytes | None, ending: str, tmp_path: Path) -> None:
    path = tmp_path / (name + (ending or (".gz" if pack is gzip.compress else ".zst")))
    path.write_bytes(pack((HERE / name).read_bytes() if content is None else content))
    assert stars(path) == [5, 1]


def test_a_damaged_file_and_a_bomb_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.jsonl.zst").write_bytes(zstd.compress(LINES * 1000)[:-20])
    with pytest.raises(FormatRefused, match="damaged or cut short"):
        list(rows(tmp_path / "x.jsonl.zst"))
    monkeypatch.setattr(compression, "FREE", 1 << 20)
    for pack in (gzip.compress, zstd.compress):
        path = tmp_path / "bomb.jsonl"
        path.write_bytes(pack(b"\n" * (8 << 20)))
        with pytest.raises(FormatRefused, match="unpacks to more than"):
            list(rows(path))
    with pytest.raises(FormatRefused, match="unpacks to more than"):
        formats.detect(zipped(tmp_path / "bomb.zip", {f"{n}.jsonl": b" " * (1 << 20) for n in range(4)}))


def test_an_archive_of_one_file_is_that_file(tmp_path: Path) -> None:
    path = zipped(
        tmp_path / "x.zip",
        {"__MACOSX/._t.csv": b"\0\5\26", ".DS_Store": b"x", "t.csv": TABLE, "README.md": b"Read me"},
    )
    assert formats.detect(path) == "table"
    assert stars(path) == [5, 1]
    with formats.readings(path) as (file,):
        assert file.name == f"{path}/t.csv"
        assert "README.md" in file.notes[-1]


def test_every_file_of_an_archive_is_a_file(tmp_path: Path) -> None:
    path = zipped(
        tmp_path / "x.zip",
        {
            "b/t.jsonl.gz": gzip.compress(LINES),
            "a.csv": TABLE,
            "pairs.parquet": (HERE / "table_pairs.parquet").read_bytes(),
        },
    )
    with formats.readings(path) as found:
        expected = [("a.csv", "table"), ("b/t.jsonl.gz", "table"), ("pairs.parquet", "table")]
        assert [(file.name.removeprefix(f"{path}/"), file.format.name) for file in found] == expected
        folder = found[0].path.parent
        assert folder.exists()
    assert not folder.exists()
    records = list(formats.read(path))
    assert [type(record) for record in records] == [ImportedDecision] * 4 + [ImportedComparison] * 2


def test_two_files_that_belong_together_are_read_as_a_pair(tmp_path: Path) -> None:
    members = {
        name: (HERE / name).read_bytes() for name in ("simulation_ratings.json", "simulation_entries.json")
    }
    path = zipped(tmp_path / "x.zip", members)
    apart = list(
        formats.read(HERE / "simulation_entries.json", ratings_path=HERE / "simulation_ratings.json")
    )
    assert list(formats.read(path)) == apart
    with formats.readings(path) as (file,):
        assert file.ratings_path is not None


def test_feedback_is_read_after_what_it_speaks_of(tmp_path: Path) -> None:
    names = (
        "tensorzero_boolean_feedback.jsonl",
        "tensorzero_chat_inference.jsonl",
        "tensorzero_demonstration.jsonl",
    )
    path = zipped(tmp_path / "x.zip", {name: (HERE / name).read_bytes() for name in names})
    with formats.readings(path) as found:
        assert [Path(file.name).name for file in found] == [names[1], names[0], names[2]]


def test_a_description_beside_a_file_is_found_in_the_archive(tmp_path: Path) -> None:
    info = {"x": {"file_name": "t.json", "columns": {"prompt": "frage", "response": "antwort"}}}
    path = zipped(
        tmp_path / "x.zip",
        {"d/dataset_info.json": json.dumps(info).encode(), "d/t.json": b'[{"frage": "q", "antwort": "a"}]'},
    )
    (record,) = formats.read(path)
    assert isinstance(record, ImportedDecision)
    assert record.response == "a"


def test_a_fault_in_a_member_names_the_member_not_its_temporary_place(tmp_path: Path) -> None:
    path = zipped(tmp_path / "x.zip", {"t.json": b'[{"prompt": "q", "response": "a"}, oops]'})
    with pytest.raises(FormatRefused) as refused:
        list(formats.read(path))
    assert str(refused.value).startswith(f"{path}/t.json line 1")
    assert "ratchet-import-" not in str(refused.value)


OUT, WITHIN, PICKLE = "leads out", "an archive within", "a pickle"
NOT_FEEDBACK = {
    **dict.fromkeys(("../t.csv", "/etc/t.csv", "C:\\t.csv", "a/../../t.csv"), OUT),
    **dict.fromkeys(("inner.zip", "inner.tar.gz"), WITHIN),
    **dict.fromkeys(("policy.pkl", "archive/data.pkl", "model.bin"), PICKLE),
    "letter.txt": "found letter.txt",
    "[Content_Types].xml": "as CSV",
    "x" * 300 + ".csv": "cannot be unpacked",
}


def test_what_no_archive_of_feedback_holds_is_refused_by_name(tmp_path: Path) -> None:
    for name, reason in NOT_FEEDBACK.items():
        with pytest.raises(FormatRefused, match=reason):
            list(formats.read(zipped(tmp_path / "x.zip", {name: TABLE})))


def test_links_encryption_doubles_and_crowds_are_refused(tmp_path: Path) -> None:
    link = zipfile.ZipInfo("t.csv")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tmp_path / "link.zip", "w") as archive:
        archive.writestr(link, "/etc/passwd")
    with pytest.raises(FormatRefused, match=r"t\.csv is a link"):
        formats.detect(tmp_path / "link.zip")
    zipped(tmp_path / "two.zip", {"T.csv": TABLE, "t.csv": TABLE})
    with pytest.raises(FormatRefused, match="two files of the archive have the same name"):
        formats.detect(tmp_path / "two.zip")
    zipped(tmp_path / "many.zip", {f"{n}.csv": b"x" for n in range(1001)})
    with pytest.raises(FormatRefused, match="at most 1000 files"):
        formats.detect(tmp_path / "many.zip")
    whole = bytearray(zipped(tmp_path / "lock.zip", {"t.csv": TABLE}).read_bytes())
    at = whole.index(b"PK\x01\x02")
    whole[at + 8] |= 1
    (tmp_path / "lock.zip").write_bytes(whole)
    with pytest.raises(FormatRefused, match=r"t\.csv is encrypted"):
        formats.detect(tmp_path / "lock.zip")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = zipped(tmp_path / "x.zip", {"t.csv": TABLE * 100}).read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:40] + b"\0" * 20 + whole[60:]):
        (tmp_path / "x.zip").write_bytes(cut)
        with pytest.raises(FormatRefused, match="damaged"):
            formats.detect(tmp_path / "x.zip")


def test_files_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    pickled = pickle.dumps({"prompt": "q"})
    others = {
        **dict.fromkeys(("x.pkl", "x.json", "x.bin"), (pickled, PICKLE)),
        "x.pt": (b"anything", PICKLE),
        "x.jsonl.gz": (gzip.compress(pickled, mtime=0), PICKLE),
        "x.safetensors": (b"\0", "weights"),
        "x.arrow": (b"ARROW1\0\0", "Parquet"),
        "x.db": (b"SQLite format 3\0", "SQLite"),
        "x.csv.bz2": (b"BZh91AY&SY", "bzip2"),
        "x.csv.gz": (gzip.compress(gzip.compress(TABLE, mtime=0), mtime=0), WITHIN),
    }
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("t.csv")
        info.size = len(TABLE)
        archive.addfile(info, io.BytesIO(TABLE))
    others["x.tar.gz"] = ((tmp_path / "x.tar.gz").read_bytes(), WITHIN)
    for name, (content, reason) in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FormatRefused, match=reason):
            formats.detect(tmp_path / name)


def test_parquet_without_pyarrow_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(FormatRefused, match=r"needs pyarrow, which is not installed: pip install pyarrow"):
        list(rows(HERE / "table_ratings.parquet"))


def test_parquet_of_images_times_and_gaps(tmp_path: Path) -> None:
    from datetime import UTC, datetime

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist(
        [
            {
                "prompt": "q",
                "response": "a",
                "at": datetime(2025, 1, 2, tzinfo=UTC),
                "x": float("nan"),
                "image": None,
            },
            {
                "prompt": "q",
                "response": "b",
                "at": None,
                "x": 1.5,
                "image": {"bytes": b"\x89PNG", "path": "a.png"},
            },
        ]
    )
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    first, second = rows(tmp_path / "t.parquet")
    assert first == Row(
        1, {"prompt": "q", "response": "a", "at": "2025-01-02T00:00:00+00:00", "x": None, "image": None}
    )
    assert isinstance(second, RowRefused)
    assert second.reason.startswith("image: ")
    (tmp_path / "t.parquet").write_bytes((tmp_path / "t.parquet").read_bytes()[:-30])
    with pytest.raises(FormatRefused, match="the Parquet file cannot be read"):
        list(rows(tmp_path / "t.parquet"))


def test_a_row_without_end_is_given_up_when_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_ROW", 1 << 16)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "' + b"x" * (1 << 20)))
    with pytest.raises(FormatRefused, match="longer than"):
        list(rows(tmp_path / "x.jsonl.gz"))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_delimiters_and_newlines(delimiter: str, newline: str, encoding: str, tmp_path: Path) -> None:
    out = io.StringIO(newline="")
    sheet = csv.writer(out, delimiter=delimiter, lineterminator=newline)
    sheet.writerows(
        [["prompt", "response", "rating"], [f'a{delimiter} "b"{newline}c, d;', "ü", "5"], ["q", "r", "1"]]
    )
    first, second = rows(text(tmp_path / "t.csv", out.getvalue(), encoding))
    assert first == Row(2, {"prompt": f'a{delimiter} "b"{newline}c, d;', "response": "ü", "rating": "5"})
    assert second == Row(4, {"prompt": "q", "response": "r", "rating": "1"})


def test_formats_of_texts_alone_are_read_from_csv_too(tmp_path: Path) -> None:
    path = text(tmp_path / "pairs.csv", f'prompt,chosen,rejected\n{QUESTION},"{GOOD}",{BAD}\n')
    assert formats.detect(path) == "trl"
    (record,) = formats.read(path)
    assert isinstance(record, ImportedComparison)
    labels = text(tmp_path / "kto.csv", f"prompt,completion,label\n{QUESTION},x,True\n{QUESTION},y,0\n")
    assert formats.detect(labels) == "trl"
    assert rated_rows(labels) == ["up", "down"]
    turns = json.dumps([*ASKED, {"role": "assistant", "content": GOOD}]).replace('"', '""')
    assert formats.detect(text(tmp_path / "chats.csv", f'messages\n"{turns}"\n')) == "openai"


def test_cells_that_cannot_be_rows_are_refused_and_the_next_read(tmp_path: Path) -> None:
    found = list(rows(text(tmp_path / "t.csv", 'prompt,response\na,b\nc,d,e\nf\n\n"g" h,i\nj,k\n')))
    expected = [{"prompt": "a", "response": "b"}, {"prompt": "j", "response": "k"}]
    assert [row.value for row in found if isinstance(row, Row)] == expected
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
    base = {"prompt": ASKED, "response": GOOD, "rating": 5, "rater": "ann", "created_at": 5, "tags": ["a"]}
    base |= {"id": "x", "propensity": 0.5, "candidates": [GOOD, BAD], "state": {"a": 1}}
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
    """Rows that are JSON and no feedback; lines that are no JSON are tried in test_limits."""
    monkeypatch.setattr(readers, "MAX_REFUSED", 100)
    pair = {"prompt": "q", "chosen": "a", "rejected": "b"}
    path = written(tmp_path / "t.jsonl", [pair, *[{**pair, "chosen": 3}] * 5000])
    with pytest.raises(FormatRefused, match=r"given up after 101 refused rows of 102.*Is it a file of TRL"):
        list(formats.read(path))
