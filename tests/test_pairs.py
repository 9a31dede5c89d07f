"""Evidence becomes pairs: each source, merging, majority, caps and the split. Every number here is worked by hand."""

from __future__ import annotations

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
    completion_key,
    completion_of,
    rating_value,
)
from rl.datasets.pairs import REASONS, Pair, RowSet, pairs_from_evidence, rows_sampled
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


# --- The split --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first_digits", "split"),
    [
        ("00000000", "train"),
        ("cccccccc", "train"),  # 3435973836 / 2^32 is the last below 0.8
        ("cccccccd", "eval"),
        ("e6666666", "eval"),  # 3865470566 / 2^32 is the last below 0.9
        ("e6666667", "holdout"),
        ("ffffffff", "holdout"),
    ],
)
def test_the_split_changes_exactly_at_80_and_90_percent_of_the_hashes(first_digits: str, split: str) -> None:
    assert split_by_hash(first_digits + "5a" * 28) == split


def test_the_split_depends_on_the_first_eight_digits_alone() -> None:
    assert split_by_hash("cccccccc" + "f" * 56) == "train"
    assert split_by_hash("cccccccd" + "0" * 56) == "eval"


# --- What a rating says -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rating", "value"),
    [
        ({"thumb": "up"}, 1.0),
        ({"thumb": "down"}, 0.0),
        ({"stars": 1}, 0.0),
        ({"stars": 2}, 0.25),
        ({"stars": 4}, 0.75),
        ({"stars": 5}, 1.0),
        ({"score": 0.3}, 0.3),
        ({"score": 0.0}, 0.0),
        ({}, None),
    ],
)
def test_a_rating_is_worth_its_share_of_the_best(rating: dict, value: float | None) -> None:
    assert rating_value(**rating) == value


def test_the_finest_signal_of_a_rating_speaks() -> None:
    assert rating_value(thumb="up", stars=2, score=0.1) == 0.1
    assert rating_value(thumb="up", stars=2) == 0.25


# --- Comparisons and corrections --------------------------------------------------------------------------


def test_a_comparison_makes_a_pair_of_full_margin() -> None:
    assert found(pairs_split_by_hash([compared("good", "bad")])) == [("good", "bad", "comparison", 1.0, 1)]
    assert found(pairs_split_by_hash([compared("bad", "good", "right")])) == [
        ("good", "bad", "comparison", 1.0, 1)
    ]


def test_ties_and_both_bad_make_no_pair_and_are_counted() -> None:
    pairs = pairs_split_by_hash(
        [compared("a", "b", "tie"), compared("a", "b", "both_bad"), compared("a", "c", "tie")]
    )
    assert pairs.rows == ()
    assert pairs.left_out == {"tie": 2, "both_bad": 1}


def test_an_unknown_preference_is_an_error() -> None:
    with pytest.raises(ValueError, match="left, right, tie or both_bad"):
        pairs_split_by_hash([compared("a", "b", "neither")])


def test_a_correction_beats_the_response_it_corrects() -> None:
    pairs = pairs_split_by_hash([CorrectionEvidence(TRAIN, "wrong", "right")])
    assert found(pairs) == [("right", "wrong", "correction", 1.0, 1)]


def test_a_correction_the_agent_could_not_act_on_is_left_out() -> None:
    pairs = pairs_split_by_hash([CorrectionEvidence(TRAIN, "wrong", "no json", valid=False)])
    assert pairs.rows == ()
    assert pairs.left_out == {"correction_invalid": 1}


def test_responses_that_differ_in_white_space_alone_make_no_pair() -> None:
    pairs = pairs_split_by_hash(
        [
            CorrectionEvidence(TRAIN, '{"widget": "table"}', '{"widget":"table"}\n'),
            compared("a b", "a  b"),
            *judged("x y", 1.0),
            *judged("xy", 0.0),
        ]
    )
    assert pairs.rows == ()
    assert pairs.left_out == {"same_response": 3}


