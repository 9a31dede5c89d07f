"""The writers and readers of feedback, and what the database itself refuses."""

import re
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.db.models import Model, ProtectedError

from feedback import selectors
from feedback.models import Comparison, Decision, Outcome, Rating, prompt_hash
from feedback.services import (
    FeedbackConflict,
    FeedbackRefused,
    comparison_submit,
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


def test_an_empty_response_is_kept_and_a_text_that_spells_an_escape_is_no_nul() -> None:
    spelled = {"text": "a backslash and \\u0000 in words"}
    row = Decision.objects.get(pk=decide(response="", state=spelled).pk)
    assert (row.response, row.state) == ("", spelled)


def test_many_decisions_are_written_all_or_none() -> None:
    good = {"agent": "helper", "messages": "q", "response": "a"}
    with pytest.raises(FeedbackRefused):
        decisions_record([good, {**good, "propensity": 2}])
    assert Decision.objects.count() == 0
    decisions_record([{**good, "id": ID}])
    with pytest.raises(FeedbackConflict):
        decisions_record([good, {**good, "id": ID, "response": "other"}])
    assert Decision.objects.count() == 1


def test_a_withdrawn_rating_stands_no_more_and_can_be_given_again() -> None:
    decision = decide()
    rating = rating_submit(decision=decision, rater="ann", thumb="down").row
    rating_withdraw(rating)
    assert not selectors.ratings_standing().exists()
    with pytest.raises(FeedbackConflict):
        rating_withdraw(rating)
    again = rating_submit(decision=decision, rater="ann", thumb="up").row
    assert list(selectors.ratings_standing()) == [again]
    assert Rating.objects.count() == 3
    rating_submit(decision=decision, rater="ann", thumb="down")
    with pytest.raises(FeedbackConflict):
        rating_withdraw(again)  # superseded
    assert selectors.ratings_standing().count() == 1


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


def refused_by_the_database(constraint: str, row: Any) -> None:
    with pytest.raises(IntegrityError, match=constraint), transaction.atomic():
        row.save(force_insert=True)


IMPOSSIBLE: list[tuple[type[Model], dict[str, Any], str]] = [
    (Decision, {"propensity": 0.0}, "decision_propensity_in_0_1"),
    (Decision, {"propensity": 1.1}, "decision_propensity_in_0_1"),
    (Decision, {"latency_ms": -1.0}, "decision_latency_not_negative"),
    (Decision, {"agent": ""}, "decision_has_agent"),
    (Decision, {"prompt_hash": ""}, "decision_has_prompt_hash"),
    (Rating, {"stars": 6}, "rating_stars_1_to_5"),
    (Rating, {"stars": 0}, "rating_stars_1_to_5"),
    (Rating, {"score": 1.5}, "rating_score_in_0_1"),
    (Rating, {"thumb": "meh"}, "rating_thumb_known"),
    (Rating, {"thumb": ""}, "rating_says_something"),
    (Rating, {"rater": ""}, "rating_has_rater"),
    (Rating, {"withdrawn": True}, "rating_withdrawal_withdraws_something"),
    (Comparison, {"right": "left"}, "comparison_of_two_decisions"),
    (Comparison, {"preference": "up"}, "comparison_preference_known"),
    (Comparison, {"preference": ""}, "comparison_preference_known"),
    (Comparison, {"rater": ""}, "comparison_has_rater"),
    (Comparison, {"withdrawn": True}, "comparison_withdrawal_withdraws_something"),
    (Outcome, {"name": ""}, "outcome_has_name"),
]


def test_the_database_refuses_a_row_that_cannot_be() -> None:
    left, right = decide("a"), decide("b")
    possible: dict[type[Model], dict[str, Any]] = {
        Decision: {"agent": "helper", "messages": [], "prompt_hash": "00", "response": ""},
        Rating: {"decision": left, "rater": "ann", "thumb": "up"},
        Comparison: {"left": left, "right": right, "rater": "ann", "preference": "left"},
        Outcome: {"decision": left, "name": "x", "value": 1.0},
    }
    for model, facts, constraint in IMPOSSIBLE:
        facts = {"right": left} if "right" in facts else facts
        refused_by_the_database(constraint, model(**possible[model] | facts))


def test_the_database_keeps_one_first_rating_per_rater_and_one_that_supersedes_it() -> None:
    decision = decide()
    first = rating_submit(decision=decision, rater="ann", thumb="up").row
    again = {"decision": decision, "rater": "ann"}
    refused_by_the_database("", Rating(thumb="down", **again))
    rating_submit(decision=decision, rater="ann", thumb="down")
    refused_by_the_database("", Rating(thumb="up", supersedes=first, **again))
    with pytest.raises(ProtectedError):
        decision.delete()


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
