"""Every example file says what `support/formats_told.jsonl` states: records, refused rows, left-out columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.formats import HERE, example_told

STATED = Path(__file__).parent / "support" / "formats_told.jsonl"
TOLD = [json.loads(line) for line in STATED.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("case", TOLD, ids=lambda case: f"{case['file']} {case['beside']}".strip())
def test_an_example_says_what_is_stated(case: dict[str, object]) -> None:
    found = json.loads(json.dumps(example_told(str(case["file"]), str(case["beside"]))))
    assert found["formats"] == case["formats"]
    assert found["records"] == case["records"]
    assert found["left_out"] == case["left_out"]


def test_there_is_a_statement_for_every_example() -> None:
    files = {str(path.relative_to(HERE)) for path in HERE.rglob("*") if path.is_file()}
    assert {str(case["file"]) for case in TOLD} | {"llamafactory_dataset_info.json"} == files