def test_responses_that_differ_in_the_order_of_keys_alone_are_one_response() -> None:
    one, other, padded = '{"a": 1, "b": [2]}', '{"b":[2],"a":1}', ' {"a": 1, "b": [2]}\n'
    pairs = pairs_split_by_hash(
        [
            CorrectionEvidence(TRAIN, one, other),
            compared(one, padded),
            *judged(one, 1.0, 1.0),
            *judged(other, 0.0),
            *judged("no", 0.0),
        ]
    )
    # three verdicts on the one object, of which two are good: written as it was most often
    assert found(pairs) == [(one, "no", "ratings", 0.666667, 1)]
    assert pairs.left_out == {"same_response": 2}


def test_listed_options_in_another_order_of_keys_are_no_alternatives() -> None:
    chosen, listed = '{"a": 1, "b": 2}', '{"b": 2, "a": 1}'
    evidence = [*judged(chosen, 1.0), CandidatesEvidence(TRAIN, chosen, ((listed, None), ("other", None)))]
    assert found(pairs_split_by_hash(evidence, implied=True)) == [(chosen, "other", "implied", 0.5, 1)]


# --- Ratings ----------------------------------------------------------------------------------------------


def test_the_better_mean_beats_the_worse_by_their_difference() -> None:
    # means 0.75 and 0.25; three verdicts on one side, two on the other
    pairs = pairs_split_by_hash([*judged("a", 1.0, 0.75, 0.5), *judged("b", 0.0, 0.5)])
    assert found(pairs) == [("a", "b", "ratings", 0.5, 2)]


def test_means_closer_than_the_margin_make_no_pair() -> None:
    pairs = pairs_split_by_hash([*judged("a", 0.6), *judged("b", 0.4), *judged("c", 0.0)], rating_margin=0.5)
    assert found(pairs) == [("a", "c", "ratings", 0.6, 1)]
    assert pairs.left_out == {"below_margin": 2}


def test_a_margin_is_met_where_binary_arithmetic_misses_it_by_a_hair() -> None:
    assert 0.35 - 0.1 < 0.25
    assert len(pairs_split_by_hash([*judged("a", 0.35), *judged("b", 0.1)], rating_margin=0.25).rows) == 1


def test_ratings_of_different_prompts_are_never_paired() -> None:
    pairs = pairs_split_by_hash([*judged("a", 1.0), *judged("b", 0.0, prompt="11" * 32)])
    assert pairs.rows == ()
    assert pairs.left_out == {"single_response": 2}


def test_a_prompt_with_verdicts_on_one_response_alone_is_counted() -> None:
    assert pairs_split_by_hash(judged("a", 1.0, 0.0, 1.0)).left_out == {"single_response": 1}


def test_a_thousand_responses_to_one_prompt_are_paired_from_the_ends() -> None:
    # values 0.000, 0.001, ... 0.999: the four largest differences are 999 over 0, then (by value) 999 over 1 and
    # 998 over 0, then 998 over 1, 999 over 2, 997 over 0 share third place
    evidence = [item for i in range(1000) for item in judged(f"r{i:03d}", i / 1000)]
    pairs = pairs_split_by_hash(evidence, rating_margin=0.25)
    assert found(pairs)[0] == ("r999", "r000", "ratings", 0.999, 1)
    assert {p[:2] for p in found(pairs)[1:3]} == {("r999", "r001"), ("r998", "r000")}
    # of 499,500 pairs those with i - j >= 250 are 750 * 751 / 2 = 281,625; four were kept
    assert pairs.left_out == {"below_margin": 499_500 - 281_625, "over_cap": 281_625 - 4}


# --- Candidates -------------------------------------------------------------------------------------------


def listed(choice: str, *options: str, prompt: str = TRAIN) -> CandidatesEvidence:
    return CandidatesEvidence(prompt, choice, tuple((option, None) for option in options))


def test_scored_candidates_are_paired_by_margin_without_votes() -> None:
    evidence = CandidatesEvidence(TRAIN, "a", (("a", 0.9), ("b", 0.5), ("c", 0.4)))
    pairs = pairs_split_by_hash([evidence], rating_margin=0.25)
    assert found(pairs) == [("a", "c", "candidates", 0.5, 0), ("a", "b", "candidates", 0.4, 0)]
    assert pairs.left_out == {"below_margin": 1}


