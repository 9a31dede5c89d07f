"""Outside formats: recognised by their rows; what is odd is refused with its line and reason."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from feedback.transfer import formats
from feedback.transfer.formats.files import CHUNK, Row, rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedDecision,
    RowRefused,
    RowSkipped,
    time_of,
)
from tests.support.formats import (
    HERE,
    ODD,
    places,
    put,
    written,
)
from tests.test_formats_tools import FILES

# --- Recognising ------------------------------------------------------------------------------------------

EXAMPLES = {
    "argilla_to_list_flatten.json": "argilla",
    "argilla_to_list_nested.json": "argilla",
    "feedback_collector.jsonl": "feedback_collector",
    "hh_rlhf.jsonl": "hh",
    "label_studio_chat.json": "label_studio",
    "label_studio_json_min.json": "label_studio",
    "label_studio_pairwise.json": "label_studio",
    "label_studio_rating.json": "label_studio",
    "langfuse_scores.json": "langfuse",
    "librechat_messages.json": "librechat",
    "llamafactory_alpaca_ranking.json": "llamafactory",
    "llamafactory_openai_kto.json": "llamafactory",
    "llamafactory_sharegpt_kto.json": "llamafactory",
    "llamafactory_sharegpt_ranking.json": "llamafactory",
    "oasst_tree.jsonl": "oasst",
    "open_webui_feedback_export.json": "open_webui",
    "openai_dpo.jsonl": "openai",
    "openai_sft.jsonl": "openai",
    "pandalm.json": "pandalm",
    "ratchet.jsonl": "ratchet",
    "simulation_entries.json": "simulation",
    "simulation_ratings.json": "simulation",
    "tensorzero_boolean_feedback.jsonl": "tensorzero",
    "tensorzero_chat_inference.jsonl": "tensorzero",
    "tensorzero_demonstration.jsonl": "tensorzero",
    "trl_preference_conversational_explicit.jsonl": "trl",
    "trl_preference_conversational_implicit.jsonl": "trl",
    "trl_preference_standard_explicit.jsonl": "trl",
    "trl_preference_standard_implicit.jsonl": "trl",
    "trl_preference_tools.jsonl": "trl",
    "trl_prompt_completion.jsonl": "trl",
    "trl_prompt_only.jsonl": "trl",
    "trl_unpaired_conversational.jsonl": "trl",
    "trl_unpaired_standard.jsonl": "trl",
    "vw_dsjson.jsonl": "vw",
    "vw_dsjson_noid.jsonl": "vw",
    "vw_ccb.jsonl": "vw",
    "vw_cb_plain.json": "vw",
    "table_pairs.csv": "table",
    "table_pairs.parquet": "table",
    "table_pairs_variants.tsv": "table",
    "table_ratings.csv": "table",
    "table_ratings.parquet": "table",
    "table_ratings_excel.csv": "table",
    "table_ratings_variants.tsv": "table",
    "ultrafeedback_binarized.jsonl": "scored_pairs",
    "ultrafeedback_binarized.parquet": "scored_pairs",
    "llamafactory_v1_dpo.jsonl": "llamafactory_v1",
    "llamafactory_v1_sft.jsonl": "llamafactory_v1",
}


@pytest.mark.parametrize(("name", "format"), EXAMPLES.items())
def test_an_example_is_recognised(name: str, format: str) -> None:
    assert formats.detect(HERE / name) == format


def test_there_is_an_example_of_every_format_and_a_format_for_every_example() -> None:
    # those of other tools' exports are in a folder of their own: tests/test_formats_tools.py
    assert set(EXAMPLES.values()) | {expected.format for expected in FILES.values()} == set(formats.FORMATS)
    described = {path.name for path in HERE.iterdir() if path.is_file()} - {"llamafactory_dataset_info.json"}
    assert described == set(EXAMPLES)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("llamafactory_alpaca_ranking.json", "llamafactory"),
        ("llamafactory_openai_kto.json", "llamafactory"),
        ("llamafactory_sharegpt_kto.json", "llamafactory"),
        ("llamafactory_sharegpt_ranking.json", "llamafactory"),
    ],
)
def test_llamafactory_rows_are_recognised_without_a_dataset_info(
    name: str, format: str, tmp_path: Path
) -> None:
    (tmp_path / "renamed.json").write_bytes((HERE / name).read_bytes())
    assert formats.detect(tmp_path / "renamed.json") == format
    before, after = (
        [r for r in formats.read(path, format) if not isinstance(r, RowSkipped)]
        for path in (HERE / name, tmp_path / "renamed.json")
    )
    assert before == after


def test_rows_nobody_knows_are_refused_with_their_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"colour": "red", "size": 3}])
    with pytest.raises(FormatRefused, match="found rows with colour, size") as refused:
        formats.detect(path)
    assert "--format" in str(refused.value)


def test_an_unknown_format_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(FormatRefused, match=r"no format 'csv'; there are auto, ratchet"):
        formats.read(tmp_path / "x", "csv")


def test_a_ratings_file_beside_a_format_of_one_file_is_refused() -> None:
    with pytest.raises(FormatRefused, match="simulation"):
        formats.read(HERE / "hh_rlhf.jsonl", "auto", HERE / "simulation_ratings.json")


# --- Files ------------------------------------------------------------------------------------------------


def test_rows_know_the_line_they_start_on(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('[\n {"a": 1},\n\n {"a":\n   2}, {"a": 3}\n]\n')
    assert list(rows(path)) == [Row(2, {"a": 1}), Row(4, {"a": 2}), Row(5, {"a": 3})]


def test_lines_that_are_blank_are_no_rows_but_count(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"a": 1}\n\n  \n{"a": 2}')
    assert list(rows(path)) == [Row(2, {"a": 1}), Row(5, {"a": 2})]


def test_a_line_that_is_no_json_is_refused_and_the_next_one_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 1,}\n{"a": NaN}\n{"a": 2}\n')
    found = list(rows(path))
    assert found[0] == Row(1, {"a": 1})
    assert found[3] == Row(4, {"a": 2})
    assert isinstance(found[1], RowRefused)
    assert found[1].broken
    assert found[1].line == 2
    assert "column" in found[1].reason
    assert isinstance(found[2], RowRefused)
    assert "NaN is not JSON" in found[2].reason


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('[{"a": 1},\n {"a": }]', "line 2 column 8"),
        ('[{"a": 1}\n {"a": 2}]', "line 2 column 2"),
        ('[{"a": 1},\n', "line 2 column 1"),
        ('[{"a": 1}', "line 1 column 10"),
        ('[{"a": "cut off', "line 1 column 8"),
        ('[{"a": 1},]', "line 1 column 11"),
        ("[1] trailing", "line 1 column 5"),
        ('{\n "a": 1,\n "b": oops\n}', "line 3 column 7"),
    ],
)
def test_a_fault_in_an_array_or_document_names_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FormatRefused, match=rf"x\.json {where}: not JSON"):
        list(rows(path))


def test_a_long_array_is_read_piece_by_piece(tmp_path: Path) -> None:
    # rows of some 10 kB over several chunks, with texts, escapes and numbers across their edges
    items = [
        {"n": i, "text": 'ü"\\\n' * 2500, "x": [1.5, -2e10, True, None]} for i in range(3 * CHUNK // 10_000)
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(items), "utf-8")
    assert path.stat().st_size > 3 * CHUNK
    assert [row.value for row in rows(path) if isinstance(row, Row)] == items


def test_one_row_longer_than_a_chunk_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"a": "x" * (2 * CHUNK)}, {"a": 1}]))
    first, second = rows(path)
    assert isinstance(first, Row)
    assert len(first.value["a"]) == 2 * CHUNK
    assert second == Row(1, {"a": 1})


def test_gzip_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": 1}\n'), ("b.json", '[{"a": 1}]'), ("c.json", '{\n"a": 1}')):
        for start in ("", "\ufeff"):
            (tmp_path / name).write_text(start + text, "utf-8")
            assert [row.value for row in rows(tmp_path / name) if isinstance(row, Row)] == [{"a": 1}]
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress((start + text).encode()))
            assert [row.value for row in rows(tmp_path / f"{name}.gz") if isinstance(row, Row)] == [{"a": 1}]


def test_a_damaged_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": "' + bytes(range(32, 33)) * 5000 + b'"}\n')
    (tmp_path / "x.jsonl.gz").write_bytes(whole[:-12])
    with pytest.raises(FormatRefused, match="damaged or cut short"):
        list(rows(tmp_path / "x.jsonl.gz"))


@pytest.mark.parametrize("content", [b"", b"  \n\n "])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(FormatRefused, match="empty file"):
        list(rows(tmp_path / "x.json"))


def test_bytes_that_are_no_utf8_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"a": "caf\xe9"}]')
    with pytest.raises(FormatRefused, match=r"UTF-8 text, found the byte 0xe9"):
        list(rows(tmp_path / "x.json"))
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\n')
    (_, refused) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)
    assert (refused.line, "byte 11 is 0xe9" in refused.reason) == (2, True)


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(FormatRefused, match="cannot be read"):
            list(rows(path))


def test_a_row_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (refused,) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)


@pytest.mark.parametrize(
    ("value", "time"),
    [
        ("2025-01-02T03:04:05Z", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02T03:04:05.0000000Z", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02T05:04:05+02:00", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2025-01-02 03:04:05", datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (1735787045, datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (1735787045000, datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)),
        (None, None),
    ],
)
def test_times_are_read_in_all_their_spellings(value: Any, time: datetime | None) -> None:
    assert time_of(value, "at") == time


# --- Odd values, everywhere -------------------------------------------------------------------------------


BY_THE_FILE = [name for name, format in EXAMPLES.items() if format == "table"]
"""Examples of which one odd value may decide how the whole file is read; test_tables.py puts them in one by one."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in EXAMPLES if name not in ("simulation_ratings.json", *BY_THE_FILE)]
)
def test_no_odd_value_in_any_place_gets_past_as_a_crash(name: str, tmp_path: Path) -> None:
    items = [row.value for row in rows(HERE / name) if isinstance(row, Row)]
    mutants = [put(item, place, odd) for item in items for place in places(item) for odd in ODD]
    lines = 0
    for record in formats.read(written(tmp_path / "odd.jsonl", mutants), EXAMPLES[name]):
        lines = max(lines, record.line)
        assert not isinstance(record, RowRefused) or record.reason
        if isinstance(record, ImportedDecision):
            assert record.messages or record.metadata
            assert isinstance(record.response, (str, list))
    assert lines > len(mutants) * 0.9, "reading went on to the end"
