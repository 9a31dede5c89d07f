"""Undo and skip on the rating page."""

from __future__ import annotations

import pytest
from django.test import Client

from feedback.models import Rating
from feedback.selectors import ratings_standing
from feedback.services import rating_submit
from tests.support.rating_page import fields, press, record
from tests.support.rating_page import rater as rater

pytestmark = pytest.mark.django_db


def test_undo_takes_the_last_rating_back_and_fills_it_in_again(rater: Client) -> None:
    decision = record()
    record(messages="another")
    press(rater, "down", tag=["wrong"], notes="Too short.")
    answer = rater.post("/rate/undo/", follow=True)
    assert not ratings_standing().exists()
    assert fields(answer.text)["decision"] == str(decision.pk)
    assert "Undone" in answer.text
    assert "Too short.</textarea>" in answer.text
    assert 'value="wrong" checked' in answer.text


@pytest.mark.slow
def test_the_last_ten_ratings_can_be_taken_back(rater: Client) -> None:
    for number in range(12):
        record(messages=f"prompt {number}")
    for _ in range(12):
        press(rater, "up")
    for _ in range(10):
        rater.post("/rate/undo/")
    assert ratings_standing().count() == 2
    assert "nothing to undo" in rater.post("/rate/undo/", follow=True).text
    assert ratings_standing().count() == 2


def test_undo_passes_over_a_rating_that_was_replaced_elsewhere(rater: Client) -> None:
    first, second = record(messages="one"), record(messages="two")
    press(rater, "up")
    press(rater, "up")
    rating_submit(decision=second, rater="ada", thumb="down")
    rater.post("/rate/undo/")
    assert [(r.decision, r.thumb) for r in ratings_standing()] == [(second, "down")]
    assert Rating.objects.filter(decision=first, withdrawn=True).exists()


def test_nobody_undoes_the_rating_of_another(rater: Client) -> None:
    theirs = rating_submit(decision=record(), rater="bob", thumb="up").row
    session = rater.session
    session["rate_undo"] = [str(theirs.pk)]
    session.save()
    rater.post("/rate/undo/")
    assert ratings_standing().get() == theirs


def test_a_skipped_decision_waits_and_can_be_brought_back(rater: Client) -> None:
    first, second = record(messages="one"), record(messages="two")
    rater.post("/rate/skip/", {"decision": str(first.pk)})
    assert fields(rater.get("/rate/").text)["decision"] == str(second.pk)
    press(rater, "up")
    assert "Only those you skipped are left" in rater.get("/rate/").text
    rater.post("/rate/skip/", {"all": "1"})
    assert fields(rater.get("/rate/").text)["decision"] == str(first.pk)
    assert Rating.objects.count() == 1


@pytest.mark.parametrize("address", ["/rate/undo/", "/rate/skip/"])
def test_links_cannot_undo_or_skip(rater: Client, address: str) -> None:
    assert rater.get(address).status_code == 405
