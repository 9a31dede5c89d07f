"""The rating form: what each button stores, what is refused."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.models import Rating
from feedback.selectors import ratings_standing
from tests.support.rating_page import press, record, scenario
from tests.support.rating_page import rater as rater

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("verdict", "stored"),
    [
        ("up", {"thumb": "up", "stars": None}),
        ("down", {"thumb": "down", "stars": None}),
        ("1", {"thumb": "", "stars": 1}),
        ("5", {"thumb": "", "stars": 5}),
    ],
)
def test_a_button_stores_its_verdict(rater: Client, verdict: str, stored: dict[str, Any]) -> None:
    decision = record()
    answer = press(rater, verdict)
    assert (answer.status_code, answer["Location"]) == (302, f"/rate/?said={verdict}")
    rating = Rating.objects.get()
    assert {name: getattr(rating, name) for name in stored} == stored
    assert (rating.decision, rating.rater, rating.rater_kind, rating.correction) == (
        decision,
        "ada",
        "human",
        None,
    )


def test_tags_and_notes_go_with_the_verdict(rater: Client) -> None:
    record()
    press(rater, "down", tag=["too long", "wrong"], other_tags=" rude ,, wrong", notes="Says\nnothing.")
    rating = Rating.objects.get()
    assert rating.tags == ["too long", "wrong", "rude"]
    assert rating.notes == "Says\nnothing."


def test_tags_and_notes_can_be_saved_without_a_verdict(rater: Client) -> None:
    record()
    press(rater, "save", notes="Odd.")
    rating = Rating.objects.get()
    assert (rating.thumb, rating.stars, rating.notes) == ("", None, "Odd.")


def test_an_edited_response_is_a_correction(rater: Client) -> None:
    record(response="Open Settings.\nThen go.")
    press(rater, "correct", correction="Open Billing.\r\nThen go.")
    rating = Rating.objects.get()
    assert (rating.correction, rating.thumb) == ("Open Billing.\nThen go.", "")


def test_an_untouched_response_is_no_correction(rater: Client) -> None:
    record(response="Open Settings.\nThen go.")
    press(rater, "down", correction="Open Settings.\r\nThen go.")
    assert Rating.objects.get().correction is None


def test_saving_an_untouched_response_as_correction_is_refused(rater: Client) -> None:
    record()
    answer = press(rater, "correct", correction="Open Settings.", notes="kept")
    assert answer.status_code == 400
    assert "kept</textarea>" in answer.text
    assert not Rating.objects.exists()


def test_free_text_is_corrected_by_editing_it_also_where_drafts_are_listed(rater: Client) -> None:
    record(**scenario("assistant"))
    html = rater.get("/rate/").text
    assert '<textarea name="correction"' in html
    assert '<select name="correction"' not in html


def test_where_responses_are_listed_a_correction_is_chosen_among_them(rater: Client) -> None:
    facts = scenario("widgets")
    record(**facts)
    offered = re.findall(r'<option value="([^"]+)"', rater.get("/rate/").text)
    assert [value.replace("&quot;", '"') for value in offered] == facts["candidates"][1:]
    press(rater, "correct", correction=facts["candidates"][2])
    assert Rating.objects.get().correction == facts["candidates"][2]


def test_a_double_click_is_stored_once(rater: Client) -> None:
    record()
    html = rater.get("/rate/").text
    first, second = press(rater, "up", html), press(rater, "up", html)
    assert (first.status_code, second.status_code) == (302, 302)
    assert Rating.objects.count() == 1
    assert len(rater.session["rate_undo"]) == 1


def test_the_same_form_with_another_verdict_is_a_conflict(rater: Client) -> None:
    record()
    html = rater.get("/rate/").text
    press(rater, "up", html)
    answer = press(rater, "down", html)
    assert answer.status_code == 409
    assert "rated this already" in answer.text
    assert Rating.objects.get().thumb == "up"


def test_rating_again_replaces(rater: Client) -> None:
    decision = record()
    press(rater, "up")
    page = rater.get(f"/rate/?decision={decision.pk}").text
    assert "you said: up" in page
    press(rater, "down", page)
    assert [rating.thumb for rating in ratings_standing()] == ["down"]


@pytest.mark.parametrize(
    "broken",
    [
        {"verdict": "excellent"},
        {"verdict": ""},
        {"verdict": "6"},
        {"verdict": "save"},
        {"id": "7"},
        {"notes": "a\x00b"},
        {"notes": "x" * 20_001},
        {"tag": ["t" * 101]},
        {"other_tags": ",".join(map(str, range(60)))},
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_reason(rater: Client, broken: dict[str, Any]) -> None:
    record()
    answer = press(rater, **({"verdict": "up"} | broken))
    assert answer.status_code == 400
    assert re.search(r'<p class="fault" role="alert">[^<]{10,}', answer.text)
    assert not Rating.objects.exists()


@pytest.mark.parametrize("decision", ["", "x", "cc99f58f-21f8-442f-8814-70e8116c129f"])
def test_an_unknown_decision_is_not_found(rater: Client, decision: str) -> None:
    assert press(rater, "up", "", decision=decision, id=str(uuid.uuid4())).status_code == 404
    assert rater.post("/rate/skip/", {"decision": decision}).status_code == 404


@pytest.mark.parametrize("address", ["/rate/?agent=No%20Slug", "/rate/?agent=a%00b", "/rate/?decision=x"])
def test_an_address_that_cannot_be_is_not_found(rater: Client, address: str) -> None:
    assert rater.get(address).status_code == 404


def test_a_form_from_elsewhere_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_user("eve"))
    record()
    assert press(client, "up").status_code == 403
    assert not Rating.objects.exists()