def test_scores_of_a_candidate_listed_twice_are_averaged() -> None:
    pairs = pairs_split_by_hash(
        [
            CandidatesEvidence(TRAIN, "a", (("a", 0.2), ("b", 0.1))),
            CandidatesEvidence(TRAIN, "b", (("a", 1.0), ("b", 0.3))),
        ]
    )
    assert found(pairs) == [("a", "b", "candidates", 0.4, 0)]


def test_a_liked_choice_beats_one_listed_option_nobody_liked() -> None:
    pairs = pairs_split_by_hash([listed("a", "a", "b", "c"), *judged("a", 1.0, 0.75)], implied=True)
    assert len(pairs.rows) == 1
    pair = pairs.rows[0]
    # mean 0.875, which is 0.375 above neutral; two verdicts
    assert (pair.chosen, pair.source, pair.margin, pair.votes) == ("a", "implied", 0.375, 2)
    assert pair.rejected in ("b", "c")


def test_a_verdict_on_one_of_several_options_is_no_preference_unless_that_is_asked_for() -> None:
    """Nobody rated the other option: the verdict stays one, and is counted as such."""
    for value in (1.0, 0.0):
        pairs = pairs_split_by_hash([listed("a", "a", "b"), *judged("a", value)])
        assert (pairs.rows, pairs.left_out) == ((), {"single_response": 1})


def test_a_disliked_choice_of_two_loses_to_the_other() -> None:
    pairs = pairs_split_by_hash([listed("a", "a", "b"), *judged("a", 0.0)], implied=True)
    assert found(pairs) == [("b", "a", "implied", 0.5, 1)]


def test_a_disliked_choice_of_three_says_nothing() -> None:
    assert pairs_split_by_hash([listed("a", "a", "b", "c"), *judged("a", 0.0)], implied=True).rows == ()


def test_a_choice_that_was_not_listed_says_nothing() -> None:
    assert pairs_split_by_hash([listed("x", "a", "b"), *judged("x", 1.0)], implied=True).rows == ()


def test_a_lukewarm_verdict_implies_nothing() -> None:
    assert (
        pairs_split_by_hash([listed("a", "a", "b"), *judged("a", 0.7)], rating_margin=0.25, implied=True).rows
        == ()
    )


def test_two_liked_options_imply_nothing_about_each_other() -> None:
    evidence = [listed("a", "a", "b"), listed("b", "a", "b"), *judged("a", 1.0), *judged("b", 0.9)]
    assert pairs_split_by_hash(evidence, implied=True).rows == ()


def test_what_is_implied_gives_way_to_stronger_evidence_on_the_prompt() -> None:
    evidence = [listed("a", "a", "b", "c"), *judged("a", 1.0), compared("c", "b")]
    assert found(pairs_split_by_hash(evidence, implied=True)) == [("c", "b", "comparison", 1.0, 1)]


# --- Merging and majority ---------------------------------------------------------------------------------


def test_the_same_preference_twice_is_one_pair_with_two_votes() -> None:
    pairs = pairs_split_by_hash([compared("a", "b"), compared("b", "a", "right")])
    assert found(pairs) == [("a", "b", "comparison", 1.0, 2)]
    assert pairs.left_out == {"duplicate": 1}


def test_the_majority_decides_and_its_margin_shrinks_with_dissent() -> None:
    # three for, one against: margin 1 * (3 - 1) / (3 + 1)
    pairs = pairs_split_by_hash([*[compared("a", "b")] * 3, compared("b", "a")])
    assert found(pairs) == [("a", "b", "comparison", 0.5, 3)]
    assert pairs.left_out == {"outvoted": 1, "duplicate": 2}


def test_as_many_votes_for_as_against_make_no_pair() -> None:
    pairs = pairs_split_by_hash([compared("a", "b"), compared("b", "a")])
    assert pairs.rows == ()
    assert pairs.left_out == {"conflict": 1}


