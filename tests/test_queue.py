"""The queue: who sees which decision next."""

import json
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from feedback.explorer.search import DecisionFilter
from feedback.models import AgentSettings, Decision, Lease, RaterKind
from feedback.rating import queue
from feedback.rating.queue import (
    LEASE,
    decision_take,
    lease_release,
    lease_take,
    next_decision,
    queue_progress,
)
from feedback.services import decision_record, rating_submit, rating_withdraw
from feedback.storage import sampling
from tests.support.postgres import fresh_database
from tests.support.postgres import postgres_url as postgres_url
from tests.support.said import command
from tests.support.server import Server

pytestmark = pytest.mark.django_db

START = timezone.now() - timedelta(days=1)


def decide(number: int, prompt: str = "", agent: str = "assistant", **facts: Any) -> Decision:
    """A decision recorded `number` minutes after the start."""
    return decision_record(
        agent=agent,
        messages=prompt or f"prompt {number}",
        response=f"response {number}",
        **{"created_at": START + timedelta(minutes=number)} | facts,
    ).row


def rate(decision: Decision, rater: str = "ada", **facts: Any) -> Any:
    return rating_submit(decision=decision, rater=rater, **({"thumb": "up"} | facts)).row


def test_the_oldest_comes_first_until_a_person_rated_it() -> None:
    assert next_decision("ada") is None
    later, first = decide(5), decide(1)
    assert next_decision("ada") == first
    rate(first, rater="simulated-1", rater_kind=RaterKind.SIMULATED)
    assert next_decision("ada") == first
    rating = rate(first)
    assert [next_decision(name) for name in ("ada", "bob")] == [later, later]
    rating_withdraw(rating)
    assert next_decision("ada") == first


def test_where_two_ratings_are_wanted_the_second_comes_from_another_person() -> None:
    decision = decide(1)
    Decision.objects.update(ratings_wanted=2)
    rate(decision, rater="ada")
    assert next_decision("ada") is None
    assert next_decision("bob") == decision
    rate(decision, rater="bob")
    assert next_decision("eve") is None


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
    for rated, following in ((shared[0], shared[1]), (shared[1], other), (other, shared[2])):
        rate(rated)
        assert next_decision("ada") == following
    monkeypatch.setattr(queue, "SAME_PROMPT_RUN", 1)
    rate(shared[2])
    assert next_decision("ada") == shared[3]  # a long run goes on where nothing else is left


def test_skipped_decisions_and_those_of_other_agents_are_passed_over() -> None:
    first, second, mine = decide(1), decide(2), decide(3, agent="helpdesk")
    assert next_decision("ada", skip=[str(first.pk)]) == second
    assert next_decision("ada", skip=[first.pk, second.pk, mine.pk]) is None
    assert next_decision("ada", DecisionFilter(agent="helpdesk")) == mine
    assert next_decision("ada", DecisionFilter(agent="nobody")) is None


def test_ties_in_time_are_settled_by_id() -> None:
    for pk in reversed(ids := sorted(uuid.uuid4() for _ in range(5))):
        decide(1, id=pk)
    Decision.objects.update(created_at=START)
    assert next_decision("ada").pk == ids[0]


def test_the_next_takes_four_queries(django_assert_max_num_queries: DjangoAssertNumQueries) -> None:
    for number in range(30):
        decide(number, f"prompt {number % 5}")
    rate(decide(40, "prompt 3"))
    with django_assert_max_num_queries(4):
        next_decision("ada")


def test_progress_counts_what_stands_today_and_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two, three, four = (decide(number) for number in range(4))
    decide(5)
    rate(one)
    rate(one, thumb="down")  # counts once
    rating_withdraw(rate(two))
    rate(three, created_at=timezone.now() - timedelta(days=2))
    rate(four, rater="bob")
    progress = queue_progress("ada")
    assert (progress.today, progress.left, progress.any_decision, progress.total) == (1, 2, True, 3)
    nothing = queue_progress("ada", DecisionFilter(agent="helpdesk"))
    assert (nothing.today, nothing.left, nothing.any_decision) == (0, 0, False)
    monkeypatch.setattr(queue, "COUNT_LIMIT", 1)
    assert (queue_progress("ada").left, queue_progress("ada").left_text) == (1, "1+")


