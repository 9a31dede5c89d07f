"""The areas of the campaign name tests that there are."""

import re
import sys
from collections.abc import Iterator

import pytest

from benchmarks import attack
from tests.support.server import ROOT


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[attack.Tests]:
    monkeypatch.setattr(sys, "argv", ["attack.py"])
    areas = attack.areas(attack.options_read())
    return (step for _, steps in areas.values() for step in steps if isinstance(step, attack.Tests))


def test_each_word_of_a_choice_finds_a_test(steps: Iterator[attack.Tests]) -> None:
    """A test that gets another name must not leave the campaign."""
    lost = []
    for step in steps:
        texts = "".join((ROOT / node).read_text("utf-8") for node in step.nodes)
        names = re.findall(r"^def (test_\w+)", texts, re.MULTILINE)
        words = re.split(r" or ", step.only.removeprefix("not ")) if step.only else []
        lost += [(step.nodes, word) for word in words if not any(word in name for name in names)]
    assert lost == []


def test_no_attack_is_left_out(steps: Iterator[attack.Tests]) -> None:
    named = {node for step in steps for node in step.nodes}
    assert {f"tests/attacks/{file.name}" for file in (ROOT / "tests/attacks").glob("test_*.py")} <= named