def test_a_pair_from_several_sources_is_named_after_the_strongest() -> None:
    # ratings say a over b by 0.5 with one vote, a comparison says it fully with one: margin (0.5 + 1) / 2
    pairs = pairs_split_by_hash([*judged("a", 1.0), *judged("b", 0.5), compared("a", "b")])
    assert found(pairs) == [("a", "b", "comparison", 0.75, 2)]


def test_a_judgement_outvotes_any_score_of_a_candidate() -> None:
    pairs = pairs_split_by_hash(
        [compared("b", "a"), CandidatesEvidence(TRAIN, "a", (("a", 1.0), ("b", 0.0)))]
    )
    assert found(pairs) == [("b", "a", "comparison", 1.0, 1)]


def test_pairs_that_somebody_judged_stand_before_pairs_of_scores() -> None:
    evidence = [
        *judged("a", 0.6),
        *judged("b", 0.2),
        CandidatesEvidence(TRAIN, "c", (("c", 1.0), ("d", 0.0))),
    ]
    assert [p.votes for p in pairs_split_by_hash(evidence).rows] == [1, 0]


# --- Caps, splits, samples --------------------------------------------------------------------------------


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


def test_a_held_out_pair_knows_every_preferred_and_dispreferred_response() -> None:
    evidence = [
        *judged("best", 1.0, prompt=HOLDOUT),
        *judged("good", 0.9, prompt=HOLDOUT),
        *judged("middling", 0.5, prompt=HOLDOUT),
        *judged("bad", 0.0, prompt=HOLDOUT),
    ]
    pair = pairs_split_by_hash(evidence, rating_margin=0.25).rows[0]
    assert pair.preferred == ("best", "good")
    assert pair.dispreferred == ("bad",)
    assert pairs_split_by_hash([compared("a", "b")]).rows[0].preferred == ()


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


def test_a_sample_is_always_the_same_and_a_larger_one_holds_a_smaller() -> None:
    pairs = pairs_split_by_hash([compared("a", "b", prompt=f"{i:02x}" * 32) for i in range(100)])
    ten, twenty = rows_sampled(pairs, 10), rows_sampled(pairs, 20)
    assert len(ten.rows) == 10
    assert ten == rows_sampled(pairs, 10)
    assert set(ten.rows) < set(twenty.rows) < set(pairs.rows)
    assert ten.left_out == {"over_max_samples": 90}
    assert rows_sampled(pairs, 100) is pairs


def test_a_pair_is_simulated_where_any_judgement_behind_it_was() -> None:
    evidence = [*judged("a", 1.0), *judged("a", 1.0, simulated=True), *judged("b", 0.0)]
    assert pairs_split_by_hash(evidence).rows[0].simulated
    assert not pairs_split_by_hash([*judged("a", 1.0), *judged("b", 0.0)]).rows[0].simulated


def test_a_pair_carries_the_tags_of_both_responses_in_order() -> None:
    evidence = [
        RatingEvidence(TRAIN, "a", 1.0, tags=("zebra", "clear")),
        RatingEvidence(TRAIN, "b", 0.0, tags=("wrong",)),
    ]
    assert pairs_split_by_hash(evidence).rows[0].tags == ("clear", "wrong", "zebra")


def test_responses_of_messages_stay_messages() -> None:
    call: Completion = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}]
    pair = pairs_split_by_hash([ComparisonEvidence(TRAIN, call, "Warm.", "left")]).rows[0]
    assert pair.chosen == call
    assert pair.rejected == "Warm."
    assert completion_of(completion_key(call)) == call


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"rating_margin": 0.0}, "rating_margin"),
        ({"rating_margin": 1.1}, "rating_margin"),
        ({"max_pairs_per_prompt": 0}, "max_pairs_per_prompt"),
    ],
)
def test_knobs_out_of_range_are_refused_by_name(knobs: dict, named: str) -> None:
    with pytest.raises(RecipeError, match=named):
        pairs_split_by_hash([], **knobs)


def test_every_reason_is_explained() -> None:
    assert all(len(text) > 20 for text in REASONS.values())
