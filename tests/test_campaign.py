"""What `benchmarks/attack.py` counts: of a test what it says it tried, and what was skipped never as tried."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import attack

CASES = """
import pytest

def test_ten(record_property):
    record_property("tried", 10)

def test_one():
    pass

def test_broken(record_property):
    record_property("tried", 3)
    assert 1 == 2, "a door is open"

@pytest.mark.parametrize("n", range(2))
def test_impossible(n):
    pytest.skip("no disk to fill")
"""


@pytest.mark.slow
def test_tried_failed_and_not_tried_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    monkeypatch.setattr(attack, "ROOT", tmp_path)
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)  # these are no tests of Django
    found = attack.attack("doors", [attack.Tests((str(tmp_path / "test_cases.py"),))])
    assert (found.tried, found.failed, found.not_tried) == (14, 1, 2)
    assert "a door is open" in found.failures[0]
    total = attack.Outcome("all")
    total.add(found)
    total.add(found)
    told = json.loads(json.dumps(asdict(total)))
    assert (told["tried"], told["failed"], told["not_tried"]) == (28, 2, 4)
    assert list(told["reasons"].values()) == [4]
    assert "no disk to fill" in next(iter(told["reasons"]))


@pytest.mark.slow
def test_an_area_that_finds_no_test_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    monkeypatch.setattr(attack, "ROOT", tmp_path)
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)  # these are no tests of Django
    found = attack.attack("doors", [attack.Tests((str(tmp_path / "test_cases.py"),), only="nowhere")])
    assert (found.tried, found.failed) == (0, 1)
