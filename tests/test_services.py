"""The writers and readers of feedback, and what the database itself refuses."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import ProtectedError

from feedback import selectors
from feedback.models import Comparison, Decision, Outcome, Rating, prompt_hash
from feedback.services import (
    FeedbackConflict,
    FeedbackRefused,
    comparison_submit,
    comparison_withdraw,
    decision_record,
    decisions_record,
    rating_submit,
    rating_withdraw,
)

pytestmark = pytest.mark.django_db

ID = "11111111-1111-4111-8111-111111111111"


def decide(response: str = "yes", prompt: str = "May I?", agent: str = "helper", **facts: Any) -> Decision:
    return decision_record(agent=agent, messages=prompt, response=response, **facts).row


def faults(error: pytest.ExceptionInfo[FeedbackRefused]) -> set[str]:
    return set(error.value.fields)


# --- Decisions --------------------------------------------------------------------------------------------


def test_the_prompt_hash_is_of_the_agent_and_the_canonical_prompt() -> None:
    # printf '%s' '["widgets",[{"content":"hi","role":"user"}]]' | sha256sum
    known = "df9fab98a9f0297149f26f0d712f2bbb56bfc52108009b91a66471ec0f92b23a"
    assert prompt_hash("widgets", [{"role": "user", "content": "hi"}]) == known
    assert prompt_hash("widgets", [{"content": "hi", "role": "user"}]) == known
    assert decide(prompt="hi", agent="widgets").prompt_hash == known
    assert decide(prompt="hi", agent="filer").prompt_hash != known


def drawn(*probabilities: float) -> list[dict[str, Any]]:
    """Candidates a, b, ... with the probability each was drawn by."""
    return [{"response": name, "probability": p} for name, p in zip("abc", probabilities, strict=False)]


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        ({"agent": "-dash"}, "agent"),
        ({"propensity": float("nan")}, "propensity"),
        ({"state": {"x": float("inf")}}, "state"),
        ({"state": {1, 2}}, "state"),
        ({"candidates": drawn(0.5, 0.4), "propensity": 0.5}, "candidates"),
        ({"candidates": drawn(1.5, -0.5), "propensity": 0.5}, "candidates"),
        ({"candidates": drawn(0.7, 0.3), "propensity": 0.3}, "propensity"),
    ],
)
def test_a_fault_that_json_cannot_send_is_refused_by_field_too(facts: dict[str, Any], field: str) -> None:
    with pytest.raises(FeedbackRefused) as error:
        decision_record(**{"agent": "helper", "messages": "q", "response": "a", **facts})
    assert faults(error) == {field}
    assert re.search("expected|required", error.value.fields[field])
    assert Decision.objects.count() == 0


@pytest.mark.parametrize(
    ("candidates", "propensity"),
    [
        (drawn(0.7, 0.299), 0.7),  # logs keep few digits
        (drawn(0.7, 0.3), 0.705),
        (drawn(0.5, 0.4), None),  # without a propensity they are a model's own, of which nothing is estimated
        ([{"response": "a", "probability": 0.4}, "b"], 0.9),  # not all are known
        ([*drawn(0.4, 0.2), {"response": "a", "probability": 0.4}], 0.8),  # listed twice: either may be meant
    ],
)
def test_probabilities_that_contradict_nothing_are_taken(candidates: Any, propensity: float | None) -> None:
    assert decision_record(
        agent="a", messages="q", response="a", candidates=candidates, propensity=propensity
    ).created


def test_an_empty_response_is_a_fact_and_is_kept() -> None:
    assert decide(response="").response == ""


def test_a_text_that_spells_an_escape_is_no_nul() -> None:
    spelled = "a backslash and \\u0000 in words"
    assert Decision.objects.get(pk=decide(state={"text": spelled}).pk).state == {"text": spelled}


def test_many_decisions_are_written_all_or_none() -> None:
    good = {"agent": "helper", "messages": "q", "response": "a"}
    with pytest.raises(FeedbackRefused):
        decisions_record([good, {**good, "propensity": 2}])
    assert Decision.objects.count() == 0
    decisions_record([{**good, "id": ID}])
    with pytest.raises(FeedbackConflict):
        decisions_record([good, {**good, "id": ID, "response": "other"}])
    assert Decision.objects.count() == 1


@pytest.mark.slow
def test_many_decisions_keep_the_ones_that_were_there() -> None:
    good = {"agent": "helper", "messages": "q", "response": "a"}
    decisions_record([{**good, "id": ID}])
    written = decisions_record([{**good, "id": ID}, *[{**good, "unit": str(i)} for i in range(2500)]])
    assert [w.created for w in written] == [False] + [True] * 2500
    assert Decision.objects.count() == 2501


# --- Ratings ----------------------------------------------------------------------------------------------


def test_a_withdrawn_rating_stands_no_more_and_can_be_given_again() -> None:
    decision = decide()
    rating = rating_submit(decision=decision, rater="ann", thumb="down").row
    rating_withdraw(rating)
    assert not selectors.ratings_standing().exists()
    again = rating_submit(decision=decision, rater="ann", thumb="up").row
    assert list(selectors.ratings_standing()) == [again]
    assert Rating.objects.count() == 3


def test_a_rating_is_withdrawn_once() -> None:
    rating = rating_submit(decision=decide(), rater="ann", thumb="down").row
    rating_withdraw(rating)
    with pytest.raises(FeedbackConflict, match="undone already"):
        rating_withdraw(rating)


def test_a_superseded_rating_cannot_be_withdrawn() -> None:
    decision = decide()
    old = rating_submit(decision=decision, rater="ann", thumb="down").row
    rating_submit(decision=decision, rater="ann", thumb="up")
    with pytest.raises(FeedbackConflict):
        rating_withdraw(old)
    assert selectors.ratings_standing().count() == 1


def test_a_rating_sent_again_does_not_bring_back_what_was_changed_since() -> None:
    decision = decide()
    rating_submit(decision=decision, rater="ann", thumb="down", id=ID)
    newer = rating_submit(decision=decision, rater="ann", thumb="up").row
    assert rating_submit(decision=decision, rater="ann", thumb="down", id=ID).created is False
    assert list(selectors.ratings_standing()) == [newer]


def test_a_withdrawal_sent_again_is_the_first_one() -> None:
    rating = rating_submit(decision=decide(), rater="ann", thumb="up").row
    assert rating_withdraw(rating, id=ID).created is True
    assert rating_withdraw(rating, id=ID).created is False
    assert Rating.objects.count() == 2


def test_standing_human_ratings_are_counted_on_the_decision() -> None:
    def count() -> int:
        return Decision.objects.get(pk=decision.pk).ratings_human

    decision = decide()
    first = rating_submit(decision=decision, rater="ann", thumb="up", id=ID).row
    assert count() == 1
    rating_submit(decision=decision, rater="ann", thumb="up", id=ID)
    assert count() == 1, "a retry is no second rating"
    rating_submit(decision=decision, rater="ann", thumb="down")
    assert count() == 1, "a changed mind is no second rating"
    rating_submit(decision=decision, rater="robot", thumb="up", rater_kind="simulated")
    assert count() == 1, "a simulated rater is nobody"
    rating_withdraw(Rating.objects.get(supersedes=first))
    assert count() == 0
    rating_submit(decision=decision, rater="ann", thumb="up")
    assert count() == 1


# --- Comparisons ------------------------------------------------------------------------------------------


def test_a_withdrawn_comparison_stands_no_more() -> None:
    comparison = comparison_submit(left=decide("a"), right=decide("b"), preference="left", rater="ann").row
    comparison_withdraw(comparison)
    assert not selectors.comparisons_standing().exists()
    with pytest.raises(FeedbackConflict):
        comparison_withdraw(comparison)


# --- What the database itself refuses ---------------------------------------------------------------------


def refused_by_the_database(constraint: str, row: Any) -> None:
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic():
        row.save(force_insert=True)


@pytest.mark.parametrize(
    ("facts", "constraint"),
    [
        ({"propensity": 0.0}, "decision_propensity_in_0_1"),
        ({"propensity": 1.1}, "decision_propensity_in_0_1"),
        ({"latency_ms": -1.0}, "decision_latency_not_negative"),
        ({"agent": ""}, "decision_has_agent"),
        ({"prompt_hash": ""}, "decision_has_prompt_hash"),
    ],
)
def test_the_database_refuses_a_decision_that_cannot_be(facts: dict[str, Any], constraint: str) -> None:
    row = Decision(**{"agent": "helper", "messages": [], "prompt_hash": "00", "response": "", **facts})
    refused_by_the_database(constraint, row)


@pytest.mark.parametrize(
    ("facts", "constraint"),
    [
        ({"stars": 6}, "rating_stars_1_to_5"),
        ({"stars": 0}, "rating_stars_1_to_5"),
        ({"score": 1.5}, "rating_score_in_0_1"),
        ({"thumb": "meh"}, "rating_thumb_known"),
        ({"thumb": ""}, "rating_says_something"),
        ({"rater": ""}, "rating_has_rater"),
        ({"withdrawn": True}, "rating_withdrawal_withdraws_something"),
    ],
)
def test_the_database_refuses_a_rating_that_cannot_be(facts: dict[str, Any], constraint: str) -> None:
    refused_by_the_database(
        constraint, Rating(**{"decision": decide(), "rater": "ann", "thumb": "up", **facts})
    )


def test_the_database_keeps_one_first_rating_per_rater() -> None:
    decision = decide()
    rating_submit(decision=decision, rater="ann", thumb="up")
    with pytest.raises(IntegrityError), transaction.atomic():
        Rating(decision=decision, rater="ann", thumb="down").save(force_insert=True)


def test_the_database_lets_one_row_alone_supersede_another() -> None:
    decision = decide()
    first = rating_submit(decision=decision, rater="ann", thumb="up").row
    rating_submit(decision=decision, rater="ann", thumb="down")
    with pytest.raises(IntegrityError), transaction.atomic():
        Rating(decision=decision, rater="ann", thumb="up", supersedes=first).save(force_insert=True)


def test_the_database_refuses_a_comparison_that_cannot_be() -> None:
    left, right = decide("a"), decide("b")
    said: dict[str, Any] = {"left": left, "right": right, "rater": "ann", "preference": "left"}
    refused_by_the_database("comparison_of_two_decisions", Comparison(**{**said, "right": left}))
    refused_by_the_database("comparison_preference_known", Comparison(**{**said, "preference": "up"}))
    refused_by_the_database("comparison_preference_known", Comparison(**{**said, "preference": ""}))
    refused_by_the_database("comparison_has_rater", Comparison(**{**said, "rater": ""}))
    refused_by_the_database(
        "comparison_withdrawal_withdraws_something", Comparison(**{**said, "withdrawn": True})
    )


def test_the_database_refuses_an_outcome_without_a_name() -> None:
    refused_by_the_database("outcome_has_name", Outcome(decision=decide(), name="", value=1.0))


def test_a_decision_with_feedback_cannot_be_deleted() -> None:
    decision = decide()
    rating_submit(decision=decision, rater="ann", thumb="up")
    with pytest.raises(ProtectedError):
        decision.delete()


# --- Selectors --------------------------------------------------------------------------------------------


def test_counts_are_of_what_stands() -> None:
    one, two = decide("a"), decide("b")
    rating_submit(decision=one, rater="ann", thumb="up")
    rating_submit(decision=one, rater="ann", thumb="down", correction="c")
    rating_withdraw(rating_submit(decision=two, rater="ann", thumb="up").row)
    rating_submit(decision=two, rater="robot", thumb="up", rater_kind="simulated")
    comparison_submit(left=one, right=two, preference="left", rater="ann")
    rating_submit(decision=decide("x", agent="other"), rater="ann", thumb="up")
    counts = selectors.feedback_counts("helper")
    assert (counts.decisions, counts.ratings, counts.comparisons) == (2, 2, 1)
    assert (counts.corrections, counts.simulated, counts.feedback) == (1, 1, 3)


def test_counts_of_an_agent_nobody_knows_are_zero() -> None:
    counts = selectors.feedback_counts("nobody")
    assert (counts.decisions, counts.feedback, counts.newest_at) == (0, 0, None)


def test_known_agents_are_sorted_and_named_once() -> None:
    for agent in ("widgets", "filer", "widgets"):
        decide(agent=agent)
    assert selectors.agent_slugs() == ["filer", "widgets"]


def test_standing_ratings_come_oldest_first() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    for days, rater in ((2, "late"), (0, "early"), (1, "mid")):
        rating_submit(decision=decide(), rater=rater, thumb="up", created_at=now + timedelta(days=days))
    assert [r.rater for r in selectors.ratings_standing()] == ["early", "mid", "late"]


def test_facts_name_what_was_judged_and_leave_out_what_was_not() -> None:
    rated, compared, other = decide("a"), decide("b"), decide("c", state={"x": 1})
    decide("unrated")
    scored = decide("d", candidates=[{"response": "d", "score": 0.5}])
    rating_submit(decision=rated, rater="ann", stars=4, tags=["t"])
    comparison_submit(left=compared, right=other, preference="left", rater="ann")
    facts = {fact.response: fact for fact in selectors.response_facts("helper")}
    assert {r: f.judged for r, f in facts.items()} == {"a": True, "b": True, "c": True, "d": False}
    assert facts["c"].has_state
    assert not facts["a"].has_state
    assert facts["d"].id == scored.pk
    (rating,) = selectors.rating_facts("helper")
    assert (rating.decision, rating.stars, rating.tags) == (rated.pk, 4, ["t"])
    (comparison,) = selectors.comparison_facts("helper")
    assert (comparison.left, comparison.right) == (compared.pk, other.pk)
    (prompt,) = selectors.prompt_facts([other.pk])
    assert (prompt.state, prompt.messages) == ({"x": 1}, [{"role": "user", "content": "May I?"}])
