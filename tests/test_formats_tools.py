"""Exports of other tools and published data sets: each recognised by itself, its counts exact, nothing twice."""

import gzip
import json
import math
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jmespath
import pytest

from feedback.models import Comparison, Decision, ImportBatch, Outcome, Rating
from feedback.transfer import formats
from feedback.transfer.formats.declared import at
from feedback.transfer.formats.files import CHUNK, Row, rows
from feedback.transfer.formats.records import (
    FormatRefused,
    ImportedComparison,
    ImportedDecision,
    RowRefused,
    RowSkipped,
    time_of,
)
from feedback.transfer.import_undo import import_undo
from tests.support.formats import (
    BY_ROW,
    FORMAT_OF,
    HERE,
    STATED,
    SUPPORT,
    case_file,
    file_told,
    odd_rows,
    outside,
    written,
)
from tests.support.imports import file_import

TOOLS = HERE / "tools"


FILES: dict[str, dict[str, Any]] = {
    Path(case["file"]).name: case["import"] for case in STATED if "import" in case
}
"""Export -> counts of its import, worked out by hand; the file imported before it, or its second file."""


STORED = ("decisions", "ratings", "comparisons", "corrections", "outcomes")
COUNTS = (*STORED, "already_here", "skipped", "refused_count")


def everything() -> tuple[int, ...]:
    return tuple(model.objects.count() for model in (Decision, Rating, Comparison, Outcome))


def imported(name: str, **how: Any) -> Any:
    """The report of an example's import, after the file it needs."""
    expected = FILES.get(Path(name).name, {})
    if "after" in expected:
        file_import(TOOLS / expected["after"], skip_bad=True)
    beside = TOOLS / expected["beside"] if "beside" in expected else None
    return file_import(HERE / name, ratings_path=beside, skip_bad=True, **how)


@pytest.mark.django_db
@pytest.mark.parametrize("name", [*FORMAT_OF])
def test_an_export_brings_what_is_in_it_only_once_and_is_taken_back_whole(name: str) -> None:
    report = imported(name)
    expected = FILES.get(Path(name).name)
    if expected is not None:
        assert {count: getattr(report, count) for count in COUNTS} == {
            count: expected.get(count, 0) for count in COUNTS
        }
    before = everything()
    assert sum(before) > 0 or report.refused_count or name == "trl_prompt_only.jsonl"
    again = imported(name)
    assert everything() == before
    assert {getattr(again, count) for count in STORED} == {0}
    assert again.refused == report.refused
    for batch in ImportBatch.objects.order_by("-pk"):
        import_undo(batch.pk, actor="test")
    assert everything() == (0, 0, 0, 0)


@pytest.mark.parametrize("name", [name for name in FILES if f"tools/{name}" in FORMAT_OF])
def test_the_order_of_keys_and_unknown_keys_change_nothing(name: str, tmp_path: Path) -> None:
    def shuffled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in reversed(value)}
        return [shuffled(item) for item in value] if isinstance(value, list) else value

    items = [row.value for row in rows(TOOLS / name) if isinstance(row, Row)]
    odd = [{"a_new_column": {"of": "a later version"}, **shuffled(item)} for item in items]
    path = written(tmp_path / "odd.jsonl", odd)
    assert formats.detect(path) == FORMAT_OF[f"tools/{name}"]
    beside = TOOLS / FILES[name]["beside"] if "beside" in FILES[name] else None

    def said(path: Path) -> list[str]:
        found = formats.read(path, FORMAT_OF[f"tools/{name}"], beside)
        responses = (json.dumps(getattr(record, "response", None), sort_keys=True) for record in found)
        return sorted(responses)

    assert said(path) == said(TOOLS / name)


