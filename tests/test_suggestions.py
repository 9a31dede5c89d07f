"""A suggested rating: seen on the rating page, counted only once a person accepts it, its share accepted shown."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.db import IntegrityError, transaction
from django.test import Client

from feedback.erasure.service import unit_forget
from feedback.models import Decision, Rating, Suggestion
from feedback.rating.suggestions import suggestion_counts, suggestion_of, suggestions_record
from feedback.services import decision_record, rating_submit
from rl.jobs.label import label_model_summary
from rl.models import LabelRun
from tests.support.api_client import person

pytestmark = pytest.mark.django_db

FIGURES = {
    "n": 200, "good_share": 0.5, "accuracy": 0.8, "brier": 0.15, "brier_base": 0.25, "calibration_error": 0.04,
    "curve": [{"stated": 0.1, "observed": 0.15, "n": 100}, {"stated": 0.9, "observed": 0.88, "n": 100}],
}  # fmt: skip


def decide(number: int = 1, **facts: Any) -> Decision:
    row: Decision = decision_record(
        agent="support", messages=f"q{number}", response=f"r{number}", **facts
    ).row
    return row


@pytest.fixture
def rater(client: Client) -> Client:
    client.force_login(person("rita", "rater"))
    return client


def press(client: Client, row: Decision, verdict: str, **more: str) -> Any:
    return client.post(
        "/rate/", {"id": str(uuid.uuid4()), "decision": str(row.pk), "verdict": verdict, **more}
    )


def test_a_suggestion_is_shown_with_its_confidence_and_counts_for_nothing(rater: Client) -> None:
    row = decide()
    suggestions_record({row.pk: 0.18}, "support-labels-1")
    html = rater.get("/rate/").text
    assert 'value="accept-down"' in html
    assert "estimated probability 82 %" in html
    assert Rating.objects.count() == 0
    row.refresh_from_db()
    assert row.ratings_human == 0


def test_without_a_suggestion_the_page_has_none(rater: Client) -> None:
    decide()
    assert 'class="suggested"' not in rater.get("/rate/").text


def test_accepting_makes_it_the_raters_own_rating(rater: Client) -> None:
    row = decide()
    suggestions_record({row.pk: 0.9}, "x")
    assert press(rater, row, "accept-up", tag="clear").status_code == 302
    rating = Rating.objects.get()
    assert (rating.thumb, rating.rater, rating.rater_kind, rating.tags) == ("up", "rita", "human", ["clear"])
    suggestion = Suggestion.objects.get()
    assert (suggestion.outcome, suggestion.rating) == ("accepted", rating.pk)
    assert suggestion_of(row) is None


@pytest.mark.parametrize(
    ("verdict", "outcome"),
    [("up", "agreed"), ("down", "overruled"), ("5", "agreed"), ("1", "overruled"), ("3", "")],
)
def test_a_rating_of_ones_own_agrees_or_overrules(rater: Client, verdict: str, outcome: str) -> None:
    row = decide()
    suggestions_record({row.pk: 0.9}, "x")
    press(rater, row, verdict)
    assert Suggestion.objects.get().outcome == outcome


def test_nobody_accepts_what_they_did_not_see(rater: Client) -> None:
    row, other = decide(1), decide(2)
    suggestions_record({row.pk: 0.9}, "x")
    suggestions_record({row.pk: 0.2}, "y")  # made anew since the page was shown
    for subject in (row, other):
        answer = press(rater, subject, "accept-up")
        assert answer.status_code == 409
        assert "suggestion changed" in answer.text
    assert Rating.objects.count() == 0


def test_undo_opens_it_again(rater: Client) -> None:
    row = decide()
    suggestions_record({row.pk: 0.9}, "x")
    press(rater, row, "accept-up")
    rater.post("/rate/undo/")
    assert suggestion_of(row) is not None
    assert suggestion_counts("support").settled_count == 0


def test_a_settled_suggestion_is_not_made_anew() -> None:
    settled, waiting = decide(1), decide(2)
    suggestions_record({settled.pk: 0.9, waiting.pk: 0.9}, "x")
    rating = rating_submit(decision=settled, rater="ada", thumb="up").row
    Suggestion.objects.filter(decision=settled).update(outcome="accepted", rating=rating.pk)
    assert suggestions_record({settled.pk: 0.1, waiting.pk: 0.1, uuid.uuid4(): 0.5}, "y") == 1
    assert {s.decision_id: s.good for s in Suggestion.objects.all()} == {settled.pk: 0.9, waiting.pk: 0.1}


def test_the_database_refuses_what_is_no_probability_and_what_nobody_settled() -> None:
    row = decide()
    for facts in ({"good": 1.5}, {"good": 0.5, "outcome": "accepted"}, {"good": 0.5, "outcome": "maybe"}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Suggestion.objects.create(decision=row, labeller="x", **facts)


def test_forgetting_a_unit_takes_its_suggestions() -> None:
    row = decide(unit="bob")
    suggestions_record({row.pk: 0.9}, "x")
    unit_forget("bob")
    assert Suggestion.objects.count() == 0


def test_the_share_accepted_is_shown_by_the_page(rater: Client) -> None:
    rows = [decide(number) for number in range(5)]
    suggestions_record({row.pk: 0.9 for row in rows}, "support-labels-1")
    LabelRun.objects.create(
        agent="support", base_model="bundled", path="p", ratings=200, suggested=5, figures=FIGURES,
        left_out={"reward model": "none was trained"},
    )  # fmt: skip
    for row, verdict in zip(rows, ("accept-up", "accept-up", "up", "down"), strict=False):
        press(rater, row, verdict)
    found = label_model_summary("support")
    assert [found[name] for name in ("open", "accepted", "agreed", "overruled")] == [1, 2, 1, 1]
    assert (found["accepted_share"]["value"], found["accepted_share"]["n"]) == (0.5, 4)
    assert found["right_share"]["value"] == 0.75
    html = rater.get("/agents/support/").text
    for said in ("Suggested ratings", "50.0", "of 4 settled", "calibration error 0.040", 'cx="180.0" cy="24.0"',
                 "none was trained"):  # fmt: skip
        assert said in html, said
