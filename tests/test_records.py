"""DECISIONS.md as numbered records with a status and an index (docs/records.py), CHANGELOG.md by version."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from backend import VERSION

ROOT = Path(__file__).resolve().parent.parent

PAGE = """# Decisions

How to add one.

| record | date | decision | status |
| --- | --- | --- | --- |
| 7 | of a record | that is gone | accepted |

## 2026-11-23 · A third, new
Found faster.

## 2026-11-22 · Also new

Status: accepted.

Slower, but `right`.
## 4 · 2026-11-20 · An old one

Status: accepted, amended by 5.

- Text
"""

RENUMBERED = """# Decisions

How to add one.

| record | date | decision | status |
| --: | --- | --- | --- |
| 6 | 2026-11-23 | [A third, new](#6--2026-11-23--a-third-new) | accepted |
| 5 | 2026-11-22 | [Also new](#5--2026-11-22--also-new) | accepted |
| 4 | 2026-11-20 | [An old one](#4--2026-11-20--an-old-one) | accepted, amended by 5 |

## 6 · 2026-11-23 · A third, new

Status: accepted.

Found faster.

## 5 · 2026-11-22 · Also new

Status: accepted.

Slower, but `right`.

## 4 · 2026-11-20 · An old one

Status: accepted, amended by 5.

- Text
"""


@pytest.fixture(scope="module")
def records() -> ModuleType:
    spec = importlib.util.spec_from_file_location("records", ROOT / "docs" / "records.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["records"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


def test_new_records_get_the_next_numbers_a_status_and_a_line_in_the_index(records: ModuleType) -> None:
    head, found = records.read(PAGE)
    assert records.written(head, records.numbered(found)) == RENUMBERED


def test_numbering_again_changes_nothing(records: ModuleType) -> None:
    head, found = records.read(RENUMBERED)
    assert records.written(head, records.numbered(found)) == RENUMBERED


@pytest.mark.parametrize(
    ("spoilt", "word"),
    [
        (RENUMBERED.replace("## 5 · ", "## 6 · "), "do not fall"),
        (RENUMBERED.replace("## 4 · ", "## "), "without a number"),
        (RENUMBERED.replace("amended by 5", "amended by 9"), "names record 9"),
        (RENUMBERED.replace("amended by 5", "amended by 4"), "names record 4"),
        (RENUMBERED.replace("· An old one", "· Also new"), "stands twice"),
        (RENUMBERED.replace("Found faster.\n", ""), "without a text"),
    ],
)
def test_what_is_wrong_with_records_is_named(records: ModuleType, spoilt: str, word: str) -> None:
    assert records.faults(records.read(RENUMBERED)[1]) == []
    assert word in "; ".join(records.faults(records.read(spoilt)[1]))


@pytest.mark.parametrize(
    "spoilt",
    [RENUMBERED.replace("Status: accepted.", "Status: perhaps."), RENUMBERED.replace("2026-11-23 · A", "A")],
)
def test_a_status_or_heading_of_another_form_is_refused(records: ModuleType, spoilt: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        records.read(spoilt)


def test_decisions_are_in_order_and_their_index_is_whole(records: ModuleType) -> None:
    """New records may stand on top without a number: several people add some at once, and one numbers them later."""
    text = records.FILE.read_text("utf-8")
    _, found = records.read(text)
    assert records.faults(found) == []
    assert records.index(found) in text, "run: python docs/records.py"


def test_the_changelog_has_a_section_for_this_version_below_what_is_not_released() -> None:
    headings = [
        line for line in (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines() if line.startswith("## ")
    ]
    assert [line.split()[1] for line in headings[:2]] == ["Unreleased", VERSION]
