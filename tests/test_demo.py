"""The whole loop of `make demo`, on a tiny base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl.base_models.service import base_model_given
from rl.management import demo
from rl.models import Policy
from tests.support.tiny_models import tiny_model


class Bar:
    def update(self, done: int, total: int, suffix: str = "") -> None:
        pass


@contextmanager
def bar(label: str) -> Iterator[Bar]:
    yield Bar()


@pytest.mark.campaign
@pytest.mark.training
@pytest.mark.django_db
def test_the_demo_rates_trains_evaluates_exports_and_answers(
    tmp_path: Path, ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "SCENARIOS", 120)
    base = base_model_given(str(tiny_model(tmp_path / "base", "llama")), lambda line: None)
    found = demo.demo(bar, base.name, minutes=0.2)
    policy = Policy.objects.get(kind="adapter")
    assert found["training"]["policy"] == policy.name
    assert found["evaluation"]["comparison"]["against"] == "base"
    assert Path(found["export"]["files"][0]["path"]).is_file()
    assert found["answer"]["response"]
