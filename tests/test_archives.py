"""Compressed files and archives: read as what they hold, within bounds; what is no feedback is refused by name."""

from __future__ import annotations

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
from feedback.transfer.formats import compression, files
from feedback.transfer.formats.files import rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    Row,
    RowRefused,
)
from tests.support.formats import HERE

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
def test_gzip_and_zstandard_are_read_whatever_the_file_is_called(
    pack: Any, name: str, content: bytes | None, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / (name + (ending or (".gz" if pack is gzip.compress else ".zst")))
    path.write_bytes(pack((HERE / name).read_bytes() if content is None else content))
    assert stars(path) == [5, 1]


def test_a_damaged_zstandard_file_is_refused(tmp_path: Path) -> None:
    whole = zstd.compress(LINES * 1000)
    (tmp_path / "x.jsonl.zst").write_bytes(whole[:-20])
    with pytest.raises(FormatRefused, match="damaged or cut short"):
        list(rows(tmp_path / "x.jsonl.zst"))


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_bomb_is_given_up(pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "FREE", 1 << 20)
    path = tmp_path / "bomb.jsonl"
    path.write_bytes(pack(b"\n" * (8 << 20)))
    with pytest.raises(FormatRefused, match="unpacks to more than"):
        list(rows(path))


def test_4_million_bad_lines_are_given_up_early(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "q", "completion": "a"}\n' + b"oops\n" * 4_000_000, 1))
    with pytest.raises(FormatRefused, match="given up after 10,001 refused rows of 10,002"):
        list(formats.read(path, "trl"))


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
        assert [(file.name.removeprefix(f"{path}/"), file.format.name) for file in found] == [
            ("a.csv", "table"),
            ("b/t.jsonl.gz", "table"),
            ("pairs.parquet", "table"),
        ]
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("../t.csv", "leads out of the archive"),
        ("/etc/t.csv", "leads out of the archive"),
        ("C:\\t.csv", "leads out of the archive"),
        ("a/../../t.csv", "leads out of the archive"),
        ("inner.zip", "an archive within an archive"),
        ("inner.tar.gz", "an archive within an archive"),
        ("policy.pkl", "a pickle is never read"),
        ("archive/data.pkl", "a pickle is never read"),
        ("model.bin", "a pickle is never read"),
        ("letter.txt", r"expected a file that ends in .json, .*found letter.txt"),
        ("[Content_Types].xml", "save the sheet as CSV"),
        ("x" * 300 + ".csv", "cannot be unpacked"),
    ],
)
def test_what_no_archive_of_feedback_holds_is_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
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


def test_a_zip_bomb_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(compression, "FREE", 1 << 20)
    path = zipped(tmp_path / "bomb.zip", {f"{n}.jsonl": b" " * (1 << 20) for n in range(4)})
    with pytest.raises(FormatRefused, match="unpacks to more than"):
        formats.detect(path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = zipped(tmp_path / "x.zip", {"t.csv": TABLE * 100}).read_bytes()
    for cut in (whole[: len(whole) // 2], whole[:40] + b"\0" * 20 + whole[60:]):
        (tmp_path / "x.zip").write_bytes(cut)
        with pytest.raises(FormatRefused, match="damaged"):
            formats.detect(tmp_path / "x.zip")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.pkl", pickle.dumps({"prompt": "q"}), "a pickle is never read"),
        ("x.pt", b"anything", "a pickle is never read"),
        ("x.json", pickle.dumps({"prompt": "q"}), "a pickle is never read"),
        ("x.bin", pickle.dumps([1]), "a pickle is never read"),
        ("x.jsonl.gz", gzip.compress(pickle.dumps([1]), mtime=0), "a pickle is never read"),
        ("x.safetensors", b"\0", "weights, not feedback"),
        ("x.arrow", b"ARROW1\0\0", "save it as Parquet"),
        ("x.db", b"SQLite format 3\0", "a SQLite database is not read"),
        ("x.csv.bz2", b"BZh91AY&SY", "bzip2 is not read"),
        (
            "x.csv.gz",
            gzip.compress(gzip.compress(TABLE, mtime=0), mtime=0),
            "an archive within a compressed file",
        ),
    ],
)
def test_files_of_other_kinds_are_refused_by_name(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatRefused, match=reason):
        formats.detect(tmp_path / name)


def test_a_tar_is_refused_by_name(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        info = tarfile.TarInfo("t.csv")
        info.size = len(TABLE)
        archive.addfile(info, io.BytesIO(TABLE))
    with pytest.raises(FormatRefused, match="an archive within a compressed file"):
        formats.detect(tmp_path / "x.tar.gz")


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
