"""Pairs and scored responses in one dataset."""

from typing import Any

import pytest

from feedback.services import comparison_submit, decision_record, rating_submit
from rl.datasets import DatasetRefused, prepare_training_dataset
from rl.datasets.examples import Example, judgements_from_evidence
from rl.datasets.feedback_types import CandidatesEvidence, ComparisonEvidence, RatingEvidence
from rl.datasets.pairs import Pair, rows_sampled
from rl.jobs.lifecycle import TrainOrder
from rl.jobs.method_selection import method_chosen
from rl.jobs.plan import dataset_prepare, train_plan
from rl.linear.fit import fit
from rl.linear.rows import PAIRS_AND_SCORES
from rl.models.runs import RunRefused
from rl.recipes import SFT_CONFIG
from tests.support.linear import BOT, QUEUES, asked, tickets
from tests.support.split_prompts import split_by_hash

ONE, TWO, THREE = "0" * 64, "1" * 64, "f" * 64
"""Prompt hashes: two of the train split, one of the holdout."""

EVIDENCE = [
    ComparisonEvidence(ONE, "tea", "milk", "left"),
    RatingEvidence(ONE, "tea", 1.0),
    RatingEvidence(ONE, "water", 0.0),
    RatingEvidence(TWO, "cocoa", 1.0),
    RatingEvidence(THREE, "juice", 0.25),
    ComparisonEvidence(THREE, "tea", "milk", "tie"),
]


def contents(rows: tuple[Pair | Example, ...]) -> list[Any]:
    return [(row.chosen, row.rejected) if isinstance(row, Pair) else dict(row.content) for row in rows]


def test_verdicts_on_responses_of_no_pair_stand_beside_the_pairs() -> None:
    made = judgements_from_evidence(EVIDENCE, split_by_hash)
    # the thumb on tea and the one on water make a pair of their own, so that neither is a score
    assert contents(made.rows) == [
        ("tea", "water"),
        ("tea", "milk"),
        {"completion": "cocoa", "score": 1.0},
        {"completion": "juice", "score": 0.25},
    ]
    assert [row.split for row in made.rows] == ["train", "train", "train", "holdout"]
    assert made.left_out == {"in_a_pair": 2, "tie": 1}
    assert judgements_from_evidence(reversed(EVIDENCE), split_by_hash) == made


def test_a_verdict_that_made_a_pair_is_found_whatever_the_order_of_its_keys() -> None:
    usual, other = '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'
    made = judgements_from_evidence(
        [RatingEvidence(ONE, usual, 1.0), RatingEvidence(ONE, other, 1.0), RatingEvidence(ONE, "no", 0.0)],
        split_by_hash,
    )
    # written in both ways equally often: as the first by its characters
    assert contents(made.rows) == [(usual, "no")]
    assert made.left_out == {"in_a_pair": 2}


@pytest.mark.parametrize("scores", [(None, None, None), (0.9, 0.5, 0.1)])
def test_a_thumb_stays_evidence_beside_options_that_nobody_rated(scores: tuple[float | None, ...]) -> None:
    options = tuple(zip(("tea", "milk", "water"), scores, strict=True))
    evidence = [CandidatesEvidence(ONE, "tea", options), RatingEvidence(ONE, "tea", 1.0)]
    made = judgements_from_evidence(evidence, split_by_hash)
    assert {"completion": "tea", "score": 1.0} in contents(made.rows)
    # options with scores by the app are pairs of their own; those without say nothing
    assert sum(isinstance(row, Pair) for row in made.rows) == (3 if scores[0] else 0)
    assert "in_a_pair" not in made.left_out


def test_both_kinds_and_samples() -> None:
    # a thumb stays evidence beside a comparison
    made = judgements_from_evidence(
        [ComparisonEvidence(ONE, "tea", "milk", "left"), RatingEvidence(ONE, "tea", 1.0)], split_by_hash
    )
    assert contents(made.rows) == [("tea", "milk"), {"completion": "tea", "score": 1.0}]
    # a larger sample of both holds a smaller
    made = judgements_from_evidence(EVIDENCE, split_by_hash)
    small, large = rows_sampled(made, 1), rows_sampled(made, 3)
    digests = [{row.digest for row in some.rows} for some in (small, large, made)]
    assert digests[0] < digests[1] < digests[2]
    assert small.left_out["over_max_samples"] == 3
    assert rows_sampled(made, 4) is made


