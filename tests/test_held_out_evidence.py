"""Held-out evidence: prompts of each kind are counted without a model, and one kind carries the accuracy rule."""

import itertools
from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl.datasets import held_out_evidence, prepare_training_dataset
from rl.datasets.feedback_types import SPLITS
from rl.datasets.held_out_evidence import evidence_counts, good_chars, held_out_of_database
from rl.gates.evidence_kinds import KINDS, lead_kind
from tests.support.dataset_feedback import decide, prompts_in, rate

pytestmark = pytest.mark.django_db


def test_an_agent_nobody_knows_has_no_evidence() -> None:
    assert evidence_counts("nobody")[0] == dict.fromkeys(KINDS, 0)


def test_held_out_prompts_are_counted_by_kind() -> None:
    held_out = prompts_in("holdout", 9)
    for prompt in prompts_in("train", 5):
        rate(prompt, "yes", "up")
    for prompt in held_out[:2]:  # two answers to one prompt: a pair, and labels
        rate(prompt, "yes", "up")
        rate(prompt, "no", "down")
    for prompt in held_out[2:6]:
        rate(prompt, "yes", "up")
    rating_submit(decision=decide(held_out[6], "no"), rater="ann", stars=2)
    # a correction is worth a pair too: it beats what it corrects
    rating_submit(decision=decide(held_out[7], "no"), rater="ann", correction="yes, of course")
    decide(held_out[8], "not rated")
    counts = evidence_counts("helper")[0]
    assert counts == {
        "pairs": 3,
        "labels": 7,
        "corrections": 1,
        "tests": 0,
        "known": 0,
        "outcomes": 0,
        "rewards": 0,
    }
    # the same numbers as an evaluation finds in the datasets themselves
    for kind, dataset in (("pairs", "pairs"), ("labels", "scores")):
        rows = prepare_training_dataset(
            "helper", dataset, min_samples=1, for_training=False, dry_run=True
        ).rows("holdout")
        assert len({row["prompt_hash"] for row in rows}) == counts[kind]


def test_prompts_that_are_not_text_are_no_evidence() -> None:
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    for prompt in prompts_in("holdout", 3):
        rate(prompt, "yes", "up")
    for number in range(60):
        content = [*picture, {"type": "text", "text": f"what is picture {number}?"}]
        shown = decision_record(
            agent="helper", messages=[{"role": "user", "content": content}], response="a cat"
        ).row
        rating_submit(decision=shown, rater="ann", thumb="up")
    assert evidence_counts("helper")[0]["known"] == 3


def test_prompts_that_no_policy_trains_on_are_spare_whether_rated_or_not() -> None:
    sides = {split: prompts_in(split, 3) for split in SPLITS}
    for prompts in sides.values():
        rate(prompts[0], "yes", "up")
        decide(prompts[1], "not rated")
    spare = {row["prompt"][-1]["content"] for row in held_out_of_database("helper", 30).spare}
    assert spare == {*sides["eval"][:2], *sides["holdout"][:2]}


@pytest.mark.parametrize(
    ("counts", "lead"),
    [
        ({"labels": 300}, "labels"),
        ({"pairs": 40, "labels": 80}, "pairs"),  # half as many as the most, and enough
        ({"pairs": 39, "labels": 80}, "labels"),
        ({"pairs": 29, "labels": 29}, "pairs"),  # too few of each: the order of the kinds
        ({"pairs": 10, "labels": 25}, "labels"),
        ({"labels": 35, "corrections": 35}, "labels"),
        ({"labels": 35, "tests": 36}, "tests"),
        ({"labels": 30, "rewards": 1000}, "labels"),  # what a program thinks goes behind what people said
        ({"labels": 29, "rewards": 1000}, "rewards"),
        ({}, "pairs"),
    ],
)
def test_the_kind_that_carries_is_fixed_by_numbers_of_prompts(counts: dict[str, int], lead: str) -> None:
    assert lead_kind(counts, 30) == lead


@pytest.mark.parametrize(
    ("counts", "lead"),
    [
        ({"pairs": 33, "labels": 47, "corrections": 33, "known": 60}, "known"),
        ({"pairs": 40, "tests": 90, "known": 30}, "known"),  # enough of them lead, however many others have
        ({"pairs": 29, "labels": 28, "known": 29}, "known"),  # too few, and pairs are among them
        ({"pairs": 33, "tests": 40, "known": 29}, "tests"),
        ({"pairs": 29, "rewards": 100, "known": 29}, "rewards"),
    ],
)
def test_known_answers_lead_where_two_answers_are_the_same_or_not(counts: dict[str, int], lead: str) -> None:
    assert lead_kind(counts, 30, discrete=True) == lead


def test_the_length_of_good_answers_is_that_of_chosen_liked_and_written_ones() -> None:
    said = [{"role": "assistant", "content": "x" * 15}]
    rows: dict[str, list[dict[str, Any]]] = {
        "pairs": [{"chosen": "abc", "rejected": "x" * 99}],
        "labels": [{"completion": said, "score": 0.6}, {"completion": "x" * 99, "score": 0.5}],
    }
    # (4 x 16) ** 1/2 - 1
    assert good_chars(rows) == {"value": pytest.approx(7.0), "n": 2}
    assert good_chars({"corrections": [{"completion": "x" * 8}]})["value"] == pytest.approx(8.0)
    assert good_chars({}) == {}


def test_what_is_rated_while_the_evidence_is_read_ends_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start page was 500 when a rating came between its two readings."""

    for number in range(12):
        rate(f"question {number}", "a", "up")
    read, calls = held_out_evidence._all_evidence, itertools.count()

    def read_later(source: Any) -> Any:
        if next(calls) == 1:
            for number in range(100, 140):
                rate(f"question {number}", "a", "up")
        return read(source)

    monkeypatch.setattr(held_out_evidence, "_all_evidence", read_later)
    counts, _ = evidence_counts("helper")
    assert counts["labels"] > 0