@pytest.mark.django_db
@pytest.mark.parametrize("name", BY_ROW)
def test_odd_values_are_refused_row_by_row_and_the_rest_comes_in(name: str, tmp_path: Path) -> None:
    after = FILES.get(Path(name).name, {}).get("after")
    if after:
        file_import(TOOLS / after, skip_bad=True)
    before = everything()
    path = written(tmp_path / "odd.jsonl", odd_rows(name, 100, 3))
    report = file_import(path, format=FORMAT_OF[name], skip_bad=True)
    assert report.refused or name.startswith("tools/")
    new = tuple(after - earlier for earlier, after in zip(before, everything(), strict=True))
    assert new == (report.decisions, report.ratings, report.comparisons, report.outcomes)


def counted(path: Path, **how: Any) -> Counter[str]:
    return Counter(type(record).__name__ for record in formats.read(path, **how))


def test_demos_are_read_whole() -> None:
    # llamafactory dpo en demo holds 300 pairs 80 with a system turn
    found = list(formats.read(outside("llamafactory/dpo_en_demo.json")))
    assert counted(outside("llamafactory/dpo_en_demo.json")) == {"ImportedComparison": 300}
    assert sum(r.left.messages[0]["role"] == "system" for r in found) == 80  # type: ignore[union-attr]
    # llamafactory kto en demo holds 150 good and 150 bad
    found = formats.read(outside("llamafactory/kto_en_demo.json"))
    assert Counter(r.ratings[0].thumb for r in found) == {"up": 150, "down": 150}  # type: ignore[union-attr]
    # hh harmless refuses four empty answers and five other prompts
    found = list(formats.read(outside("hh-rlhf/harmless-base.test.jsonl.gz")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(found) == 2312
    # rows 86, 516, 925 and 1103 counted from 0
    assert [r.line for r in refused if "empty" in r.reason] == [87, 517, 926, 1104]
    assert sum("same prompt" in r.reason for r in refused) == 5
    assert len(refused) == 9


def test_open_assistant_trees_give_754_ordered_pairs_of_212_ranked_sets() -> None:
    found = list(formats.read(outside("open-assistant/en_100_tree.jsonl")))
    pairs = [record for record in found if isinstance(record, ImportedComparison)]
    assert (len(found), len(pairs)) == (754, 754)
    assert {pair.preference for pair in pairs} == {"left"}
    # a set is the replies to one message: to one conversation of one tree
    asked = Counter((pair.line, json.dumps(pair.left.messages)) for pair in pairs)
    assert len(asked) == 212
    # of n ranked replies n (n - 1) / 2 pairs
    replies = {key: round((1 + math.sqrt(1 + 8 * pairs_of)) / 2) for key, pairs_of in asked.items()}
    keys = {(pair.line, side.key) for pair in pairs for side in (pair.left, pair.right)}  # type: ignore[union-attr]
    assert len(keys) == sum(replies.values())


def test_pandalm_test_set_holds_999_rows_six_with_an_answer_that_is_no_text() -> None:
    found = list(formats.read(outside("pandalm/testset-v1.json")))
    refused = [r for r in found if isinstance(r, RowRefused)]
    assert len(refused) == 6
    assert all("expected a text, found True" in r.reason for r in refused)
    assert len({r.line for r in found}) == 999
    assert len(found) - len(refused) == (999 - 6) * 3
    pairs = [r for r in found if isinstance(r, ImportedComparison)]
    empty = {r.key for r in pairs if "" in (r.left.response, r.right.response)}  # type: ignore[union-attr]
    assert len(empty) == 54


def test_tensorzero_tables_hold_997_decisions_84_good_and_416_bad() -> None:
    path = outside("tensorzero-haiku/ChatInference.jsonl")
    found = list(formats.read(path, ratings_path=outside("tensorzero-haiku/BooleanMetricFeedback.jsonl")))
    assert len(found) == 997
    thumbs = Counter(r.ratings[0].thumb if r.ratings else "" for r in found)  # type: ignore[union-attr]
    assert thumbs == {"up": 84, "down": 416, "": 497}
    assert found[0].messages == [{"role": "user", "content": '{"topic": "devastation"}'}]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [name for name, format in FORMAT_OF.items() if format == "llamafactory"])
def test_llamafactory_rows_are_recognised_without_a_dataset_info(name: str, tmp_path: Path) -> None:
    (tmp_path / "renamed.json").write_bytes((HERE / name).read_bytes())
    assert formats.detect(tmp_path / "renamed.json") == "llamafactory"
    before, after = (
        [r for r in formats.read(path, "llamafactory") if not isinstance(r, RowSkipped)]
        for path in (HERE / name, tmp_path / "renamed.json")
    )
    assert before == after


def test_rows_formats_and_second_files_nobody_knows_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.jsonl", [{"colour": "red", "size": 3}])
    with pytest.raises(FormatRefused, match=r"colour, size.*--format"):
        formats.detect(path)
    with pytest.raises(FormatRefused, match=r"'csv'; there are auto, ratchet"):
        formats.read(path, "csv")
    with pytest.raises(FormatRefused, match="simulation"):
        formats.read(HERE / "hh_rlhf.jsonl", "auto", HERE / "simulation_ratings.json")


def test_rows_are_numbered(tmp_path: Path) -> None:
    # rows know the line they start on
    path = tmp_path / "x.json"
    path.write_text('[\n {"a": 1},\n\n {"a":\n   2}, {"a": 3}\n]\n')
    assert list(rows(path)) == [Row(2, {"a": 1}), Row(4, {"a": 2}), Row(5, {"a": 3})]
    # lines that are blank are no rows but count
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


def test_long_arrays_and_rows(tmp_path: Path) -> None:
    # a long array is read piece by piece
    # rows of some 10 kB over several chunks, with texts, escapes and numbers across their edges
    items = [
        {"n": i, "text": 'ü"\\\n' * 2500, "x": [1.5, -2e10, True, None]} for i in range(3 * CHUNK // 10_000)
    ]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(items), "utf-8")
    assert path.stat().st_size > 3 * CHUNK
    assert [row.value for row in rows(path) if isinstance(row, Row)] == items
    # one row longer than a chunk is read whole
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


def test_a_damaged_empty_or_missing_file_and_a_deep_row_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": "' + bytes(range(32, 33)) * 5000 + b'"}\n')
    (tmp_path / "x.jsonl.gz").write_bytes(whole[:-12])
    (tmp_path / "a.json").write_bytes(b"")
    (tmp_path / "b.json").write_bytes(b"  \n\n ")
    for name, fault in (
        ("x.jsonl.gz", "damaged"),
        ("a.json", "empty"),
        ("b.json", "empty"),
        ("none.json", "cannot"),
        ("", "cannot"),
    ):
        with pytest.raises(FormatRefused, match=fault):
            list(rows(tmp_path / name))
    (tmp_path / "x.jsonl").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    (refused,) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)


