"""Statistics of a dataset, and what several raters of one answer come to."""

from __future__ import annotations

from typing import Any

import pytest

from feedback.cache import forget_all
from feedback.models import AgentSettings, Decision
from feedback.services import rating_submit
from rl.datasets import (
    get_training_stats,
    prepare_training_dataset,
)
from tests.support.dataset_feedback import decide, feed, prompts_in, rate

pytestmark = pytest.mark.django_db


# --- Statistics -------------------------------------------------------------------------------------------


def test_statistics_count_balance_raters_lengths_and_duplicates() -> None:
    prompt = prompts_in("train", 1)[0]
    rate(prompt, "yes!", "up")
    rate(prompt, "yes!", "up", rater="bob")
    rate(prompt, "no", "down")
    rating_submit(decision=decide(prompt, "hm"), rater="robot", stars=3, rater_kind="simulated")
    stats = get_training_stats("helper")
    assert (stats["decisions"], stats["ratings"], stats["comparisons"]) == (4, 4, 0)
    assert stats["simulated_share"] == 0.25
    assert stats["balance"]["good"] == 2
    assert stats["balance"]["bad"] == 1
    assert stats["balance"]["neutral"] == 1
    assert stats["balance"]["good_share"]["value"] == pytest.approx(2 / 3)
    # verdicts 1, 1, 0, 0.5: mean 0.625, squared deviations 2 * 0.140625 + 0.390625 + 0.015625 = 0.6875, over 3
    assert stats["scores"]["mean"] == 0.625
    assert stats["scores"]["std"] == pytest.approx((0.6875 / 3) ** 0.5)
    assert stats["scores"]["histogram"] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 2]
    assert stats["raters"]["ann"] == {"ratings": 2, "comparisons": 0, "simulated": False, "mean_value": 0.5}
    assert stats["raters"]["robot"]["simulated"] is True
    assert stats["duplicate_responses"] == 1
    # means yes! 1, hm 0.5, no 0: three pairs
    assert stats["pairs"] == {"train": 3, "eval": 0, "holdout": 0}
    assert stats["prompts"] == 1
    assert stats["length_chars"]["chosen"] == {"min": 2, "median": 4, "p95": 4, "max": 4}
    assert stats["chosen_longer"]["value"] == pytest.approx(2 / 3)


def test_statistics_of_all_agents_are_keyed_by_agent() -> None:
    decide("q", "a", agent="one")
    decide("q", "a", agent="two")
    assert sorted(get_training_stats()["agents"]) == ["one", "two"]


def test_preparing_asks_the_database_a_fixed_number_of_questions(
    django_assert_max_num_queries: Any,
) -> None:
    feed(train=40, eval=4, holdout=4)
    with django_assert_max_num_queries(25):
        prepare_training_dataset("helper")


# --- Several raters ---------------------------------------------------------------------------------------


def judged_by_a_crowd() -> str:
    """Three raters: ann and bob agree on twenty responses, eve says the other thing; of the last one eve says good, and
    ann bad. Returns its prompt."""
    other = {"up": "down", "down": "up"}

    def said(row: Decision, **thumbs: str) -> None:
        for rater, thumb in thumbs.items():
            rating_submit(decision=row, rater=rater, thumb=thumb)

    for number in range(20):
        thumb = "up" if number % 2 else "down"
        said(decide(f"known {number}", "a"), ann=thumb, bob=thumb, eve=other[thumb])
    (prompt,) = prompts_in("train", 1)
    said(decide(prompt, "disputed"), ann="down", eve="up")
    return prompt


def score_of(prompt: str) -> tuple[float, int]:
    dataset = prepare_training_dataset("helper", "scores", min_samples=1, dry_run=True)
    (row,) = [row for row in dataset.rows() if row["prompt"][0]["content"] == prompt]
    return row["score"], row["votes"]


def test_by_majority_one_against_one_decides_nothing() -> None:
    assert score_of(judged_by_a_crowd()) == (0.5, 2)


def test_by_reliability_the_rater_who_is_usually_right_decides() -> None:
    """Where the agent wants Dawid-Skene; eve, who always errs, is as good as a no."""
    prompt = judged_by_a_crowd()
    AgentSettings.objects.create(agent="helper", aggregation="dawid_skene")
    forget_all()
    score, votes = score_of(prompt)
    assert 0 <= score < 0.1
    assert votes == 2
    dataset = prepare_training_dataset("helper", "labels", min_samples=1, dry_run=True)
    assert dataset.query["aggregation"] == "dawid_skene"
    assert "undecided" not in dataset.left_out


def test_by_reliability_what_a_person_says_goes_before_a_simulated_rater() -> None:
    prompt = judged_by_a_crowd()
    AgentSettings.objects.create(agent="helper", aggregation="dawid_skene")
    forget_all()
    rating_submit(decision=decide(prompt, "disputed"), rater="robot", thumb="up", rater_kind="simulated")
    other = decide(prompt, "another")
    rating_submit(decision=other, rater="ann", thumb="down")
    rating_submit(decision=other, rater="robot", thumb="up", rater_kind="simulated")
    dataset = prepare_training_dataset("helper", "labels", min_samples=1, dry_run=True)
    (row,) = [r for r in dataset.rows() if r["completion"] == "another"]
    assert (row["label"], row["votes"], row["simulated"]) == (False, 1, False)
    assert dataset.left_out["beside_a_person"] == 1