@pytest.mark.campaign
def test_a_classifier_learns_from_pairs_what_they_say_and_from_scores_the_rest() -> None:
    """Pairs speak of billing and network alone, thumbs of accounts alone: neither knows all three queues."""
    pairs, scores = [], []
    for text, queue in tickets(240):
        row = {"prompt": asked(text), "prompt_hash": text}
        others = [other for other in QUEUES if other != queue]
        if queue == "accounts":
            scores.append({**row, "completion": queue, "score": 1.0})
            scores += [{**row, "completion": other, "score": 0.0} for other in others]
        else:
            pairs += [{**row, "chosen": queue, "rejected": other} for other in others]

    def right(rows: list[dict[str, Any]], queue: str) -> float:
        policy = fit(rows, BOT).policy
        new = [text for text, own in tickets(120, seed=1) if own == queue]
        scored = [policy.scores(asked(text), QUEUES) for text in new]
        return sum(QUEUES[max(range(3), key=one.__getitem__)] == queue for one in scored) / len(new)

    both = [*pairs, *scores]
    assert fit(both, BOT).policy.facts["feedback"] == PAIRS_AND_SCORES
    assert min(right(both, queue) for queue in QUEUES) > 0.9
    assert right(pairs, "accounts") < 0.5
    assert min(right(scores, queue) for queue in ("billing", "network")) < 0.5


def test_the_share_that_is_liked_moves_no_answer_s_score() -> None:
    """Of answers that are all liked nothing is learnt but that: pairs say alone which is better."""
    pairs = [
        {"prompt": asked(text), "prompt_hash": text, "chosen": queue, "rejected": other}
        for text, queue in tickets(90)
        for other in QUEUES
        if other != queue
    ]
    likes = [
        {
            "prompt": asked(f"hello {n}"),
            "prompt_hash": f"hello {n}",
            "completion": QUEUES[n % 3],
            "score": 1.0,
        }
        for n in range(30)
    ]
    policy = fit([*pairs, *likes], BOT).policy
    shown = [policy.scores(asked(text), QUEUES) for text, _ in tickets(60, seed=1)]
    right = [QUEUES[max(range(3), key=one.__getitem__)] for one in shown]
    assert sum(a == b for a, (_, b) in zip(right, tickets(60, seed=1), strict=True)) > 54


def recorded(pairs: int, thumbs: int) -> None:
    for place, (text, queue) in enumerate(tickets(pairs + thumbs)):
        wrong = QUEUES[(QUEUES.index(queue) + 1) % 3]
        if place < pairs:
            left, right = (
                decision_record(agent="tickets", messages=text, response=said).row for said in (queue, wrong)
            )
            comparison_submit(left=left, right=right, preference="left", rater="ada")
        else:
            said = queue if place % 2 else wrong
            row = decision_record(agent="tickets", messages=text, response=said).row
            rating_submit(decision=row, rater="ada", thumb="up" if said == queue else "down")


@pytest.mark.slow
@pytest.mark.django_db
def test_a_linear_policy_hears_pairs_and_thumbs_where_there_are_both() -> None:
    recorded(60, 0)
    assert method_chosen("tickets", "linear").knobs == {"feedback": "pairs"}
    recorded(60, 40)
    assert method_chosen("tickets", "linear").knobs == {"feedback": "pairs_and_scores"}
    # a language model is trained by one method, which hears one kind
    assert method_chosen("tickets", base_model="bundled").method == "dpo"
    plan = train_plan(TrainOrder("tickets", "sft", "cpu", "bundled", {"feedback": "pairs_and_scores"}))
    assert plan["estimated_steps"] > 0
    prepared = prepare_training_dataset("tickets", kind="pairs_and_scores", min_samples=4)
    assert prepared.snapshot is not None
    kinds = ["chosen" in row for row in prepared.rows()]
    assert (sum(kinds), len(kinds)) == (60, 100)
    assert "single_response" not in prepared.left_out


@pytest.mark.django_db
def test_both_kinds_are_read_from_recorded_feedback_alone() -> None:
    recipe = SFT_CONFIG["cpu"].with_knobs(feedback="pairs_and_scores")
    order = TrainOrder("tickets", "sft", source="file", data_file="x.jsonl")
    with pytest.raises(RunRefused, match=r"import it \(`import_feedback FILE --agent tickets`\)"):
        dataset_prepare(order, recipe, [])
    with pytest.raises(DatasetRefused, match="no decision of agent 'tickets' is recorded"):
        dataset_prepare(TrainOrder("tickets", "sft"), recipe, [])