def test_bytes_that_are_no_utf8_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'[{"a": "caf\xe9"}]')
    with pytest.raises(FormatRefused, match=r"UTF-8 text, found the byte 0xe9"):
        list(rows(tmp_path / "x.json"))
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": "caf\xe9"}\n')
    (_, refused) = rows(tmp_path / "x.jsonl")
    assert isinstance(refused, RowRefused)
    assert (refused.line, "byte 11 is 0xe9" in refused.reason) == (2, True)


def test_times_are_read_in_all_their_spellings() -> None:
    seconds = 1735787045
    texts = (
        "2025-01-02T03:04:05Z",
        "2025-01-02T03:04:05.0000000Z",
        "2025-01-02T05:04:05+02:00",
        "2025-01-02 03:04:05",
    )
    for value in (*texts, seconds, seconds * 1000):
        assert time_of(value, "at") == datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert time_of(None, "at") is None


ROW = {"a": {"b": [{"c": 1}, {"c": 2}]}, "text": '{"model": "m"}', "none": None, "zero": 0, "no": False}
ROW |= {"x.y": "dot"}
PATHS = (
    "a",
    "a.b",
    "a.b[1].c",
    "a.b[?c == `2`].c",
    "none || text",
    "zero || text",
    "no || a",
    "none || no",
    '"x.y"',
    "a.q.r || text",
    "!(a.q)",
    "a.b[0].c < `2` && text",
    "type(a) == 'object' && a.b || none",
    "none == 'x'",
    "text == zero",
    "zero == `0`",
    "none == nothing",
    "text != 'x'",
    "not_null(none, zero)",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_means_what_jmespath_says(path: str) -> None:
    assert at(ROW, path) == jmespath.search(path, ROW)


def test_json_in_a_text_is_decoded_and_a_text_is_no_number() -> None:
    assert at(ROW, "json(text).model") == "m"
    assert at(ROW, "json(a).b[0].c") == 1
    assert at(ROW, "text < `3`") is None
    assert at("no object", "a.b") is None
    assert at(ROW, "") is None


ROWS = [json.loads(line) for line in (SUPPORT / "rows_told.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", STATED, ids=lambda case: f"{case['file']} {case['beside']}".strip())
def test_an_example_says_what_is_stated(case: dict[str, Any]) -> None:
    beside = HERE / case["beside"] if case["beside"] else None
    found = file_told(HERE / case["file"], "auto", beside)
    assert found == {name: case[name] for name in ("formats", "records", "left_out")}


def test_there_is_a_statement_for_every_example_and_an_example_of_every_format() -> None:
    files = {str(path.relative_to(HERE)) for path in HERE.rglob("*") if path.is_file()}
    assert {case["file"] for case in STATED} | {"llamafactory_dataset_info.json"} == files
    assert set(FORMAT_OF.values()) == set(formats.FORMATS)


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["says"])
def test_rows_say_what_is_stated(case: dict[str, Any], tmp_path: Path) -> None:
    main = case_file(tmp_path, case, "x")
    assert main is not None
    found = file_told(main, case["format"], case_file(tmp_path, case.get("beside"), "beside"))
    assert found["records"] == case["records"]
    assert found["left_out"] == case["left_out"]


def test_a_dataset_info_beside_the_file_names_its_columns(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        json.dumps([{"q": "Can I?", "yes": "Sure.", "no": "No.", "sys": "Be brief."}])
    )
    info = {
        "mine": {
            "file_name": "mine.json",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "yes", "rejected": "no", "system": "sys"},
        }
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    assert formats.detect(tmp_path / "mine.json") == "llamafactory"
    (record,) = formats.read(tmp_path / "mine.json")
    assert isinstance(record, ImportedComparison)
    assert isinstance(record.left, ImportedDecision)
    expected = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Can I?"}]
    assert record.left.messages == expected
    assert record.left.response == "Sure."


UNIT_ROWS: dict[str, dict[str, Any]] = {
    "kto": {"prompt": "q", "completion": "a", "label": True},
    "dpo": {"prompt": "q", "chosen": "a", "rejected": "b"},
    "sft": {"prompt": "q", "completion": "a"},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "alpaca pairs": {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
    "sharegpt": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "openai preference": {
        "input": {"messages": [{"role": "user", "content": "q"}]},
        "preferred_output": [{"role": "assistant", "content": "a"}],
        "non_preferred_output": [{"role": "assistant", "content": "b"}],
    },
    "messages": {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "rating": "up",
    },
    "two answers": {"prompt": "q", "response_a": "a", "response_b": "b", "preferred": "a"},
}


@pytest.mark.django_db
@pytest.mark.parametrize("name", UNIT_ROWS)
def test_a_row_keeps_its_unit_so_that_a_person_can_be_forgotten(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({**UNIT_ROWS[name], "unit": unit}) + "\n" for unit in ("ada", "ben")))
    file_import(path, agent="helper")
    units = list(Decision.objects.values_list("unit", flat=True))
    assert set(units) == {"ada", "ben"}
    assert "" not in units