def test_what_the_policy_was_unsure_of_comes_before_what_is_older() -> None:
    decide(1, propensity=0.9)
    unsure = decide(2, propensity=0.4)
    assert next_decision("ada") == unsure


def test_a_narrow_margin_between_candidates_is_doubt() -> None:
    candidates = [{"response": r, "score": s} for r, s in (("a", 0.2), ("b", 0.9), ("c", 0.8))]
    # 1 - (0.9 - 0.8)
    assert decide(1, candidates=candidates, propensity=1.0).annotation_priority == pytest.approx(0.9)
    for known in ({}, {"candidates": ["a", "b"]}, {"candidates": [{"response": "a", "score": 0.5}]}):
        assert decide(1, **known).annotation_priority == 0.0


def test_what_raters_disagree_on_comes_before_what_they_agree_on() -> None:
    agreed, disputed = decide(1), decide(2)
    Decision.objects.update(ratings_wanted=3)
    for decision, second in ((agreed, {"stars": 4}), (disputed, {"stars": 2})):
        rate(decision, rater="bob", thumb="up")
        rate(decision, rater="eve", **({"thumb": ""} | second))
    # good is 1, four stars are 3/4, two are 1/4
    worth = dict(Decision.objects.values_list("pk", "annotation_priority"))
    assert worth == {agreed.pk: 0.25, disputed.pk: 0.75}
    assert next_decision("ada") == disputed


def test_a_dispute_that_was_taken_back_is_none() -> None:
    decision = decide(1)
    Decision.objects.update(ratings_wanted=4)
    rate(decision, rater="bob")
    rate(decision, rater="carl")
    rating_withdraw(rate(decision, rater="eve", thumb="down"))
    decision.refresh_from_db()
    assert decision.annotation_priority == 0.0


def test_fewer_ratings_come_before_a_dispute() -> None:
    disputed = decide(1)
    Decision.objects.update(ratings_wanted=3)
    rate(disputed, rater="bob")
    rate(disputed, rater="eve", thumb="down")
    unrated = decide(2)
    assert next_decision("ada") == unrated


def test_of_equals_a_prompt_nobody_rated_comes_first() -> None:
    rate(decide(1, "known"), rater="bob")
    decide(2, "known")
    new = decide(3, "new")
    assert next_decision("ada") == new


def test_two_raters_do_not_get_the_same_card() -> None:
    first, second = decide(1), decide(2)
    assert decision_take("ada") == first
    assert decision_take("bob") == second
    assert decision_take("eve") is None
    assert decision_take("ada") == first, "what is in her own hand is still hers"


def test_where_two_ratings_are_wanted_two_raters_get_the_card_at_once() -> None:
    decision = decide(1)
    Decision.objects.update(ratings_wanted=2)
    assert [decision_take(name) for name in ("ada", "bob", "eve")] == [decision, decision, None]


def test_a_lease_lasts_ten_minutes_and_is_renewed_when_the_card_is_shown_again() -> None:
    decision = decide(1)
    decision_take("ada")
    Lease.objects.update(until=timezone.now() + timedelta(minutes=1))
    decision_take("ada")
    lease = Lease.objects.get(decision=decision)
    assert timedelta(minutes=9) < lease.until - timezone.now() <= LEASE == timedelta(minutes=10)
    Lease.objects.update(until=timezone.now() - timedelta(seconds=1))
    assert decision_take("bob") == decision
    assert not lease_take("ada", decision.pk)
    rate(decision, rater="bob")
    assert not lease_take("eve", decision.pk)


