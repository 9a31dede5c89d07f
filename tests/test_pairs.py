"""Evidence becomes pairs: each source, merging, majority, caps and the split. Every number here is worked by hand."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from rl.datasets.feedback_types import (
    CandidatesEvidence,
    ComparisonEvidence,
    Completion,
    CorrectionEvidence,
    Evidence,
    RatingEvidence,
    rating_value,
)
from rl.datasets.pairs import Pair, RowSet, pairs_from_evidence, rows_sampled
from rl.recipes import RecipeError
from tests.support.split_prompts import split_by_hash


def pairs_split_by_hash(evidence: Iterable[Evidence], **knobs: Any) -> RowSet[Pair]:
    """As the datasets make them, every prompt on the side its hash alone gives it."""
    return pairs_from_evidence(evidence, split_by_hash, **knobs)


TRAIN, EVAL, HOLDOUT = "00" * 32, "d0" * 32, "ff" * 32
"""Prompt hashes that stand in each split: 0/2^32 = 0, 0xd0d0d0d0/2^32 = 0.816, 0xffffffff/2^32 = 1.000."""


def found(pairs: RowSet[Pair]) -> list[tuple[Completion, Completion, str, float, int]]:
    return [(p.chosen, p.rejected, p.source, p.margin, p.votes) for p in pairs.rows]


def judged(response: str, *values: float, prompt: str = TRAIN, simulated: bool = False) -> list[Evidence]:
    return [RatingEvidence(prompt, response, value, simulated) for value in values]


def compared(left: str, right: str, preference: str = "left", prompt: str = TRAIN) -> ComparisonEvidence:
    return ComparisonEvidence(prompt, left, right, preference)


def test_the_split_changes_exactly_at_80_and_90_percent_of_the_first_eight_digits() -> None:
    # 3435973836 / 2^32 is the last below 0.8, 3865470566 / 2^32 the last below 0.9
    for split, digits in {
        "train": ("00000000", "cccccccc"),
        "eval": ("cccccccd", "e6666666"),
        "holdout": ("e6666667", "ffffffff"),
    }.items():
        assert {split_by_hash(first + rest * 56) for first in digits for rest in "0f"} == {split}


def test_a_rating_is_worth_its_share_of_the_best_by_its_finest_signal() -> None:
    assert [rating_value(thumb=thumb) for thumb in ("up", "down")] == [1.0, 0.0]
    assert [rating_value(stars=stars) for stars in (1, 2, 4, 5)] == [0.0, 0.25, 0.75, 1.0]
    assert [rating_value(score=score) for score in (0.3, 0.0)] == [0.3, 0.0]
    assert rating_value() is None
    assert rating_value(thumb="up", stars=2, score=0.1) == 0.1
    assert rating_value(thumb="up", stars=2) == 0.25


def test_an_unknown_preference_and_knobs_out_of_range_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="neither"):
        pairs_split_by_hash([compared("a", "b", "neither")])
    for name, values in {"rating_margin": (0.0, 1.1), "max_pairs_per_prompt": (0,)}.items():
        for value in values:
            with pytest.raises(RecipeError, match=name):
                pairs_split_by_hash([], **{name: value})


def test_a_thousand_responses_to_one_prompt_are_paired_from_the_ends() -> None:
    # values 0.000, 0.001, ... 0.999: the four largest differences are 999 over 0, then (by value) 999 over 1 and
    # 998 over 0, then 998 over 1, 999 over 2, 997 over 0 share third place
    evidence = [item for i in range(1000) for item in judged(f"r{i:03d}", i / 1000)]
    pairs = pairs_split_by_hash(evidence, rating_margin=0.25)
    assert found(pairs)[0] == ("r999", "r000", "ratings", 0.999, 1)
    assert {p[:2] for p in found(pairs)[1:3]} == {("r999", "r001"), ("r998", "r000")}
    # of 499,500 pairs those with i - j >= 250 are 750 * 751 / 2 = 281,625; four were kept
    assert pairs.left_out == {"below_margin": 499_500 - 281_625, "over_cap": 281_625 - 4}


def listed(choice: str, *options: str, prompt: str = TRAIN) -> CandidatesEvidence:
    return CandidatesEvidence(prompt, choice, tuple((option, None) for option in options))


def scored(choice: str, **scores: float) -> CandidatesEvidence:
    return CandidatesEvidence(TRAIN, choice, tuple(scores.items()))


KEYS = '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', ' {"a": 1, "b": [2]}\n'
"""One object, written three ways."""
IMPLIED = {"implied": True}
CASES: dict[str, tuple[list[Evidence], dict[str, Any], list[tuple[Any, ...]], dict[str, int] | None]] = {
    # comparisons and corrections
    "a comparison": ([compared("good", "bad")], {}, [("good", "bad", "comparison", 1.0, 1)], {}),
    "the other side": ([compared("bad", "good", "right")], {}, [("good", "bad", "comparison", 1.0, 1)], {}),
    "ties and both bad": (
        [compared("a", "b", "tie"), compared("a", "b", "both_bad"), compared("a", "c", "tie")],
        *({}, [], {"tie": 2, "both_bad": 1}),
    ),
    "a correction": (
        [CorrectionEvidence(TRAIN, "wrong", "right")],
        {},
        [("right", "wrong", "correction", 1.0, 1)],
        {},
    ),
    "a correction the agent cannot act on": (
        [CorrectionEvidence(TRAIN, "wrong", "no json", valid=False)],
        {},
        [],
        {"correction_invalid": 1},
    ),
    "white space alone differs": (
        [
            *(
                CorrectionEvidence(TRAIN, '{"widget": "table"}', '{"widget":"table"}\n'),
                compared("a b", "a  b"),
            ),
            *(*judged("x y", 1.0), *judged("xy", 0.0)),
        ],
        *({}, [], {"same_response": 3}),
    ),
    # three verdicts on the one object, of which two are good: written as it was most often
    "the order of keys alone differs": (
        [
            *(CorrectionEvidence(TRAIN, KEYS[0], KEYS[1]), compared(KEYS[0], KEYS[2])),
            *(*judged(KEYS[0], 1.0, 1.0), *judged(KEYS[1], 0.0), *judged("no", 0.0)),
        ],
        *({}, [(KEYS[0], "no", "ratings", 0.666667, 1)], {"same_response": 2}),
    ),
    # ratings: means 0.75 and 0.25; three verdicts on one side, two on the other
    "the better mean": (
        [*judged("a", 1.0, 0.75, 0.5), *judged("b", 0.0, 0.5)],
        {},
        [("a", "b", "ratings", 0.5, 2)],
        {},
    ),
    "closer than the margin": (
        [*judged("a", 0.6), *judged("b", 0.4), *judged("c", 0.0)],
        *({"rating_margin": 0.5}, [("a", "c", "ratings", 0.6, 1)], {"below_margin": 2}),
    ),
    # 0.35 - 0.1 is below 0.25 in binary arithmetic
    "the margin by a hair": (
        [*judged("a", 0.35), *judged("b", 0.1)],
        {"rating_margin": 0.25},
        [("a", "b", "ratings", 0.25, 1)],
        {},
    ),
    "different prompts": (
        [*judged("a", 1.0), *judged("b", 0.0, prompt="11" * 32)],
        {},
        [],
        {"single_response": 2},
    ),
    "one response alone": (judged("a", 1.0, 0.0, 1.0), {}, [], {"single_response": 1}),
    # candidates
    "scored candidates": (
        [scored("a", a=0.9, b=0.5, c=0.4)],
        {"rating_margin": 0.25},
        [("a", "c", "candidates", 0.5, 0), ("a", "b", "candidates", 0.4, 0)],
        {"below_margin": 1},
    ),
    "a candidate scored twice": (
        [scored("a", a=0.2, b=0.1), scored("b", a=1.0, b=0.3)],
        {},
        [("a", "b", "candidates", 0.4, 0)],
        None,
    ),
    "a like where nothing is implied": (
        [listed("a", "a", "b"), *judged("a", 1.0)],
        {},
        [],
        {"single_response": 1},
    ),
    "a dislike where nothing is implied": (
        [listed("a", "a", "b"), *judged("a", 0.0)],
        {},
        [],
        {"single_response": 1},
    ),
    "the dislike of one of two": (
        [listed("a", "a", "b"), *judged("a", 0.0)],
        IMPLIED,
        [("b", "a", "implied", 0.5, 1)],
        None,
    ),
    "the dislike of one of three": ([listed("a", "a", "b", "c"), *judged("a", 0.0)], IMPLIED, [], None),
    "a choice that was not listed": ([listed("x", "a", "b"), *judged("x", 1.0)], IMPLIED, [], None),
    "a lukewarm verdict": (
        [listed("a", "a", "b"), *judged("a", 0.7)],
        IMPLIED | {"rating_margin": 0.25},
        [],
        None,
    ),
    "two liked options": (
        [listed("a", "a", "b"), listed("b", "a", "b"), *judged("a", 1.0), *judged("b", 0.9)],
        IMPLIED,
        [],
        None,
    ),
    "an option in another order of keys": (
        [*judged(KEYS[0], 1.0), listed(KEYS[0], KEYS[1], "other")],
        IMPLIED,
        [(KEYS[0], "other", "implied", 0.5, 1)],
        None,
    ),
    "stronger evidence than what is implied": (
        [listed("a", "a", "b", "c"), *judged("a", 1.0), compared("c", "b")],
        IMPLIED,
        [("c", "b", "comparison", 1.0, 1)],
        None,
    ),
    # merging and majority
    "the same twice": (
        [compared("a", "b"), compared("b", "a", "right")],
        {},
        [("a", "b", "comparison", 1.0, 2)],
        {"duplicate": 1},
    ),
    # three for, one against: margin 1 * (3 - 1) / (3 + 1)
    "the majority": (
        [*[compared("a", "b")] * 3, compared("b", "a")],
        {},
        [("a", "b", "comparison", 0.5, 3)],
        {"outvoted": 1, "duplicate": 2},
    ),
    "as many for as against": ([compared("a", "b"), compared("b", "a")], {}, [], {"conflict": 1}),
    # ratings say a over b by 0.5 with one vote, a comparison says it fully with one: margin (0.5 + 1) / 2
    "several sources": (
        [*judged("a", 1.0), *judged("b", 0.5), compared("a", "b")],
        {},
        [("a", "b", "comparison", 0.75, 2)],
        None,
    ),
    "a judgement against a score": (
        [compared("b", "a"), scored("a", a=1.0, b=0.0)],
        {},
        [("b", "a", "comparison", 1.0, 1)],
        None,
    ),
}
"""Evidence, knobs, the pairs it makes and how much is left out for which reason (None: whatever it is)."""


@pytest.mark.parametrize("case", CASES)
def test_evidence_makes_these_pairs(case: str) -> None:
    evidence, knobs, pairs, left_out = CASES[case]
    made = pairs_split_by_hash(evidence, **knobs)
    assert found(made) == pairs
    assert left_out in (None, made.left_out)


def test_a_liked_choice_beats_one_listed_option_nobody_liked() -> None:
    pairs = pairs_split_by_hash([listed("a", "a", "b", "c"), *judged("a", 1.0, 0.75)], implied=True)
    assert len(pairs.rows) == 1
    pair = pairs.rows[0]
    # mean 0.875, which is 0.375 above neutral; two verdicts
    assert (pair.chosen, pair.source, pair.margin, pair.votes) == ("a", "implied", 0.375, 2)
    assert pair.rejected in ("b", "c")


def test_pairs_that_somebody_judged_stand_before_pairs_of_scores() -> None:
    evidence = [
        *judged("a", 0.6),
        *judged("b", 0.2),
        CandidatesEvidence(TRAIN, "c", (("c", 1.0), ("d", 0.0))),
    ]
    assert [p.votes for p in pairs_split_by_hash(evidence).rows] == [1, 0]


def test_a_train_prompt_gives_its_clearest_pairs_up_to_the_cap() -> None:
    evidence = [*judged("a", 1.0), *judged("b", 0.6), *judged("c", 0.3), *judged("d", 0.0)]
    pairs = pairs_split_by_hash(evidence, rating_margin=0.25, max_pairs_per_prompt=3)
    # differences: ad 1.0, ac 0.7, bd 0.6, ab 0.4, bc 0.3, cd 0.3
    assert [(p.chosen, p.rejected) for p in pairs.rows] == [("a", "d"), ("a", "c"), ("b", "d")]
    assert pairs.left_out == {"over_cap": 3}


def test_an_eval_prompt_gives_its_one_clearest_pair_and_a_held_out_prompt_all() -> None:
    def found_of(prompt: str) -> RowSet[Pair]:
        values = {"a": 1.0, "b": 0.6, "c": 0.0}
        return pairs_split_by_hash(
            [item for key, value in values.items() for item in judged(key, value, prompt=prompt)],
            max_pairs_per_prompt=1,
        )

    assert [(p.chosen, p.rejected) for p in found_of(EVAL).rows] == [("a", "c")]
    assert found_of(EVAL).left_out == {"held_out_extra": 2}
    assert [(p.chosen, p.rejected) for p in found_of(HOLDOUT).rows] == [("a", "c"), ("b", "c"), ("a", "b")]
    assert found_of(HOLDOUT).left_out == {}


def test_of_six_answers_to_a_held_out_prompt_the_ten_clearest_pairs_are_heard() -> None:
    evidence = [item for i in range(6) for item in judged(f"a{i}", i / 5, prompt=HOLDOUT)]
    pairs = pairs_split_by_hash(evidence, rating_margin=0.2)
    # fifteen pairs, five of neighbours (0.2 apart)
    assert len(pairs.rows) == 10
    assert min(pair.margin for pair in pairs.rows) == pytest.approx(0.4)
    assert pairs.left_out == {"held_out_extra": 5}


def test_further_pairs_of_a_held_out_prompt_are_no_samples_of_their_own() -> None:
    held = [item for i in range(3) for item in judged(f"a{i}", i / 2, prompt=HOLDOUT)]
    pairs = pairs_split_by_hash([*held, compared("x", "y"), compared("v", "w")])
    assert Counter(pair.split for pair in pairs.rows) == {"train": 2, "holdout": 3}
    assert rows_sampled(pairs, 3) == pairs
    for size in (1, 2):
        found = rows_sampled(pairs, size)
        assert len(found.rows) + found.left_out["over_max_samples"] == 5
        splits = Counter(pair.split for pair in found.rows)
        assert splits["train"] + splits["holdout"] // 3 == size
        assert splits["holdout"] in (0, 3)


def test_the_order_of_the_evidence_changes_nothing() -> None:
    rng = random.Random(7)
    prompts = [TRAIN, EVAL, HOLDOUT, *(f"{i:02x}" * 32 for i in range(1, 30))]
    evidence: list[Evidence] = []
    for prompt in prompts:
        for _ in range(12):
            left, right = rng.sample("abcdef", 2)
            kind = rng.randrange(4)
            if kind == 0:
                evidence.append(
                    ComparisonEvidence(
                        prompt, left, right, rng.choice(["left", "right", "tie"]), tags=(left,)
                    )
                )
            elif kind == 1:
                evidence.append(
                    RatingEvidence(prompt, left, rng.choice([0.1, 0.2, 0.3, 0.7, 1.0]), rng.random() < 0.2)
                )
            elif kind == 2:
                evidence.append(CorrectionEvidence(prompt, left, right))
            else:
                evidence.append(CandidatesEvidence(prompt, left, tuple((c, rng.random()) for c in "abc")))
    first = pairs_split_by_hash(evidence)
    assert len(first.rows) > 30
    for _ in range(5):
        rng.shuffle(evidence)
        assert pairs_split_by_hash(evidence) == first
