"""The page of agreement and its endpoint: who may see them, and that they show what was found."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.models import RaterKind
from feedback.services import decision_record, rating_submit
from tests.support.api_client import ApiClient, error_of, person

pytestmark = pytest.mark.django_db


@pytest.fixture
def rated() -> None:
    """Twenty decisions on which ada and bob agree but once, and eve says the opposite of ada."""
    for number in range(20):
        decision = decision_record(agent="support-bot", messages="Where?", response=str(number)).row
        up = number % 2 == 0
        for rater, good in (("ada", up), ("bob", up or number == 1), ("eve <b>", not up)):
            rating_submit(decision=decision, rater=rater, thumb="up" if good else "down")


def page(role: str, query: str = "") -> Any:
    client = Client()
    client.force_login(person("someone", role))
    return client.get(f"/agreement/{query}")


def test_the_page_shows_who_differs(rated: None) -> None:
    response = page("operator")
    text = response.content.decode()
    assert response.status_code == 200
    assert "eve &lt;b&gt;" in text
    assert "eve <b>" not in text
    low = re.findall(r'<tr role="row" class="low">\s*<th[^>]*>([^<]*)', text)
    assert low[0].startswith("eve")
    assert "Each two raters" in text
    shown = re.search(r"<strong>(−?\d\.\d\d)</strong>", text)
    assert shown
    from feedback.agreement.report import agreement_report

    (question,) = agreement_report("support-bot").questions
    assert question.alpha.value is not None
    assert float(shown[1].replace("−", "-")) == round(question.alpha.value, 2)


def test_the_page_names_simulated_raters_as_such() -> None:
    decision = decision_record(agent="support-bot", messages="Where?", response="There").row
    rating_submit(decision=decision, rater="rule", rater_kind=RaterKind.SIMULATED, thumb="up")
    assert "made by simulated raters, not by people" in page("operator").content.decode()
    assert "No person rated support-bot yet" in page_again("?agent=support-bot&rater_kind=human")


def page_again(query: str) -> str:
    client = Client()
    client.force_login(User.objects.get(username="someone"))
    text: str = client.get(f"/agreement/{query}").content.decode()
    return text


def test_without_ratings_the_page_says_what_to_do() -> None:
    assert "Nothing was rated yet" in page("operator").content.decode()


@pytest.mark.parametrize("query", ["?agent=No Agent", "?agent=a&rater_kind=robot"])
def test_what_cannot_be_is_not_found(query: str) -> None:
    assert page("operator", query).status_code == 404


def test_the_endpoint_answers_the_report(rated: None) -> None:
    response = ApiClient("read").get("/api/agreement/", agent="support-bot")
    found = json.loads(response.content)
    assert response.status_code == 200
    assert (found["agent"], found["rater_kind"], found["aggregation"]) == ("support-bot", "human", "majority")
    (question,) = found["questions"]
    assert (question["question"], question["ratings"], question["overlapping"]) == ("thumb", 60, 20)
    assert question["raters"][0]["rater"] == "eve <b>"
    kappa = next(
        p["kappa"]["value"] for p in question["pairs"] if p["first"] == "ada" and p["second"] == "bob"
    )
    # 10 both up, 9 both down, once bob alone up: (0.95 - 0.5) / 0.5
    assert kappa == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("query", "field"),
    [({}, "agent"), ({"agent": "No Agent"}, "agent"), ({"agent": "a", "rater_kind": "robot"}, "rater_kind"),
     ({"agent": "a", "rater": "ada"}, "rater")],
)  # fmt: skip
def test_the_endpoint_refuses_what_it_does_not_know(query: dict[str, str], field: str) -> None:
    response = ApiClient("read").get("/api/agreement/", **query)
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
