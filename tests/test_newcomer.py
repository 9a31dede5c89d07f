"""The newcomer's way (`benchmarks/newcomer.py`): what it brings, and what it reads on the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.nursery.agent import FORECASTS, OPTIONS, SOILS, best_watering, data_lines
from benchmarks.nursery.pages import PHASE
from tests.support.imports import file_import


@pytest.mark.django_db
def test_its_lines_are_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "waterings.jsonl"
    path.write_text(data_lines(rated=20, unrated=5), "utf-8")
    report = file_import(path, agent="nursery")
    assert (report.decisions, report.ratings, report.refused_count) == (25, 20, 0)
    assert 0 < report.corrections < 20


def test_what_is_wanted_depends_on_soil_and_forecast_together() -> None:
    taste = {(soil, forecast): best_watering(soil, forecast) for soil in SOILS for forecast in FORECASTS}
    assert set(taste.values()) == set(OPTIONS)
    assert all(len({taste[soil, forecast] for soil in SOILS}) > 1 for forecast in FORECASTS)
    assert any(len({taste[soil, forecast] for forecast in FORECASTS}) > 1 for soil in SOILS)


@pytest.mark.parametrize(
    ("text", "name", "done"),
    [
        ("Training, step 63 of 250", "Training", "63"),
        ("Judging, loading the model", "Judging, loading the model", None),
        ("Reference pass, 32 of 1,300", "Reference pass", "32"),
    ],
)
def test_a_phase_is_told_from_how_far_it_is(text: str, name: str, done: str | None) -> None:
    found = PHASE.fullmatch(text)
    assert found is not None
    assert (found["name"], found["done"]) == (name, done)
