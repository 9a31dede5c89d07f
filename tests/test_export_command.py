"""Exports of training data: the command and its limits; our readers find in every format what was written."""

import gzip
import json
import uuid
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from feedback.models import Decision, Rating
from feedback.services import comparison_submit, rating_submit
from feedback.transfer import export, formats
from feedback.transfer.export import ExportReport, FeedbackExportRefused, export_stream, file_export
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.records import RowRefused
from feedback.transfer.formats.writers import REASONS
from tests.support import said
from tests.support.export_world import CALL, PAIRS, UNSAID, decided, exported, forget_everything
from tests.support.export_world import world as world
from tests.support.imports import file_import

pytestmark = pytest.mark.django_db

command = partial(said.command, "export_training_data")


@pytest.mark.parametrize("name", formats.SHAPES)
def test_a_very_long_conversation_ends_no_export(name: str) -> None:
    """The other decisions are exported; a format that cannot hold 2,001 turns counts those it leaves out."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": f"turn {n}"} for n in range(2001)]
    for messages in (turns, "Hello?"):
        yes, no = decided("Yes.", messages), decided("No.", messages)
        comparison_submit(left=yes, right=no, preference="left", rater="ann")
    report = ExportReport(name)
    whole = b"".join(export_stream(name, Selection(), report))
    if name == "oasst":
        assert (whole.count(b"message_tree_id"), report.left_out["too_long"]) == (1, 1)


def test_the_command_writes_a_file_and_says_what_is_in_it(world: None, tmp_path: Path) -> None:
    for option in ("--agent-type", "--agent"):
        path = tmp_path / f"{option}.jsonl"
        found = command(option, "helper", "--format", "trl", "--output", str(path))
        assert (found["format"], found["path"], found["samples"]) == ("trl", str(path), PAIRS)
        assert found["left_out"] == UNSAID
        assert len(path.read_text().splitlines()) == PAIRS
    # without a format it is our own, and .gz zips it
    found = command("--limit", "0", "--output", str(tmp_path / "all.jsonl.gz"))
    assert (found["format"], found["samples"]) == ("ratchet", 6)
    assert gzip.decompress((tmp_path / "all.jsonl.gz").read_bytes()) == exported()


def test_a_limit_takes_the_newest_decisions_with_what_belongs_to_them(tmp_path: Path) -> None:
    for number in range(5):
        row = decided(str(number), created_at=datetime(2026, 1, 1 + number, tzinfo=UTC))
        rating_submit(decision=row, rater="ann", thumb="up")
    for left in "03":
        pair = {"left": Decision.objects.get(response=left), "right": Decision.objects.get(response="4")}
        comparison_submit(**pair, preference="left", rater="ann")
    found = command("--limit", "2", "--output", str(tmp_path / "two.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    assert [line.get("response") for line in lines] == ["4", "3", None]
    assert (found["samples"], found["truncated"]) == (2, True)
    assert command("--limit", "0", "--output", str(tmp_path / "all.jsonl"))["truncated"] is False
    assert command("--limit", "5", "--output", str(tmp_path / "all.jsonl"))["truncated"] is False


def test_what_stands_beside_a_limited_file_is_of_the_same_decisions(world: None, tmp_path: Path) -> None:
    command("--format", "simulation", "--limit", "4", "--output", str(tmp_path / "e.json"))
    read = list(formats.read(tmp_path / "e.json", ratings_path=tmp_path / "e-ratings.json"))
    assert not any(isinstance(record, RowRefused) for record in read)


def test_silent_and_low_decisions_are_left_out(world: None, tmp_path: Path, settings: Any) -> None:
    def written(*words: str) -> dict[str, Any]:
        return command(*words, "--output", str(tmp_path / "x.jsonl"))

    found = written("--require-feedback")
    assert (found["samples"], found["left_out"]) == (5, {"no_feedback": 1})
    # 0.875 is raw 1.5, 0.9 is 1.6, thumbs up are 2, three stars 0, a thumb down -2
    found = written("--min-reward", "1.55")
    assert (found["samples"], found["left_out"]) == (2, {"below_min_reward": 4})
    pairs = written("--min-reward", "1.5", "--format", "trl")
    assert pairs["samples"] == 3, "a preference for the good one, its rating, and the correction"
    # a calculated reward comes before what raters say
    settings.FEEDBACK_REWARDS = "tests.test_export_command.two_for_the_unrated"
    written("--min-reward", "2")
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert "Yes." in [line.get("response") for line in lines]


def two_for_the_unrated(ids: list[uuid.UUID]) -> dict[uuid.UUID, float]:
    return {row.pk: 2.0 for row in Decision.objects.filter(pk__in=ids, response="Yes.")}


def test_nothing_to_write_is_refused_in_one_line_and_leaves_the_old_file(world: None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("before")
    with pytest.raises(CommandError, match=r"^[^\n]*5 below_min_reward, 1 no_candidates[^\n]*$"):
        command("--min-reward", "2", "--agent", "helper", "--format", "vw", "--output", str(path))
    assert path.read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "x.jsonl"]
    with pytest.raises(CommandError, match="known are helper"):
        command("--agent", "nobody")
    with pytest.raises(FeedbackExportRefused, match="No such file or directory"):
        file_export(tmp_path / "none" / "x.jsonl", "ratchet", Selection())


def test_a_file_that_fails_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to whenever memory is cleared up, the transaction it holds would end as a trace on a user's screen."""
    ended: list[bool] = []

    def stream(*_: Any, **__: Any) -> Any:
        try:
            yield b"a"
            yield b"b"
        finally:
            ended.append(True)

    def full(file: Any, path: Path, pieces: Any) -> None:
        next(pieces)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "export_stream", stream)
    monkeypatch.setattr(export, "_write", full)
    with pytest.raises(FeedbackExportRefused, match="No space left on device") as refused:
        file_export(tmp_path / "x.jsonl", "ratchet", Selection())
    assert ended == [True], refused
    assert list(tmp_path.glob("*.jsonl")) == []


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
OF_DECISIONS_ELSEWHERE = {"langfuse": {"ratings": 8, "corrections": 1}, "tensorzero-boolean": {"ratings": 3}}
OF_DECISIONS_ELSEWHERE |= {"tensorzero-float": {"ratings": 3}, "tensorzero-comment": {"ratings": 2}}
OF_DECISIONS_ELSEWHERE |= {"tensorzero-demonstration": {"ratings": 1, "corrections": 1}}


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
    (message,) = json.loads(Decision.objects.get(metadata__response_is="messages").response)
    function = message["tool_calls"][0]["function"]
    assert {**function, "arguments": json.loads(function["arguments"])} == CALL["function"]


def test_datasets_loads_what_is_written_for_trl(world: None, tmp_path: Path, monkeypatch: Any) -> None:
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
