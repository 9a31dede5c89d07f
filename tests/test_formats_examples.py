"""Example files and single rows say what is stated of them: records field by field, refused rows, left-out columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.formats import HERE, file_told, written

SUPPORT = Path(__file__).parent / "support"
TOLD = [json.loads(line) for line in (SUPPORT / "formats_told.jsonl").read_text("utf-8").splitlines()]
ROWS = [json.loads(line) for line in (SUPPORT / "rows_told.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", TOLD, ids=lambda case: f"{case['file']} {case['beside']}".strip())
def test_an_example_says_what_is_stated(case: dict[str, Any]) -> None:
    beside = HERE / case["beside"] if case["beside"] else None
    found = file_told(HERE / case["file"], "auto", beside)
    assert found["formats"] == case["formats"]
    assert found["records"] == case["records"]
    assert found["left_out"] == case["left_out"]


def test_there_is_a_statement_for_every_example() -> None:
    files = {str(path.relative_to(HERE)) for path in HERE.rglob("*") if path.is_file()}
    assert {case["file"] for case in TOLD} | {"llamafactory_dataset_info.json"} == files


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["says"])
def test_rows_say_what_is_stated(case: dict[str, Any], tmp_path: Path) -> None:
    found = file_told(written(tmp_path / "x.jsonl", case["rows"]), case["format"])
    assert found["records"] == case["records"]
    assert found["left_out"] == case["left_out"]
