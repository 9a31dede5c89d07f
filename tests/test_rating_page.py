"""The rating page, without a browser: the card ahead, filters, guards, and what it says of the queue."""

from __future__ import annotations

import re
import uuid

import pytest
from django.test import Client

from feedback.services import rating_submit
from tests.support.api_client import person
from tests.support.rating_page import CARD, fields, press, record
from tests.support.rating_page import rater as rater

pytestmark = pytest.mark.django_db


def test_the_card_ahead_is_fetched_and_stays_in_front_when_the_first_is_rated(rater: Client) -> None:
    for number in range(3):
        record(messages=f"question {number}", propensity=1.0 - number / 10)
    first = fields(rater.get("/rate/").text)
    ahead = fields(rater.get("/rate/", {"after": first["decision"]}, headers=CARD).text)
    assert ahead["decision"] != first["decision"]
    # something still more worth asking arrives meanwhile: what is in front of the rater does not change
    record(messages="urgent", propensity=0.01)
    answer = rater.post(
        "/rate/", first | {"verdict": "up"}, headers=CARD | {"X-Ratchet-Shown": ahead["decision"]}
    )
    assert fields(answer.text)["decision"] == ahead["decision"]


def test_a_card_ahead_that_another_took_is_not_kept(rater: Client) -> None:
    taken = record(messages="one", propensity=0.5)
    first, free = record(messages="two", propensity=0.1), record(messages="three")
    assert fields(rater.get("/rate/").text)["decision"] == str(first.pk)
    rating_submit(decision=taken, rater="bob", thumb="up")
    sent = {"id": str(uuid.uuid4()), "decision": str(first.pk), "verdict": "up"}
    answer = rater.post("/rate/", sent, headers=CARD | {"X-Ratchet-Shown": str(taken.pk)})
    assert fields(answer.text)["decision"] == str(free.pk)


def test_where_nothing_follows_there_is_no_card_ahead(rater: Client) -> None:
    only = record()
    assert rater.get("/rate/", {"after": str(only.pk)}, headers=CARD).status_code == 204


def test_another_rater_gets_another_card(rater: Client) -> None:
    record()
    assert "Open Settings." in rater.get("/rate/").text
    other = Client()
    other.force_login(person("bob", "rater"))
    assert "The last ones are open at other raters" in other.get("/rate/").text
    rater.post("/rate/skip/", fields(rater.get("/rate/").text))
    assert "Open Settings." in other.get("/rate/").text


def test_filters_stay_in_the_address_and_can_be_taken_away(rater: Client) -> None:
    record(tags=["billing"])
    query = "agent=assistant&amp;tag=billing&amp;since=2020-01-01"
    html = rater.get(f"/rate/?{query.replace('amp;', '')}").text
    assert f'action="/rate/?{query}"' in html
    assert 'href="/rate/?agent=assistant&amp;since=2020-01-01" title="Remove' in html
    assert "Nothing here to rate" in rater.get("/rate/?tag=nothing").text


def test_a_rater_cannot_lift_the_blindfold_by_a_filter(rater: Client) -> None:
    record(policy="assistant-v2")
    assert rater.get("/rate/?policy=assistant-v2").status_code == 403
    operator = Client()
    operator.force_login(person("olga", "operator"))
    assert "Open Settings." in operator.get("/rate/?policy=assistant-v2").text
    assert 'name="policy"' not in rater.get("/rate/").text


def test_without_decisions_the_page_says_how_to_make_some(rater: Client) -> None:
    html = rater.get("/rate/").text
    assert "Nothing to rate yet" in html
    assert "manage.py" not in html


def test_when_all_is_rated_the_page_says_so(rater: Client) -> None:
    record()
    press(rater, "up")
    html = rater.get("/rate/").text
    assert "All rated" in html
    assert "You rated 1 today" in html
    assert "manage.py" not in html


def test_an_agent_that_decided_nothing_is_named(rater: Client) -> None:
    record()
    html = rater.get("/rate/?agent=helpdesk").text
    assert "<strong>helpdesk</strong> has recorded no decision" in html


def test_the_agent_asked_for_stays_through_rating_undo_and_skip(rater: Client) -> None:
    for agent in ("helpdesk", "widgets"):
        record(agent)
    html = rater.get("/rate/?agent=helpdesk").text
    sent = fields(html) | {"verdict": "up"}
    assert 'action="/rate/?agent=helpdesk"' in html
    assert rater.post("/rate/?agent=helpdesk", sent)["Location"] == "/rate/?agent=helpdesk&said=up"
    for button in ("undo", "skip"):
        assert f'formaction="/rate/{button}/?agent=helpdesk"' in html
        assert "agent=helpdesk" in rater.post(f"/rate/{button}/?agent=helpdesk", sent)["Location"]


def test_progress_is_shown(rater: Client) -> None:
    for number in range(3):
        record(messages=f"prompt {number}")
    press(rater, "up")
    html = rater.get("/rate/").text
    assert '<progress max="3" value="1"' in html
    assert re.search(r"<strong>1</strong> rated today.*<strong>2</strong> left", html)


def test_our_script_gets_the_next_card_alone(rater: Client) -> None:
    record(messages="one")
    second = record(messages="two")
    sent = fields(rater.get("/rate/").text) | {"verdict": "up"}
    answer = rater.post("/rate/", sent, headers={"X-Ratchet-Card": "1"})
    assert (answer.status_code, answer["X-Ratchet-Card"]) == (200, "1")
    assert "<html" not in answer.text
    assert "Saved: good" in answer.text
    assert fields(answer.text)["decision"] == str(second.pk)
    undone = rater.post("/rate/undo/", headers={"X-Ratchet-Card": "1"})
    assert fields(undone.text)["decision"] == sent["decision"]
    skipped = rater.post("/rate/skip/", sent, headers={"X-Ratchet-Card": "1"})
    assert fields(skipped.text)["decision"] == str(second.pk)


def test_the_page_is_not_kept_by_caches(rater: Client) -> None:
    """A page from a cache would carry a rating id that was used before."""
    assert "no-store" in rater.get("/rate/")["Cache-Control"]
