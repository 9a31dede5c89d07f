"""The command `export_training_data`: its file, its limits and least reward, its refusals."""

from __future__ import annotations

import gzip
import io
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from feedback.models import Decision
from feedback.services import (
    comparison_submit,
    rating_submit,
)
from feedback.transfer import export, formats
from feedback.transfer.export import FeedbackExportRefused, file_export
from feedback.transfer.export_views import Selection
from feedback.transfer.formats.records import RowRefused
from tests.support.export_world import PAIRS, UNSAID, decided, exported
from tests.support.export_world import world as world

pytestmark = pytest.mark.django_db


def command(*arguments: str) -> dict[str, Any]:
    out = io.StringIO()
    call_command("export_training_data", *arguments, "--json", stdout=out, stderr=io.StringIO())
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


def test_the_command_writes_a_file_and_says_what_is_in_it(world: None, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    found = command("--agent-type", "helper", "--format", "trl", "--output", str(path))
    assert (found["format"], found["path"], found["samples"]) == ("trl", str(path), PAIRS)
    assert found["left_out"] == UNSAID
    assert len(path.read_text().splitlines()) == PAIRS
    same = command("--agent", "helper", "--format", "trl", "--output", str(tmp_path / "again.jsonl"))
    assert same["samples"] == PAIRS


def test_without_a_format_it_is_our_own_and_gz_zips_it(world: None, tmp_path: Path) -> None:
    found = command("--limit", "0", "--output", str(tmp_path / "all.jsonl.gz"))
    assert (found["format"], found["samples"]) == ("ratchet", 6)
    assert gzip.decompress((tmp_path / "all.jsonl.gz").read_bytes()) == exported()


def test_a_limit_takes_the_newest_decisions_with_what_belongs_to_them(tmp_path: Path) -> None:
    for number in range(5):
        row = decided(str(number), created_at=datetime(2026, 1, 1 + number, tzinfo=UTC))
        rating_submit(decision=row, rater="ann", thumb="up")
    comparison_submit(
        left=Decision.objects.get(response="0"),
        right=Decision.objects.get(response="4"),
        preference="left",
        rater="ann",
    )
    comparison_submit(
        left=Decision.objects.get(response="3"),
        right=Decision.objects.get(response="4"),
        preference="left",
        rater="ann",
    )
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


def test_decisions_nobody_said_anything_of_can_be_left_out(world: None, tmp_path: Path) -> None:
    found = command("--require-feedback", "--output", str(tmp_path / "x.jsonl"))
    assert (found["samples"], found["left_out"]) == (5, {"no_feedback": 1})


def test_the_least_reward_is_that_of_what_raters_say(world: None, tmp_path: Path) -> None:
    # 0.875 is raw 1.5, 0.9 is 1.6, thumbs up are 2, three stars 0, a thumb down -2
    found = command("--min-reward", "1.55", "--output", str(tmp_path / "x.jsonl"))
    assert (found["samples"], found["left_out"]) == (2, {"below_min_reward": 4})
    pairs = command("--min-reward", "1.5", "--format", "trl", "--output", str(tmp_path / "p.jsonl"))
    assert pairs["samples"] == 3, "a preference for the good one, its rating, and the correction"


def test_a_calculated_reward_comes_before_what_raters_say(world: None, tmp_path: Path, settings: Any) -> None:
    settings.FEEDBACK_REWARDS = "tests.test_export_command.two_for_the_unrated"
    command("--min-reward", "2", "--output", str(tmp_path / "x.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert "Yes." in [line.get("response") for line in lines]


def two_for_the_unrated(ids: list[uuid.UUID]) -> dict[uuid.UUID, float]:
    return {row.pk: 2.0 for row in Decision.objects.filter(pk__in=ids, response="Yes.")}


def test_nothing_to_write_is_refused_in_one_line_and_leaves_the_old_file(world: None, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("before")
    with pytest.raises(CommandError, match="left out: 5 below_min_reward, 1 no_candidates") as refused:
        command("--min-reward", "2", "--agent", "helper", "--format", "vw", "--output", str(path))
    assert "\n" not in str(refused.value)
    assert path.read_text() == "before"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["home", "x.jsonl"]


def test_an_agent_nobody_knows_is_refused_with_those_there_are(world: None, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="known are helper"):
        command("--agent", "nobody")


def test_a_file_that_cannot_be_written_is_refused(world: None, tmp_path: Path) -> None:
    with pytest.raises(FeedbackExportRefused, match="cannot be written: No such file or directory"):
        file_export(tmp_path / "none" / "x.jsonl", "ratchet", Selection())


def test_a_file_that_cannot_be_written_ends_the_reading_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
