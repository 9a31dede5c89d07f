"""Wins, losses and ties on held-out prompts, from the stored evidence of an evaluation; the page that shows them."""

from typing import Any

import pytest
from django.test import Client

from rl.models import Evaluation
from rl.registry.comparisons import LOSS, TIE, WIN, answers_compared, counts_of
from tests.support.registry_rows import make_policy
from tests.support.said import words


def answered(number: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt_hash": f"p{number}",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "answer": f"new {number}",
        "other_answer": f"old {number}",
        "valid": True,
        "other_valid": True,
        "reward": 0.5,
        "other_reward": 0.5,
        "judged": True,
        **more,
    }


def evaluation(answers: list[dict[str, Any]], *, carried_by: str = "pairs", **evidence: Any) -> Evaluation:
    return Evaluation(
        agent="shop",
        against="base",
        samples=1,
        base_model="bundled",
        figures={"carried_by": carried_by},
        evidence={"answers": answers, **evidence},
    )


def outcomes(found: Evaluation) -> dict[str, str]:
    return {one.answer: one.outcome for one in answers_compared(found)}


def test_which_answer_wins() -> None:
    # what people said of the answers decides
    better, worse = answered(1, reward=1.0), answered(2, other_reward=1.0)
    assert outcomes(evaluation([better, worse, answered(3)])) == {"new 1": WIN, "new 2": LOSS, "new 3": TIE}
    # a reward that nobody judged decides nothing
    assert outcomes(evaluation([answered(1, reward=1.0, judged=False)])) == {"new 1": TIE}
    # an answer that alone is valid wins
    expected = {"new 1": WIN, "new 2": LOSS}
    assert outcomes(evaluation([answered(1, other_valid=False), answered(2, valid=False)])) == expected
    # where the answers say nothing the pairs do
    cases = [
        {"prompt_hash": "p1", "own": True, "other": False},
        {"prompt_hash": "p2", "own": False, "other": True},
        {"prompt_hash": "p3", "own": True, "other": True},
    ]
    found = evaluation([answered(1), answered(2), answered(3), answered(4)], cases=cases)
    assert outcomes(found) == {"new 1": WIN, "new 2": LOSS, "new 3": TIE, "new 4": TIE}


def test_wins_and_their_order() -> None:
    # of rated answers towards good and away from bad is a win
    items = [
        {"prompt_hash": "p1", "value": 1.0, "shift": 0.2},
        {"prompt_hash": "p2", "value": 0.0, "shift": -0.2},
        {"prompt_hash": "p3", "value": 0.0, "shift": 0.2},
    ]
    found = evaluation([answered(1), answered(2), answered(3)], carried_by="labels", others={"labels": items})
    assert outcomes(found) == {"new 1": WIN, "new 2": WIN, "new 3": LOSS}
    # wins come first and answers that differ before those that do not
    alike = answered(1, other_answer="new 1 ", reward=1.0)
    found = answers_compared(evaluation([answered(3), alike, answered(2, reward=1.0)]))
    assert [one.answer for one in found] == ["new 2", "new 1", "new 3"]
    assert counts_of(found) == {WIN: 2, LOSS: 0, TIE: 1}


@pytest.mark.django_db
def test_the_page_leafs_through_one_kind_of_outcome(operator: Client) -> None:
    headline = {"kind": "pairs", "value": 0.7, "low": 0.6, "high": 0.8, "n": 50}
    policy = make_policy("shop", against="base", headline=headline)
    found = evaluation([answered(1, reward=1.0), answered(2, reward=1.0), answered(3, other_reward=1.0)])
    found.policy = policy
    found.save()
    address = f"/policies/{policy.name}/answers/"
    first = words(operator.get(f"{address}?show=win").text)
    assert "Wins 2 Losses 1 Ties 0" in first
    assert "1 of 2" in first
    assert "old 1" in first
    page = operator.get(f"{address}?show=win&at=2").text
    assert 'href="?show=win&amp;at=1" data-leaf="ArrowLeft"' in page
    assert "new 2" in page
    assert operator.get(f"{address}?at=999").context["at"] == 3
    assert operator.get(f"{address}?show=draw").status_code == 404
    assert address in operator.get(f"/policies/{policy.name}/").text


@pytest.mark.django_db
def test_a_policy_that_was_never_compared_says_so(operator: Client) -> None:
    assert "no answers to show yet" in operator.get(f"/policies/{make_policy('shop').name}/answers/").text


@pytest.mark.django_db
def test_the_page_of_a_policy_shows_how_closely_its_exports_answer(operator: Client) -> None:
    policy = make_policy("shop")
    of = {"prompts": 24, "positions": 321, "kl": 0.00291, "top1_agreement": 0.9875, "same_answers": 20}
    agreement = {"policy": {"texts": of, "held_out": of}, "base": {"texts": of, "held_out": of}}
    policy.artifacts.create(format="gguf", path="a.gguf", bytes=1, checked={"agreement": agreement})
    policy.artifacts.create(format="lora", path="b", bytes=1, checked={"tensors": 3})
    page = operator.get(f"/policies/{policy.name}/").text
    assert page.count("same answer to 20 of 24 held-out prompts, KL divergence 0.0029 nats per token") == 1