def test_letting_go_frees_the_card_and_what_was_held_too_long() -> None:
    first, second = decide(1), decide(2)
    decision_take("ada")
    Lease.objects.create(decision=second, rater="ada", until=timezone.now() - timedelta(hours=1))
    lease_release("ada", first.pk)
    assert not Lease.objects.exists()
    assert decision_take("bob") == first


def test_the_card_ahead_is_the_one_that_follows_and_is_kept_too() -> None:
    first = decide(1, "shared")
    decide(2, "another")
    sibling = decide(3, "shared")
    assert decision_take("ada") == first
    assert decision_take("ada", after=first) == sibling
    assert decision_take("bob", after=None) not in (first, sibling)


def test_the_queue_is_narrowed_by_tag_policy_and_day() -> None:
    plain = decide(1)
    tagged = decide(2, tags=['very "odd"', "b"])
    by_policy = decide(3, policy="assistant-v2")
    old = decide(4)
    Decision.objects.filter(pk=old.pk).update(created_at=START - timedelta(days=30))
    day = (START - timedelta(days=30)).date()
    assert next_decision("ada", DecisionFilter(tag='very "odd"')) == tagged
    assert next_decision("ada", DecisionFilter(tag="odd")) is None
    assert next_decision("ada", DecisionFilter(policy="assistant-v2")) == by_policy
    assert next_decision("ada", DecisionFilter(until=day)) == old
    assert next_decision("ada", DecisionFilter(until=day - timedelta(days=1))) is None
    assert next_decision("ada", DecisionFilter(since=day + timedelta(days=1))) == plain


@pytest.mark.parametrize("place", range(5))
def test_the_queue_of_a_tag_holds_a_decision_once_wherever_the_tag_stands(place: int) -> None:
    decide(1, tags=[f"other-{number}" for number in range(6)])
    tags = [f"another-{number}" for number in range(5)]
    tags.insert(place, "asked")
    tagged = decide(2, tags=tags)
    within = DecisionFilter(tag="asked")
    assert next_decision("ada", within) == tagged
    assert queue_progress("ada", within).left == 1
    rate(tagged, rater="bob")
    assert next_decision("ada", within) is None
    assert queue_progress("ada", within).left == 0


def test_the_first_of_all_lanes_of_a_tag_comes_first() -> None:
    decide(3, tags=["asked"])
    first = decide(1, tags=["b", "c", "d", "asked"])
    decide(2, tags=["b", "asked"])
    assert next_decision("ada", DecisionFilter(tag="asked")) == first


def test_within_days_what_is_worth_asking_comes_first_and_then_what_is_older() -> None:
    decide(0, propensity=0.1, created_at=START - timedelta(days=9))
    plain, doubted = decide(1), decide(2, propensity=0.9)
    rated = decide(0)
    Decision.objects.filter(pk=rated.pk).update(ratings_wanted=2)
    rate(rated, rater="bob")
    within = DecisionFilter(since=START.date())
    found = []
    while (decision := next_decision("ada", within)) is not None:
        found.append(decision)
        rate(decision)
    assert found == [doubted, plain, rated]


def test_much_that_is_held_or_rated_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "WINDOW", 2)
    decisions = [decide(number) for number in range(9)]
    Decision.objects.update(ratings_wanted=2)
    for decision in decisions[:5]:
        rate(decision)
    for decision in decisions[5:8]:
        assert lease_take("bob", decision.pk)
        assert lease_take("eve", decision.pk)
    assert next_decision("ada") == decisions[8]
    rate(decisions[8])
    assert next_decision("ada") is None
    assert queue_progress("ada").left == 3


