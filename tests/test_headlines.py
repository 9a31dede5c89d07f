"""What leads a report: the share of answers people would like, and how often the known answer is given."""

from __future__ import annotations

from typing import Any

import pytest

from rl.gates.headlines import liked_of, right_answer_figure
from rl.training.held_out import AnswerJudge, HeldOutPrompt, liked_difference, liked_share, verdicts_on
from tests.test_evaluate import PICKER, A, M, P


def prompt(number: int, cluster: str = "", **said: Any) -> HeldOutPrompt:
    return HeldOutPrompt([{"role": "user", "content": f"q{number}"}], {"cluster": cluster}, **said)


def test_raters_who_disagree_share_an_answer_and_near_identical_prompts_count_as_one() -> None:
    prompts = [
        prompt(0, liked=[A, A], disliked=[A]),  # two of three liked it
        prompt(1, "c", liked=[A]),
        prompt(2, "c", disliked=[A]),  # one cluster with the one before: half of it
        prompt(3, demonstrations=[A]),
        prompt(4, liked=[P]),  # of another answer
    ]
    verdicts = verdicts_on(prompts, [A] * 5, AnswerJudge(PICKER, None))
    assert verdicts == {0: 2 / 3, 1: 1.0, 2: 0.0, 3: 1.0}
    share = liked_share(prompts, verdicts)
    assert share is not None
    # three clusters with a verdict, four in all: (2/3 + 1/2 + 1) / 3
    assert (share["value"], share["n"], share["of"]) == (pytest.approx(13 / 18), 3, 4)
    assert (share["least"], share["most"]) == (pytest.approx(13 / 24), pytest.approx(19 / 24))
    other = verdicts_on(prompts, [P] * 5, AnswerJudge(PICKER, None))
    assert other == {4: 1.0}
    assert liked_difference(prompts, verdicts, other)["n"] == 0  # no prompt on which both have a verdict
    assert liked_share(prompts, verdicts_on(prompts, [M] * 5, AnswerJudge(PICKER, None))) is None


RATED = {"value": 0.7, "low": 0.6, "high": 0.79, "n": 90, "of": 120, "least": 0.525, "most": 0.775}


def test_the_share_of_liked_answers_names_its_estimator_and_what_it_takes_for_granted() -> None:
    rated = {
        **RATED,
        "estimator": "rated answers",
        "assumes": "which answers to a prompt were rated is random",
    }
    theirs = {**rated, "value": 0.3, "low": 0.2, "high": 0.41}
    found = liked_of(
        {"liked": rated, "comparison": {"against": "base", "liked": theirs, "liked_difference": None}}
    )
    assert found is not None
    assert found["words"] == (
        "People would like 70.0 % [60.0, 79.0] of its answers, 30.0 % [20.0, 41.0] of base's (90 of its "
        "120 answers are rated; assuming that which answers to a prompt were rated is random; without that "
        "assumption 52.5 % to 77.5 %)."
    )
    assert liked_of({"liked": None, "off_policy": {"refused": "no log"}}) is None


@pytest.mark.parametrize(
    ("reward", "warnings", "estimator"),
    [("score", [], "off-policy"), ("score", ["few decisions"], "rated answers"), ("outcome", [], "rated answers")],
)  # fmt: skip
def test_a_log_with_propensities_and_verdicts_goes_before_rated_answers(
    reward: str, warnings: list[str], estimator: str
) -> None:
    log = {
        "reward": reward, "decisions": 400, "overlap": {"warnings": warnings},
        "doubly_robust": {"value": 0.5, "low": 0.4, "high": 0.6},
    }  # fmt: skip
    rated = {**RATED, "estimator": "rated answers", "assumes": "chance"}
    found = liked_of({"liked": rated, "off_policy": log})
    assert found is not None
    assert found["estimator"] == estimator
    assert found["value"] == (0.5 if estimator == "off-policy" else 0.7)


def test_the_known_answer_is_told_with_its_gain() -> None:
    own = {"value": 0.61, "low": 0.51, "high": 0.7, "n": 100}
    gain = {"value": 0.41, "low": 0.31, "high": 0.5}
    figures = {
        "comparison": {"against": "base"},
        "evidence": {"known": {"own": own, "against_value": 0.2, "difference": gain}},
    }
    found = right_answer_figure(figures)
    assert found is not None
    assert found["words"] == (
        "Correct by the known answer in 61.0 % [51.0, 70.0] of 100 prompts, base in 20.0 %, a paired "
        "difference of +41.0 points [+31.0, +50.0]."
    )
    assert right_answer_figure({"ground_truth": None}) is None
