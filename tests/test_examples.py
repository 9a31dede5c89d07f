"""Single responses as rows: labels, scores, demonstrations, groups and prompts, from worked evidence."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from rl.datasets.examples import Example, examples_from_evidence, prompt_examples
from rl.datasets.feedback_types import (
    CorrectionEvidence,
    DemonstrationEvidence,
    Evidence,
    RatingEvidence,
    RewardEvidence,
)
from rl.datasets.pairs import RowSet, pairs_from_evidence, rows_sampled
from rl.recipes import RecipeError
from tests.support.split_prompts import split_by_hash

ONE, TWO = "0" * 64, "f" * 64
"""Prompt hashes of the train and of the holdout split."""

EVIDENCE = [
    RatingEvidence(ONE, "good", 1.0, tags=("clear",)),
    RatingEvidence(ONE, "good", 0.75),
    RatingEvidence(ONE, "bad", 0.0, simulated=True),
    RatingEvidence(ONE, "split", 1.0),
    RatingEvidence(ONE, "split", 0.0),
    RatingEvidence(TWO, "only", 1.0),
    CorrectionEvidence(ONE, "bad", "mended"),
    CorrectionEvidence(TWO, "only", "nonsense", valid=False),
]


def examples_split_by_hash(evidence: Iterable[Evidence], kind: str, **knobs: Any) -> RowSet[Example]:
    """As the datasets make them, every prompt on the side its hash alone gives it."""
    return examples_from_evidence(evidence, kind, split_by_hash, **knobs)


def contents(examples: RowSet[Example]) -> list[dict[str, Any]]:
    return [dict(row.content) for row in examples.rows]


def test_a_response_is_good_where_its_mean_verdict_is_above_neutral() -> None:
    labels = examples_split_by_hash(EVIDENCE, "labels")
    assert contents(labels) == [
        {"completion": "bad", "label": False},
        {"completion": "good", "label": True},
        {"completion": "only", "label": True},
    ]
    assert labels.left_out == {"undecided": 1}
    assert [row.votes for row in labels.rows] == [1, 2, 1]
    assert [row.simulated for row in labels.rows] == [True, False, False]
    assert labels.rows[1].tags == ("clear",)


def test_a_score_is_the_mean_verdict() -> None:
    assert contents(examples_split_by_hash(EVIDENCE, "scores")) == [
        {"completion": "bad", "score": 0.0},
        {"completion": "good", "score": 0.875},
        {"completion": "split", "score": 0.5},
        {"completion": "only", "score": 1.0},
    ]


def test_what_a_person_wrote_is_the_demonstration_where_there_is_one() -> None:
    found = examples_split_by_hash(EVIDENCE, "corrections")
    assert contents(found) == [{"completion": "mended"}, {"completion": "only"}]
    assert [row.source for row in found.rows] == ["correction", "ratings"]
    assert found.left_out == {"correction_invalid": 1, "not_good_enough": 2, "outranked": 1}


def test_a_group_holds_the_rated_responses_of_one_prompt() -> None:
    groups = examples_split_by_hash(EVIDENCE, "groups")
    assert contents(groups) == [{"completions": ["bad", "good", "split"], "rewards": [0.0, 0.875, 0.5]}]
    assert groups.left_out == {"single_response": 1}


REWARDS = [RewardEvidence(TWO, "earned", 0.25, simulated=True), RewardEvidence(ONE, "bad", 1.0)]


def test_a_reward_stands_in_where_nobody_gave_a_verdict() -> None:
    scores = examples_split_by_hash([*EVIDENCE, *REWARDS], "scores")
    assert {"completion": "bad", "score": 0.0} in contents(scores)  # what people say goes before it
    (row,) = (row for row in scores.rows if row.content["completion"] == "earned")
    assert (row.content["score"], row.source, row.votes, row.simulated) == (0.25, "reward", 0, True)
    groups = examples_split_by_hash([*EVIDENCE, *REWARDS], "groups")
    assert {"completions": ["earned", "only"], "rewards": [0.25, 1.0]} in contents(groups)
    only_compared = [replace(reward, measured=False) for reward in REWARDS]
    for kind in ("labels", "corrections"):
        assert examples_split_by_hash([*EVIDENCE, *only_compared], kind) == examples_split_by_hash(
            EVIDENCE, kind
        )


@pytest.mark.parametrize(("threshold", "labels"), [(0.5, [False, True, True]), (0.8, [False, False, True])])
def test_a_reward_at_or_above_the_threshold_is_a_good_label_and_one_below_a_bad_one(
    threshold: float, labels: list[bool]
) -> None:
    earned = [RewardEvidence(ONE, "a", 0.49), RewardEvidence(ONE, "b", 0.5), RewardEvidence(ONE, "c", 0.8)]
    found = examples_split_by_hash(earned, "labels", threshold=threshold)
    assert [row.content["label"] for row in found.rows] == labels
    assert {row.source for row in found.rows} == {"reward"}


def test_a_threshold_that_makes_one_kind_of_label_only_is_refused() -> None:
    with pytest.raises(RecipeError, match="reward_threshold must be between 0 and 1"):
        examples_split_by_hash([], "labels", threshold=1.0)


SHOWN_ON_ONE = [
    RatingEvidence(ONE, "liked", 1.0),
    DemonstrationEvidence(ONE, "brought"),
    DemonstrationEvidence(ONE, "taught", "teacher"),
    RewardEvidence(ONE, "earned", 0.9),
    CorrectionEvidence(ONE, "bad", "mended"),
]


@pytest.mark.parametrize(
    ("without", "kept", "source"),
    [
        (0, "mended", "correction"),
        (1, "brought", "demonstration"),
        (2, "taught", "teacher"),
        (3, "liked", "ratings"),
        (4, "earned", "reward"),
    ],
)
def test_the_strongest_source_of_a_prompt_is_its_demonstration(without: int, kept: str, source: str) -> None:
    sources = ("correction", "demonstration", "teacher", "ratings", "reward")
    found = examples_split_by_hash(SHOWN_ON_ONE, "corrections", sources=sources[without:])
    assert [(row.content["completion"], row.source) for row in found.rows] == [(kept, source)]
    assert found.left_out.get("other_source", 0) == without
    assert found.left_out.get("outranked", 0) == 4 - without


def test_what_people_dislike_is_never_shown_whoever_wrote_it() -> None:
    said = [
        DemonstrationEvidence(ONE, "brought"),
        RatingEvidence(ONE, "brought", 0.0),
        RatingEvidence(ONE, "mended", 0.25),
    ]
    found = examples_split_by_hash([*said, CorrectionEvidence(ONE, "x", "mended")], "corrections")
    assert (found.rows, found.left_out) == ((), {"disliked": 2})


def test_a_row_knows_the_feedback_it_is_made_of_and_no_other() -> None:
    ids = [uuid.UUID(int=number) for number in range(4)]
    said = [
        RatingEvidence(ONE, "a", 1.0, feedback=(ids[0],)),
        RatingEvidence(ONE, "a", 1.0, feedback=(ids[1],)),
        RewardEvidence(ONE, "a", 0.0, feedback=(ids[2],)),  # people's word goes before it, so it is not read
        RewardEvidence(ONE, "b", 0.0, feedback=(ids[3],)),
    ]
    labels = examples_split_by_hash(said, "labels")
    assert [set(row.feedback) for row in labels.rows] == [{ids[0], ids[1]}, {ids[3]}]
    (pair,) = pairs_from_evidence(said, split_by_hash).rows
    assert (pair.chosen, pair.rejected, pair.source, pair.votes) == ("a", "b", "reward", 0)
    assert set(pair.feedback) == {ids[0], ids[1], ids[3]}


def test_a_group_without_difference_teaches_nothing() -> None:
    groups = examples_split_by_hash([RatingEvidence(ONE, "a", 1.0), RatingEvidence(ONE, "b", 1.0)], "groups")
    assert groups.rows == ()
    assert groups.left_out == {"same_reward": 1}


@pytest.mark.parametrize("kind", ["labels", "scores", "corrections", "groups"])
def test_the_order_of_the_evidence_changes_nothing(kind: str) -> None:
    expected = examples_split_by_hash(EVIDENCE, kind)
    for order in itertools.islice(itertools.permutations(EVIDENCE), 0, 40_320, 1_009):
        assert examples_split_by_hash(order, kind) == expected


def test_every_prompt_is_a_row_once_on_its_side_of_the_split() -> None:
    prompts = prompt_examples([TWO, ONE, ONE], split_by_hash)
    assert [(row.prompt_hash, row.split) for row in prompts.rows] == [
        (ONE, "train"),
        (TWO, split_by_hash(TWO)),
    ]


def test_a_larger_sample_holds_a_smaller() -> None:
    examples = examples_split_by_hash(EVIDENCE, "scores")
    one, three = rows_sampled(examples, 1), rows_sampled(examples, 3)
    assert one.rows[0] in three.rows
    assert three.left_out["over_max_samples"] == 1


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(RecipeError, match="labels, scores, corrections, groups"):
        examples_split_by_hash([], "pears")


# --- Spellings of one JSON object ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("labels", [{"completion": '{"a": 1, "b": 2}', "label": True}]),
        ("scores", [{"completion": '{"a": 1, "b": 2}', "score": pytest.approx(2 / 3)}]),
    ],
)
def test_verdicts_on_one_object_with_its_keys_in_two_orders_are_counted_together(
    kind: str, expected: list[dict[str, Any]]
) -> None:
    usual, other = '{"a": 1, "b": 2}', '{"b": 2,"a": 1}'
    evidence = [
        RatingEvidence(ONE, usual, 1.0),
        RatingEvidence(ONE, other, 0.0),
        RatingEvidence(ONE, usual, 1.0),
    ]
    examples = examples_split_by_hash(evidence, kind)
    assert contents(examples) == expected
    assert [row.votes for row in examples.rows] == [3]


def test_an_object_written_in_two_orders_makes_no_group_of_two_responses() -> None:
    evidence = [RatingEvidence(ONE, '{"a": 1, "b": 2}', 1.0), RatingEvidence(ONE, '{"b": 2, "a": 1}', 0.0)]
    assert contents(examples_split_by_hash(evidence, "groups")) == []