LANES = """
import json
from datetime import date
from django.db import connection
from feedback.models import Decision
from feedback.rating.queue import next_decision, queue_progress
from feedback.rating.queue import queue_sort, queue_segments
from feedback.explorer.search import DecisionFilter
from feedback.services import decision_record, decisions_record
decisions_record(
    {
        "agent": "b" if number % 10 else "a",
        "messages": f"q {number}",
        "response": "r",
        "policy": "b-v1" if number % 10 else "a-v1",
        "tags": ["asked"] if number % 300 == 0 else [],
    }
    for number in range(900)
)
last = decision_record(agent="a", messages="q", response="r", tags=["b", "c", "d", "e", "asked"]).row
with connection.cursor() as cursor:
    cursor.execute("ANALYZE")
    cursor.execute("SET enable_seqscan = off")
    cursor.execute("SET enable_bitmapscan = off")
plans = [
    [queue_sort(index_range)[:50].explain() for index_range in next(queue_segments(within)).ranges[:3]]
    for within in (
        DecisionFilter(), DecisionFilter(agent="a"), DecisionFilter(policy="a-v1"), DecisionFilter(tag="asked"),
    )
]
seen, within = [], DecisionFilter(tag="asked")
while (decision := next_decision("ada", within, seen)) is not None:
    seen.append(decision.pk)
print(json.dumps([plans, len(seen), seen[-1] == last.pk, queue_progress("ada", within).left]))
"""


@pytest.mark.campaign
@pytest.mark.postgres
def test_postgresql_walks_each_lane_along_its_index(postgres_url: str, tmp_path: Path) -> None:
    server = Server(fresh_database(postgres_url), tmp_path)
    server.migrate()
    plans, seen, last, left = json.loads(server.manage("shell", "-c", LANES).splitlines()[-1])
    assert (seen, last, left) == (4, True, 4)
    for within, index in zip(plans, ("decision_asking", "by_agent", "by_policy", "by_tag"), strict=True):
        for plan in within:
            assert index in plan
            assert "Sort" not in plan


def wanted() -> list[int]:
    return sorted(Decision.objects.filter(agent="assistant").values_list("ratings_wanted", flat=True))


def test_changed_settings_count_for_decisions_recorded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BATCH", 2)
    decisions = [decide(number) for number in range(5)]
    other = decide(9, agent="helpdesk")
    for decision in decisions:
        rate(decision)
    assert next_decision("bob", DecisionFilter(agent="assistant")) is None
    settings = AgentSettings.objects.create(agent="assistant", ratings_wanted=2)
    assert sampling.ratings_wanted_refresh("assistant") == 5
    assert (wanted(), next_decision("bob", DecisionFilter(agent="assistant"))) == ([2] * 5, decisions[0])
    other.refresh_from_db()
    assert other.ratings_wanted == 1
    settings.ratings_wanted = 1
    settings.save()
    assert sampling.ratings_wanted_refresh("assistant") == 5
    assert next_decision("bob", DecisionFilter(agent="assistant")) is None
    assert sampling.ratings_wanted_refresh("assistant") == 0


def test_the_share_rated_twice_is_the_same_for_decisions_recorded_before_and_after() -> None:
    ids = [uuid.UUID(int=number) for number in range(40)]
    for number, pk in enumerate(ids[:20]):
        decide(number, id=pk)
    AgentSettings.objects.create(agent="assistant", overlap_share=0.5, overlap_ratings=3)
    sampling.ratings_wanted_refresh("assistant")
    for number, pk in enumerate(ids[20:], start=20):
        decide(number, id=pk)
    twice = set(Decision.objects.filter(ratings_wanted=3).values_list("pk", flat=True))
    assert twice == {pk for pk in ids if sampling.rating_target("assistant", pk) == 3}
    assert {1, 3} == set(wanted())


def test_the_command_says_how_many_it_changed_and_refuses_an_unknown_agent() -> None:
    decide(1)
    AgentSettings.objects.create(agent="assistant", ratings_wanted=4)
    out = command("renew_queue", "--agent", "assistant")
    assert out == {"agent": "assistant", "changed": 1}
    with pytest.raises(CommandError, match="agent 'nobody'"):
        call_command("renew_queue", "--agent", "nobody")
