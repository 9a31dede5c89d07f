"""Exporting: every format is written so that our reader finds in it what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from feedback.models import Decision, Rating
from feedback.transfer import formats
from feedback.transfer.export import file_export
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.records import RowRefused
from feedback.transfer.formats.writers import REASONS
from tests.support.export_world import CALL, PAIRS, UNSAID, forget_everything
from tests.support.export_world import world as world
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

WRITTEN: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    # shape: (rows, what reading them brings, what was left out)
    "ratchet": (6, {"decisions": 6, "ratings": 6, "comparisons": 4, "outcomes": 1, "traces": 1}, {}),
    "trl": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-implicit": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-standard": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-standard-implicit": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "trl-unpaired": (5, {"ratings": 5}, {"neutral": 1}),
    "trl-prompt-completion": (4, {"decisions": 4}, {"not_good": 2}),
    "trl-prompt-only": (4, {}, {}),
    "openai": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "openai-sft": (4, {"decisions": 4}, {"not_good": 2}),
    "hh": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory-alpaca": (PAIRS, {"comparisons": PAIRS}, UNSAID),
    "llamafactory-kto": (4, {"ratings": 4}, {"neutral": 1, "not_text": 1}),
    "llamafactory-sft": (3, {"decisions": 3}, {"not_good": 2, "not_text": 1}),
    "simulation": (5, {"decisions": 5, "ratings": 4}, {"neutral": 1, "not_text": 1}),
    "feedback_collector": (5, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "pandalm": (2, {"comparisons": 3}, {"both_bad": 1}),
    "oasst": (PAIRS + 1, {"comparisons": PAIRS + 1}, {"both_bad": 1}),
    "vw": (1, {"decisions": 1, "outcomes": 1}, {"no_candidates": 5}),
    "tensorzero": (6, {"decisions": 6}, {}),
    "label_studio": (2, {"comparisons": 2}, UNSAID),
    "label_studio-rating": (4, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "label_studio-json_min": (5, {"ratings": 5}, {"not_text": 1}),
    "label_studio-chat": (5, {"ratings": 5, "corrections": 1}, {"not_text": 1}),
    "argilla": (6, {"ratings": 5, "comparisons": 2, "corrections": 1}, {**UNSAID, "not_text": 1}),
    "argilla-flat": (6, {"ratings": 5, "comparisons": 2, "corrections": 1}, {**UNSAID, "not_text": 1}),
    "librechat": (4, {"ratings": 2}, {"another_rater": 1, "neutral": 1, "roles": 1, "not_text": 1}),
    "open_webui": (4, {"ratings": 4}, {"neutral": 1, "not_text": 1}),
}
OF_DECISIONS_ELSEWHERE = {
    "langfuse": {"ratings": 8, "corrections": 1},
    "tensorzero-boolean": {"ratings": 3},
    "tensorzero-float": {"ratings": 3},
    "tensorzero-comment": {"ratings": 2},
    "tensorzero-demonstration": {"ratings": 1, "corrections": 1},
}


def test_every_shape_is_tested() -> None:
    assert {*WRITTEN, *OF_DECISIONS_ELSEWHERE, "simulation-ratings"} == set(formats.SHAPES)
    # a format without shapes is read and not written
    assert all(format.shapes[0].name == name for name, format in formats.FORMATS.items() if format.shapes)


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_is_read_with_the_same_counts(name: str, world: None, tmp_path: Path) -> None:
    rows, brought, left_out = WRITTEN[name]
    path = tmp_path / "out.json"
    report = file_export(path, name, Selection("helper"))
    assert report.samples == rows
    assert {reason: count for reason, count in report.left_out.items() if count} == left_out
    assert set(report.left_out) <= set(REASONS)
    assert formats.format_by_name(formats.detect(path)).name == formats.format_by_name(name).name
    assert not any(isinstance(record, RowRefused) for record in formats.read(path))
    forget_everything()
    ratings = tmp_path / "out-ratings.json"
    found = file_import(path, ratings_path=ratings if ratings.exists() else None).as_dict()
    assert found["refused"] == []
    assert {kind: found[kind] for kind in brought} == brought


@pytest.mark.parametrize("name", OF_DECISIONS_ELSEWHERE)
def test_verdicts_alone_find_the_decisions_they_are_of(name: str, world: None, tmp_path: Path) -> None:
    report = file_export(tmp_path / "out.json", name, Selection("helper"))
    brought = OF_DECISIONS_ELSEWHERE[name]
    assert report.samples == brought["ratings"]
    found = file_import(tmp_path / "out.json").as_dict()
    assert {kind: found[kind] for kind in brought} == brought
    assert found["refused"] == []


def test_tensorzero_tables_stand_beside_each_other_and_are_read_together(world: None, tmp_path: Path) -> None:
    report = file_export(tmp_path / "t.jsonl", "tensorzero", Selection("helper"))
    assert [(Path(file["path"]).name, file["samples"]) for file in report.files] == [
        ("t.jsonl", 6),
        ("t-boolean.jsonl", 3),
        ("t-float.jsonl", 3),
        ("t-comment.jsonl", 2),
        ("t-demonstration.jsonl", 1),
    ]
    forget_everything()
    for name in ("t", "t-boolean", "t-float", "t-comment", "t-demonstration"):
        file_import(tmp_path / f"{name}.jsonl")
    assert (Decision.objects.count(), Rating.objects.count()) == (6, 9)
    tool = Decision.objects.get(metadata__response_is="messages")
    (message,) = json.loads(tool.response)
    function = message["tool_calls"][0]["function"]
    assert {**function, "arguments": json.loads(function["arguments"])} == CALL["function"]


def test_hugging_face_datasets_load_what_is_written_for_trl(
    world: None, tmp_path: Path, monkeypatch: Any
) -> None:
    datasets = pytest.importorskip("datasets")
    for name, columns in (
        ("trl", {"prompt", "chosen", "rejected"}),
        ("trl-implicit", {"chosen", "rejected"}),
        ("trl-unpaired", {"prompt", "completion", "label", "tools"}),
        ("trl-prompt-completion", {"prompt", "completion", "tools"}),
        ("trl-prompt-only", {"prompt", "tools"}),
        ("hh", {"chosen", "rejected"}),
    ):
        path = tmp_path / f"{name}.jsonl"
        report = file_export(path, name, Selection("helper"))
        loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=str(tmp_path / "cache"))[
            "train"
        ]
        assert set(loaded.column_names) == columns
        assert len(loaded) == report.samples
