"""Records of decisions (docs/decisions) have one shape and stand in the index; CHANGELOG.md is a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
HEAD = re.compile(
    r"# (?P<number>\d+)\. \S.*\n\nDate: \d{4}-\d\d-\d\d(?: \(last changed \d{4}-\d\d-\d\d\))?"
    r" · Status: (?:accepted|proposed)\n"
)
SECTIONS = ["## Problem", "## Decision", "## Rejected", "## Consequences"]
MOST_RECORDS, MOST_LINES, MOST_CHANGES = 40, 42, 200


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
def test_a_record_has_title_date_status_and_sections(record: Path) -> None:
    text = record.read_text("utf-8")
    head = HEAD.match(text)
    assert head
    assert record.name.startswith(f"{int(head['number']):02}-")
    assert re.findall(r"(?m)^## .+$", text) == SECTIONS
    assert len(text.splitlines()) <= MOST_LINES


def test_every_record_has_its_number_once_and_stands_in_the_index_and_the_navigation() -> None:
    names = [record.name for record in RECORDS]
    assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))
    assert len(names) <= MOST_RECORDS
    index = (ROOT / "docs" / "decisions" / "index.md").read_text("utf-8")
    titles = [record.read_text("utf-8").splitlines()[0].split(". ", 1)[1] for record in RECORDS]
    lines = [
        f"| {n} | [{title}]({name}) |" for n, (title, name) in enumerate(zip(titles, names, strict=True), 1)
    ]
    assert [line for line in lines if line not in index] == []
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert re.findall(r"- docs/decisions/([0-9].+)", navigation) == names


def test_the_changelog_is_a_page_that_begins_with_what_is_not_released() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text("utf-8").splitlines()
    assert next(line for line in lines if line.startswith("## ")) == "## Unreleased"
    assert len(lines) <= MOST_CHANGES
