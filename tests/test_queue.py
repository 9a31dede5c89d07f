"""The queue: who sees which decision next."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from feedback import queue
from feedback.models import Decision, RaterKind
from feedback.queue import decisions_queued, next_decision, queue_progress
from feedback.services import decision_record, rating_submit, rating_withdraw

pytestmark = pytest.mark.django_db

START = timezone.now() - timedelta(days=1)


def decide(number: int, prompt: str = "", agent: str = "assistant", **facts: Any) -> Decision:
    """A decision recorded `number` minutes after the start."""
    return decision_record(
        agent=agent,
        messages=prompt or f"prompt {number}",
        response=f"response {number}",
        created_at=START + timedelta(minutes=number),
        **facts,
    ).row


def rate(decision: Decision, rater: str = "ada", **facts: Any) -> Any:
    return rating_submit(decision=decision, rater=rater, **({"thumb": "up"} | facts)).row


def test_the_oldest_comes_first() -> None:
    later, first = decide(5), decide(1)
    assert next_decision("ada") == first
    rate(first)
    assert next_decision("ada") == later


def test_an_empty_queue_has_no_next() -> None:
    assert next_decision("ada") is None


def test_one_rating_by_a_person_takes_a_decision_out_of_every_queue() -> None:
    rate(decide(1), rater="ada")
    assert next_decision("ada") is None
    assert next_decision("bob") is None


def test_a_simulated_rating_takes_nothing_out() -> None:
    decision = decide(1)
    rate(decision, rater="simulated-1", rater_kind=RaterKind.SIMULATED)
    assert next_decision("ada") == decision


def test_where_two_ratings_are_wanted_the_second_comes_from_another_person() -> None:
    decision = decide(1)
    Decision.objects.update(ratings_wanted=2)
    rate(decision, rater="ada")
    assert next_decision("ada") is None
    assert next_decision("bob") == decision
    rate(decision, rater="bob")
    assert next_decision("eve") is None


def test_a_withdrawn_rating_brings_the_decision_back() -> None:
    decision = decide(1)
    rating_withdraw(rate(decision))
    assert next_decision("ada") == decision


def test_other_responses_to_the_prompt_just_rated_come_before_older_decisions() -> None:
    first = decide(1, "shared")
    decide(2, "another")
    second = decide(3, "shared")
    rate(first)
    assert next_decision("ada") == second


def test_the_same_words_to_another_agent_are_another_prompt() -> None:
    first = decide(1, "shared")
    between = decide(2, "another")
    decide(3, "shared", agent="helpdesk")
    rate(first)
    assert next_decision("ada") == between


def test_one_prompt_with_many_responses_does_not_hold_up_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SAME_PROMPT_RUN", 2)
    shared = [decide(number, "shared") for number in range(1, 5)]
    other = decide(9, "another")
    rate(shared[0])
    assert next_decision("ada") == shared[1]
    rate(shared[1])
    assert next_decision("ada") == other
    rate(other)
    assert next_decision("ada") == shared[2]


def test_a_long_run_goes_on_where_nothing_else_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "SAME_PROMPT_RUN", 1)
    one, two = decide(1, "shared"), decide(2, "shared")
    rate(one)
    assert next_decision("ada") == two


def test_skipped_decisions_are_passed_over() -> None:
    first, second = decide(1), decide(2)
    assert next_decision("ada", skip=[str(first.pk)]) == second
    assert next_decision("ada", skip=[first.pk, second.pk]) is None


def test_an_agent_has_a_queue_of_its_own() -> None:
    decide(1)
    mine = decide(2, agent="helpdesk")
    assert next_decision("ada", "helpdesk") == mine
    assert next_decision("ada", "nobody") is None


def test_ties_in_time_are_settled_by_id() -> None:
    ids = sorted(uuid.uuid4() for _ in range(5))
    for pk in reversed(ids):
        decide(1, id=pk)
    Decision.objects.update(created_at=START)
    found = next_decision("ada")
    assert found is not None
    assert found.pk == ids[0]


def test_the_next_decision_takes_at_most_three_queries(
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    for number in range(30):
        decide(number, f"prompt {number % 5}")
    rate(decide(40, "prompt 3"))
    with django_assert_max_num_queries(3):
        next_decision("ada")


@pytest.mark.parametrize("agent", [None, "assistant"])
def test_the_queue_is_read_in_the_order_of_its_index(agent: str | None) -> None:
    for number in range(20):
        decide(number)
    plan = decisions_queued("ada", agent).order_by("ratings_human", "created_at", "id")[:1].explain()
    if connection.vendor == "sqlite":
        assert "decision_queue" in plan
        assert "USE TEMP B-TREE FOR ORDER BY" not in plan


def test_progress_counts_what_stands_today_and_what_is_left() -> None:
    one, two, three, four = (decide(number) for number in range(4))
    decide(5)
    rate(one)
    rating_withdraw(rate(two))
    rate(three, created_at=timezone.now() - timedelta(days=2))
    rate(four, rater="bob")
    progress = queue_progress("ada")
    assert (progress.today, progress.left, progress.any_decision) == (1, 2, True)
    assert progress.total == 3


def test_rating_a_decision_twice_counts_once() -> None:
    decision = decide(1)
    rate(decision)
    rate(decision, thumb="down")
    assert queue_progress("ada").today == 1


def test_a_long_queue_is_counted_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "COUNT_LIMIT", 3)
    for number in range(5):
        decide(number)
    progress = queue_progress("ada")
    assert (progress.left, progress.left_text) == (3, "3+")


def test_progress_of_an_agent_without_decisions() -> None:
    decide(1)
    progress = queue_progress("ada", "helpdesk")
    assert (progress.today, progress.left, progress.any_decision) == (0, 0, False)
