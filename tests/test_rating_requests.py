"""Ratings asked for: samples and prompts that come first in the queue."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from feedback.accounts.roles import role_give
from feedback.models import Decision, RatingRequest
from feedback.rating.queue import decision_take, next_decision
from feedback.rating.requests import (
    SampleRefused,
    liked_by_choice,
    liked_in_sample,
    prompts_asked,
    requests_open,
    sample_draw,
    verdict_ask,
)
from feedback.services import rating_submit
from tests.support.api_client import ApiClient
from tests.support.dataset_feedback import decide

pytestmark = pytest.mark.django_db


def recorded(count: int) -> list[Decision]:
    return [decide(f"what about {number}?", "repairs", agent="router") for number in range(count)]


def test_a_sample_is_asked_for_first_with_its_probability() -> None:
    old = recorded(3)
    Decision.objects.update(created_at=timezone.now() - timedelta(days=8))
    rows = recorded(20)[3:]  # the first three were asked before, and are other decisions of the same prompts
    found = sample_draw("router", 5)
    assert (found.drawn, found.among) == (5, 20)
    assert {one.probability for one in RatingRequest.objects.all()} == {0.25}
    drawn = set(RatingRequest.objects.values_list("decision", flat=True))
    assert not drawn & {one.pk for one in old}
    for _ in range(5):
        decision = decision_take("ann")
        assert decision.pk in drawn
        rating_submit(decision=decision, rater="ann", thumb="up")
    assert not requests_open("router").exists()
    assert next_decision("ann") is not None  # the rest of the queue
    assert rows


def test_another_draw_replaces_the_sample_and_takes_no_more_than_there_is() -> None:
    recorded(4)
    assert sample_draw("router", 3).drawn == 3
    assert sample_draw("router", 50).drawn == 4
    assert RatingRequest.objects.count() == 4


def test_a_draw_from_nothing_is_refused() -> None:
    with pytest.raises(SampleRefused, match="expected decisions of router in the last 7 days, found none"):
        sample_draw("router", 5)
    for count, days in ((0, 7), (5, 0), (3_000, 7)):
        with pytest.raises(SampleRefused, match="expected 1 to 2,000 decisions"):
            sample_draw("router", count, days)
    with pytest.raises(CommandError, match="found none"):
        call_command("sample_decisions", agent="router")


def test_a_disliked_answer_without_a_correction_is_asked_for_again() -> None:
    rows = recorded(4)
    rating_submit(decision=rows[1], rater="ann", thumb="down")
    assert verdict_ask("router", [rows[1].prompt_hash, "no such prompt"]) == 1
    # also the one who disliked it, as a correction may come to mind; nobody else while it is on the table
    assert decision_take("ann") == rows[1]
    other = decision_take("bob")
    assert other is not None
    assert other != rows[1]
    rating_submit(decision=rows[1], rater="ann", thumb="down", correction="returns")
    assert not requests_open("router").exists()
    # a later verdict asks for other prompts
    assert verdict_ask("router", [rows[2].prompt_hash]) == 1
    assert list(requests_open("router").values_list("decision", flat=True)) == [rows[2].pk]
    assert verdict_ask("router", []) == 0
    assert not requests_open("router").exists()


def test_only_a_sample_is_representative() -> None:
    rows = recorded(10)
    assert liked_in_sample("router") is None
    assert liked_by_choice("router") is None
    for row in rows[:4]:  # people complain
        rating_submit(decision=row, rater="ann", thumb="down")
    sample_draw("router", 10)
    for row in rows[4:]:
        rating_submit(decision=row, rater="bob", thumb="up")
    rating_submit(decision=rows[0], rater="bob", thumb="up")  # one against one is neither
    chosen, drawn = liked_by_choice("router"), liked_in_sample("router")
    assert drawn is not None
    # nine of ten have a verdict: who chose them matters no more
    assert (chosen.liked, chosen.rated, chosen.representative) == (6, 9, True)
    assert "chose" not in chosen.words
    recorded(11)
    chosen = liked_by_choice("router")
    assert chosen.representative is False
    assert "people chose" in chosen.words
    assert (drawn.liked, drawn.rated, drawn.drawn, drawn.representative) == (6, 9, 10, True)


def test_who_corrects_an_answer_does_not_like_it() -> None:
    rows = recorded(3)
    rating_submit(decision=rows[0], rater="ann", correction="another")
    rating_submit(decision=rows[1], rater="ann", correction=rows[1].response)
    rating_submit(decision=rows[2], rater="ann", thumb="up")
    chosen = liked_by_choice("router")
    assert (chosen.liked, chosen.rated) == (2, 3)


def test_the_endpoint_draws_and_shows(client: Client) -> None:
    recorded(6)
    api = ApiClient("operate")
    assert ApiClient("rate").post("/api/samples/", {"agent": "router"}).status_code == 403
    made = api.post("/api/samples/", {"agent": "router", "count": 3})
    assert (made.status_code, made.json()["drawn"], made.json()["among"]) == (201, 3, 6)
    for body in (
        {"agent": "router", "count": 0},
        {"agent": "router", "count": True},
        {"agent": "Not One"},
        {"agent": "x"},
    ):
        assert api.post("/api/samples/", body).status_code == 400, body
    reader = ApiClient("read")
    shown = reader.get("/api/samples/?agent=router").json()
    assert shown["sample"] == {"liked": 0, "rated": 0, "drawn": 3, "representative": True}
    assert shown["by_choice"] is None
    assert reader.get("/api/samples/").status_code == 400


def test_the_agents_page_has_a_button_for_operators(client: Client) -> None:
    rating_submit(decision=recorded(4)[0], rater="ann", thumb="up")
    user = User.objects.create_user("ray")
    role_give(user, "rater")
    client.force_login(user)
    assert client.post("/agents/router/sample/", {"count": "2"}).status_code == 403
    client.force_login(User.objects.create_superuser("eve"))
    assert client.post("/agents/router/sample/", {"count": "many"}).status_code == 302
    assert not RatingRequest.objects.exists()
    assert client.post("/agents/router/sample/", {"count": "2"}).status_code == 302
    assert RatingRequest.objects.count() == 2
    text = client.get("/agents/router/").content.decode()
    assert "100 % of 1 rated answers are liked. Not representative" in text
    assert "Ask for their ratings first" in text
    assert client.get("/agents/router/sample/").status_code == 405
    assert client.post("/agents/nobody/sample/", {"count": "2"}).status_code == 404


def test_a_prompt_was_not_asked_first_where_another_answer_to_it_was_rated_before() -> None:
    complained, fresh = recorded(2)
    rating_submit(decision=complained, rater="user", thumb="down")
    decide("what about 0?", "sales", agent="router")
    verdict_ask("router", [complained.prompt_hash, fresh.prompt_hash])
    assert prompts_asked("router") == {fresh.prompt_hash}
