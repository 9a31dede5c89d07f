"""The rating page without a browser: what each button stores, what is refused, undo and skip."""

import re
import uuid
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.models import Rating
from feedback.selectors import ratings_standing
from feedback.services import rating_submit
from tests.support.api_client import signed_in
from tests.support.rating_page import CARD, fields, press, record, scenario

pytestmark = pytest.mark.django_db


def test_a_button_stores_its_verdict(rater: Client) -> None:
    edited, untouched = "Open Billing.\r\nThen go.", "Open Settings.\r\nThen go."
    tags = {"tag": ["too long", "wrong"], "other_tags": " rude ,, wrong", "notes": "Says\nnothing."}
    for verdict, sent, stored in (
        ("up", {}, {"thumb": "up"}),
        ("down", tags, {"thumb": "down", "tags": ["too long", "wrong", "rude"], "notes": "Says\nnothing."}),
        ("1", {}, {"stars": 1}),
        ("5", {}, {"stars": 5}),
        ("save", {"notes": "Odd."}, {"notes": "Odd."}),
        ("correct", {"correction": edited}, {"correction": "Open Billing.\nThen go."}),
        ("down", {"correction": untouched}, {"thumb": "down"}),
    ):
        decision = record(response="Open Settings.\nThen go.")
        answer = press(rater, verdict, **sent)
        assert (answer.status_code, answer["Location"]) == (302, f"/rate/?said={verdict}")
        rating = Rating.objects.get(decision=decision)
        assert (rating.rater, rating.rater_kind) == ("ada", "human")
        nothing = {"thumb": "", "stars": None, "correction": None, "tags": [], "notes": ""}
        assert {name: getattr(rating, name) for name in nothing} == nothing | stored


def test_saving_an_untouched_response_as_correction_is_refused(rater: Client) -> None:
    record()
    answer = press(rater, "correct", correction="Open Settings.", notes="kept")
    assert answer.status_code == 400
    assert "kept</textarea>" in answer.text
    assert not Rating.objects.exists()


def test_listed_responses_are_chosen_and_free_text_is_edited(rater: Client) -> None:
    facts = scenario("widgets")
    record(**facts)
    offered = re.findall(r'<option value="([^"]+)"', rater.get("/rate/").text)
    assert [value.replace("&quot;", '"') for value in offered] == facts["candidates"][1:]
    press(rater, "correct", correction=facts["candidates"][2])
    assert Rating.objects.get().correction == facts["candidates"][2]
    record(**scenario("assistant"))  # its drafts are listed
    html = rater.get("/rate/").text
    assert '<textarea name="correction"' in html
    assert '<select name="correction"' not in html


def test_a_double_click_is_stored_once_and_another_verdict_is_a_conflict(rater: Client) -> None:
    decision = record()
    html = rater.get("/rate/").text
    assert [press(rater, "up", html).status_code for _ in range(2)] == [302, 302]
    assert len(rater.session["rate_undo"]) == 1
    answer = press(rater, "down", html)
    assert answer.status_code == 409
    assert "rated this already" in answer.text
    assert Rating.objects.get().thumb == "up"
    page = rater.get(f"/rate/?decision={decision.pk}").text
    assert "you said: up" in page
    press(rater, "down", page)
    assert [rating.thumb for rating in ratings_standing()] == ["down"]


BROKEN: list[dict[str, Any]] = [
    *({"verdict": verdict} for verdict in ("excellent", "", "6", "save")),
    *({"notes": notes} for notes in ("a\x00b", "x" * 20_001)),
    {"id": "7"},
    {"tag": ["t" * 101]},
    {"other_tags": ",".join(map(str, range(60)))},
]


def test_what_cannot_be_stored_is_refused_with_a_reason(rater: Client) -> None:
    record()
    for broken in BROKEN:
        answer = press(rater, **({"verdict": "up"} | broken))
        assert answer.status_code == 400, broken
        assert re.search(r'<p class="fault" role="alert">[^<]{10,}', answer.text)
    elsewhere = Client(enforce_csrf_checks=True)
    elsewhere.force_login(User.objects.create_user("eve"))
    assert press(elsewhere, "up").status_code == 403
    assert not Rating.objects.exists()


def test_an_unknown_decision_or_address_is_not_found(rater: Client) -> None:
    record()
    for decision in ("", "x", str(uuid.uuid4())):
        assert press(rater, "up", "", decision=decision, id=str(uuid.uuid4())).status_code == 404
        assert rater.post("/rate/skip/", {"decision": decision}).status_code == 404
    for query in ("agent=No%20Slug", "agent=a%00b", "decision=x"):
        assert rater.get(f"/rate/?{query}").status_code == 404
    for address in ("/rate/undo/", "/rate/skip/"):
        assert rater.get(address).status_code == 405


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
    assert rater.get("/rate/", {"after": str(record().pk)}, headers=CARD).status_code == 204


def test_another_rater_gets_another_card(rater: Client) -> None:
    record()
    assert "Open Settings." in rater.get("/rate/").text
    other = signed_in("bob", "rater")
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
    operator = signed_in("olga", "operator")
    assert "Open Settings." in operator.get("/rate/?policy=assistant-v2").text
    assert 'name="policy"' not in rater.get("/rate/").text


def test_the_page_shows_progress_and_says_what_is_left(rater: Client) -> None:
    answer = rater.get("/rate/")
    assert "Nothing to rate yet" in answer.text
    assert "manage.py" not in answer.text
    assert (
        "no-store" in answer["Cache-Control"]
    )  # a page from a cache would carry a rating id that was used before
    for number in range(3):
        record(messages=f"prompt {number}")
    press(rater, "up")
    html = rater.get("/rate/").text
    assert '<progress max="3" value="1"' in html
    assert re.search(r"<strong>1</strong> rated today.*<strong>2</strong> left", html)
    assert "<strong>helpdesk</strong> has recorded no decision" in rater.get("/rate/?agent=helpdesk").text
    for _ in range(2):
        press(rater, "up")
    html = rater.get("/rate/").text
    assert "All rated" in html
    assert "You rated 3 today" in html
    assert "manage.py" not in html


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
