"""Golden cases in the admin: written as text, taken over from a decision, refused where they say nothing."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.accounts.roles import role_give
from feedback.services import decision_record, rating_submit
from rl.evaluation.golden import golden_of, prompt_read, prompt_written, responses_read, responses_written
from rl.models import GoldenCase

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client: Client) -> Client:
    user = User.objects.create_user("olga", is_staff=True)
    role_give(user, "operator")
    client.force_login(user)
    return client


@pytest.mark.parametrize("responses", [[], ["one"], ["one\nof two lines", '{"widget": "table"}']])
def test_responses_are_read_as_they_were_written(responses: list[str]) -> None:
    assert responses_read(responses_written(responses)) == responses


def test_one_question_is_plain_words_and_a_conversation_is_json() -> None:
    question = [{"role": "user", "content": "is it up?"}]
    talk = [{"role": "system", "content": "Be brief."}, *question]
    assert prompt_written(question) == "is it up?"
    assert prompt_read(prompt_written(question)) == question
    assert prompt_read(prompt_written(talk)) == talk


def test_a_decision_people_disliked_is_forbidden_and_its_correction_right() -> None:
    decision = decision_record(agent="filer", messages="an invoice", response="Photos").row
    rating_submit(decision=decision, rater="ada", thumb="down", correction="Invoices")
    found = golden_of(str(decision.pk))
    assert (found["accepted"], found["forbidden"]) == (["Invoices"], ["Photos"])
    assert (found["agent"], found["name"]) == ("filer", "an invoice")


def test_an_operator_makes_one_from_the_page_of_a_decision(operator: Client) -> None:
    decision = decision_record(agent="filer", messages="an invoice", response="Invoices").row
    rating_submit(decision=decision, rater="ada", thumb="up")
    link = f"/admin/rl/goldencase/add/?decision={decision.pk}"
    assert link in operator.get(f"/decisions/{decision.pk}/").text
    assert "an invoice" in operator.get(link).text
    form = {
        "agent": "filer", "name": "invoices", "messages": "an invoice", "accepted": "Invoices\n---\nBills",
        "forbidden": "", "state": "", "active": "on",
    }  # fmt: skip
    assert operator.post("/admin/rl/goldencase/add/", form).status_code == 302
    case = GoldenCase.objects.get()
    assert (case.messages, case.accepted) == (
        [{"role": "user", "content": "an invoice"}],
        ["Invoices", "Bills"],
    )


def test_a_case_that_says_nothing_is_refused(operator: Client) -> None:
    form = {
        "agent": "filer",
        "name": "n",
        "messages": "[not json",
        "accepted": "",
        "forbidden": "",
        "state": "",
    }
    page = operator.post("/admin/rl/goldencase/add/", form).text
    assert "this is no JSON list of messages" in page
    page = operator.post("/admin/rl/goldencase/add/", form | {"messages": "x"}).text
    assert "expected at least one accepted or forbidden response" in page
    assert not GoldenCase.objects.exists()


def test_a_rater_is_offered_none(client: Client) -> None:
    decision = decision_record(agent="filer", messages="an invoice", response="Invoices").row
    user = User.objects.create_user("ada")
    role_give(user, "rater")
    client.force_login(user)
    assert "golden" not in client.get(f"/decisions/{decision.pk}/").text
