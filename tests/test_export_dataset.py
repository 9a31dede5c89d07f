"""`export_dataset`: every kind in every form, what it holds, labels balanced, rows in order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError

from feedback.services import decision_record, rating_submit
from rl.datasets import get_training_stats, prepare_training_dataset
from rl.datasets.examples import examples_balanced, examples_from_evidence
from rl.datasets.feedback_types import RatingEvidence
from tests.support.split_prompts import split_by_hash
from tests.test_commands import run

pytestmark = pytest.mark.django_db


@pytest.fixture
def rated() -> None:
    """Thirty prompts answered well, with stars, and ten of them also badly."""
    for number in range(30):
        row = decision_record(agent="helper", messages=f"question {number}", response=f"good {number}").row
        rating_submit(decision=row, rater="ada", stars=5)
        if number < 10:
            bad = decision_record(agent="helper", messages=f"question {number}", response="no").row
            rating_submit(decision=bad, rater="bob", stars=2)


def export(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run("export_dataset", "--agent", "helper", "--json", *arguments))
    return found


@pytest.mark.usefixtures("rated")
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("pairs", 10), ("labels", 40), ("scores", 40), ("corrections", 30), ("groups", 10), ("prompts", 30)],
)
def test_every_kind_is_written_as_json_lines(tmp_path: Path, kind: str, rows: int) -> None:
    found = export("--kind", kind, "--output", str(tmp_path / "out.jsonl"))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == sum(found["samples"].values()) == rows
    assert found["files"][0]["bytes"] == (tmp_path / "out.jsonl").stat().st_size


@pytest.mark.usefixtures("rated")
def test_json_holds_a_list_for_each_split(tmp_path: Path) -> None:
    found = export("--kind", "labels", "--format", "json", "--output", str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert {split: len(rows) for split, rows in written.items()} == found["samples"]


@pytest.mark.usefixtures("rated")
def test_hugging_face_datasets_opens_what_was_written(tmp_path: Path) -> None:
    from datasets import load_from_disk

    found = export("--kind", "groups", "--format", "datasets", "--output", str(tmp_path / "out"))
    opened = load_from_disk(str(tmp_path / "out"))
    assert opened["train"].num_rows == found["samples"]["train"]
    assert set(opened["train"][0]["rewards"]) == {0.25, 1.0}
    with pytest.raises(CommandError, match="give another folder"):
        export("--kind", "groups", "--format", "datasets", "--output", str(tmp_path / "out"))


@pytest.mark.usefixtures("rated")
def test_balanced_labels_are_four_to_three_at_most(tmp_path: Path) -> None:
    found = export("--kind", "labels", "--balance", "--output", str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    train = [row["label"] for row in rows if row["split"] == "train"]
    assert train.count(True) == int(train.count(False) * 4 / 3)
    plain = prepare_training_dataset("helper", kind="labels", dry_run=True)
    assert found["left_out"]["over_balance"] == plain.counts["train"] - len(train)
    assert {s: found["samples"][s] for s in ("eval", "holdout")} == {
        s: plain.counts[s] for s in ("eval", "holdout")
    }
    with pytest.raises(CommandError, match="only labels can be balanced"):
        export("--kind", "scores", "--balance", "--output", str(tmp_path / "no.jsonl"))


def test_one_kind_alone_is_not_balanced_away() -> None:
    labels = examples_from_evidence(
        [RatingEvidence(f"{n:064x}", "yes", 1.0) for n in range(5)], "labels", split_by_hash
    )
    assert examples_balanced(labels) == labels


@pytest.mark.usefixtures("rated")
def test_training_rows_may_stand_easy_to_hard(tmp_path: Path) -> None:
    export("--kind", "corrections", "--order", "length", "--output", str(tmp_path / "out.jsonl"))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    lengths = [
        len(row["prompt"][0]["content"]) + len(row["completion"]) for row in rows if row["split"] == "train"
    ]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 1


@pytest.mark.usefixtures("rated")
def test_statistics_speak_of_every_kind() -> None:
    kinds = get_training_stats("helper")["kinds"]
    assert set(kinds) == {"labels", "scores", "corrections", "groups", "prompts"}
    labels, groups = kinds["labels"], kinds["groups"]
    assert (labels["balance"]["good"], labels["balance"]["bad"]) == (30, 10)
    assert labels["duplicates"] == 9  # "no" ten times
    assert sum(labels["rows"].values()) == 40
    # five stars are 1, two are 0.25
    assert kinds["scores"]["scores"]["mean"] == pytest.approx((30 + 10 * 0.25) / 40)
    assert groups["group_sizes"] == {"2": 10}
    # of 1 and 0.25, n - 1 below the line
    assert groups["reward_std_in_group"] == pytest.approx(0.75 / 2**0.5)
    assert groups["left_out"] == {"single_response": 20}
    assert kinds["prompts"]["prompts"] == 30
    assert kinds["corrections"]["length_chars"]["completion"]["max"] == len("good 29")
