"""Kinds of datasets: the rows of each, balanced labels, statistics."""

from __future__ import annotations

import pytest

from feedback.services import decision_record, rating_submit
from rl.datasets import DatasetRefused, get_training_stats, prepare_training_dataset
from rl.datasets.examples import examples_balanced, examples_from_evidence
from rl.datasets.feedback_types import RatingEvidence
from rl.datasets.rows import RowRules
from tests.support.split_prompts import split_by_hash

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


@pytest.mark.usefixtures("rated")
@pytest.mark.parametrize(
    ("kind", "rows"),
    [("pairs", 10), ("labels", 40), ("scores", 40), ("corrections", 30), ("groups", 10), ("prompts", 30)],
)
def test_every_kind_has_its_rows(kind: str, rows: int) -> None:
    assert prepare_training_dataset("helper", kind=kind, for_training=False, dry_run=True).samples == rows


@pytest.mark.usefixtures("rated")
def test_balanced_labels_are_four_to_three_at_most() -> None:
    found = prepare_training_dataset("helper", kind="labels", rules=RowRules(balance=True), dry_run=True)
    train = [row["label"] for row in found.rows("train")]
    assert train.count(True) == int(train.count(False) * 4 / 3)
    plain = prepare_training_dataset("helper", kind="labels", dry_run=True)
    assert found.left_out["over_balance"] == plain.counts["train"] - len(train)
    assert {s: found.counts[s] for s in ("eval", "holdout")} == {
        s: plain.counts[s] for s in ("eval", "holdout")
    }
    with pytest.raises(DatasetRefused, match="only labels can be balanced"):
        prepare_training_dataset("helper", kind="scores", rules=RowRules(balance=True), dry_run=True)


def test_one_kind_alone_is_not_balanced_away() -> None:
    labels = examples_from_evidence(
        [RatingEvidence(f"{n:064x}", "yes", 1.0) for n in range(5)], "labels", split_by_hash
    )
    assert examples_balanced(labels) == labels


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
