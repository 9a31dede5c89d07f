"""Wins, losses and ties on held-out prompts, from the stored evidence of an evaluation; the page that shows them."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client

from rl.models import Evaluation
from rl.registry.comparisons import LOSS, TIE, WIN, answers_compared, counts_of
from tests.support.api_client import person
from tests.test_pages import make_policy, words


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
        agent="shop", against="base", samples=1, base_model="bundled",
        figures={"carried_by": carried_by}, evidence={"answers": answers, **evidence},
    )  # fmt: skip


def outcomes(found: Evaluation) -> dict[str, str]:
    return {one.answer: one.outcome for one in answers_compared(found)}


def test_what_people_said_of_the_answers_decides() -> None:
    better, worse = answered(1, reward=1.0), answered(2, other_reward=1.0)
    assert outcomes(evaluation([better, worse, answered(3)])) == {"new 1": WIN, "new 2": LOSS, "new 3": TIE}


def test_a_reward_that_nobody_judged_decides_nothing() -> None:
    assert outcomes(evaluation([answered(1, reward=1.0, judged=False)])) == {"new 1": TIE}


def test_an_answer_that_alone_is_valid_wins() -> None:
    assert outcomes(evaluation([answered(1, other_valid=False), answered(2, valid=False)])) == {
        "new 1": WIN,
        "new 2": LOSS,
    }


def test_where_the_answers_say_nothing_the_pairs_do() -> None:
    cases = [
        {"prompt_hash": "p1", "own": True, "other": False},
        {"prompt_hash": "p2", "own": False, "other": True},
        {"prompt_hash": "p3", "own": True, "other": True},
    ]
    found = evaluation([answered(1), answered(2), answered(3), answered(4)], cases=cases)
    assert outcomes(found) == {"new 1": WIN, "new 2": LOSS, "new 3": TIE, "new 4": TIE}


def test_of_rated_answers_towards_good_and_away_from_bad_is_a_win() -> None:
    items = [
        {"prompt_hash": "p1", "value": 1.0, "shift": 0.2},
        {"prompt_hash": "p2", "value": 0.0, "shift": -0.2},
        {"prompt_hash": "p3", "value": 0.0, "shift": 0.2},
    ]
    found = evaluation([answered(1), answered(2), answered(3)], carried_by="labels", others={"labels": items})
    assert outcomes(found) == {"new 1": WIN, "new 2": WIN, "new 3": LOSS}


def test_wins_come_first_and_answers_that_differ_before_those_that_do_not() -> None:
    alike = answered(1, other_answer="new 1 ", reward=1.0)
    found = answers_compared(evaluation([answered(3), alike, answered(2, reward=1.0)]))
    assert [one.answer for one in found] == ["new 2", "new 1", "new 3"]
    assert counts_of(found) == {WIN: 2, LOSS: 0, TIE: 1}


@pytest.mark.django_db
def test_the_page_leafs_through_one_kind_of_outcome(client: Client) -> None:
    client.force_login(person("the-operator", "operator"))
    headline = {"kind": "pairs", "value": 0.7, "low": 0.6, "high": 0.8, "n": 50}
    policy = make_policy("shop", against="base", headline=headline)
    found = evaluation([answered(1, reward=1.0), answered(2, reward=1.0), answered(3, other_reward=1.0)])
    found.policy = policy
    found.save()
    address = f"/policies/{policy.name}/answers/"
    first = words(client.get(f"{address}?show=win").text)
    assert "Wins 2 Losses 1 Ties 0" in first
    assert "1 of 2" in first
    assert "old 1" in first
    page = client.get(f"{address}?show=win&at=2").text
    assert 'href="?show=win&amp;at=1" data-leaf="ArrowLeft"' in page
    assert "new 2" in page
    assert client.get(f"{address}?at=999").context["at"] == 3
    assert client.get(f"{address}?show=draw").status_code == 404
    assert address in client.get(f"/policies/{policy.name}/").text


@pytest.mark.django_db
def test_a_policy_that_was_never_compared_says_so(client: Client) -> None:
    client.force_login(person("the-operator", "operator"))
    assert "not compared" in client.get(f"/policies/{make_policy('shop').name}/answers/").text


@pytest.mark.django_db
def test_the_page_of_a_policy_shows_how_closely_its_exports_answer(client: Client) -> None:
    client.force_login(person("the-operator", "operator"))
    policy = make_policy("shop")
    of = {"prompts": 24, "positions": 321, "kl": 0.00291, "top1_agreement": 0.9875, "same_answers": 20}
    agreement = {"policy": {"texts": of, "held_out": of}, "base": {"texts": of, "held_out": of}}
    policy.artifacts.create(format="gguf", path="a.gguf", bytes=1, checked={"agreement": agreement})
    policy.artifacts.create(format="lora", path="b", bytes=1, checked={"tensors": 3})
    page = client.get(f"/policies/{policy.name}/").text
    assert page.count("same answer to 20 of 24 held-out prompts, KL divergence 0.0029 nats per token") == 1
