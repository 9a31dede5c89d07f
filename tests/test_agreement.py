"""Agreement among the raters of an agent: the figures, the page and the endpoint."""

import json
import re
import uuid
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.contrib.auth.models import User
from django.test import Client

from feedback.agreement.report import (
    AgreementReport,
    QuestionAgreement,
    agreement_report,
    alpha_meaning,
)
from feedback.agreement.statistics import AgreementEstimate
from feedback.models import Comparison, Decision, RaterKind, Rating
from feedback.services import comparison_submit, decision_record, rating_submit, rating_withdraw
from tests.support.api_client import ApiClient, error_of, signed_in

pytestmark = pytest.mark.django_db

AGENT = "support-bot"


def decide(response: str = "ok") -> uuid.UUID:
    return decision_record(agent=AGENT, messages="Where?", response=response).row.pk


def rate(decision: uuid.UUID, **said: Any) -> None:
    """What raters say of a decision: rate(d, ada="up", bob=4, sim__eve="down")."""
    for name, value in said.items():
        kind = {"rater_kind": "simulated"} if name.startswith("sim__") else {}
        what = (
            {"thumb": value}
            if isinstance(value, str)
            else {"stars": value}
            if isinstance(value, int)
            else {"score": value}
        )
        rating_submit(decision=decision, rater=name.removeprefix("sim__"), **kind, **what)


def question(report: AgreementReport, name: str) -> QuestionAgreement:
    return next(q for q in report.questions if q.question == name)


def test_thumbs_are_compared_among_all_who_rated() -> None:
    """Three raters on four decisions: the third always says the other thing; worked in test_agreement_formulas."""
    for thumbs in (("up", "up", "down"), ("down", "down", "up")) * 2:
        rate(decide(), **dict(zip(("ada", "bob", "eve"), thumbs, strict=True)))
    rate(decide(), ada="up")  # alone: counted, and compared with nothing
    found = question(agreement_report(AGENT), "thumb")
    assert (found.ratings, found.decisions, found.overlapping) == (13, 5, 4)
    # observed: 2 of the 3 pairs on each decision differ; expected 72/132
    assert found.alpha.value == pytest.approx(1 - (2 / 3) / (72 / 132))
    by_name = {rater.rater: rater for rater in found.raters}
    assert by_name["eve"].alpha == pytest.approx(1 - 132 / 72)
    assert by_name["ada"].alpha == by_name["bob"].alpha == pytest.approx(1 - 66 / 72)
    assert (by_name["ada"].ratings, by_name["ada"].shared, by_name["ada"].agreement) == (5, 4, 0.5)
    assert (by_name["eve"].agreement, found.raters[0].rater) == (0.0, "eve")
    kappas = {(pair.first, pair.second): pair.kappa.value for pair in found.pairs}
    assert kappas == {("ada", "bob"): 1.0, ("ada", "eve"): -1.0, ("bob", "eve"): -1.0}


def test_each_question_is_measured_on_its_own_scale() -> None:
    one, two = decide(), decide()
    rate(one, ada=5, bob=4)
    rate(two, ada=1, bob=2)
    rate(decide(), cy=0.25, dee=0.75)
    found = agreement_report(AGENT)
    assert [(q.question, q.metric) for q in found.questions] == [("stars", "ordinal"), ("score", "interval")]
    stars = question(found, "stars")
    # values 1, 2, 4, 5 once each: distances by rank, as between 1 and 2 (1), 1 and 4 (4), 1 and 5 (9), ...
    # observed: pairs (5,4) and (1,2), squared distance 1 each; expected: mean over the 6 pairs of 1,4,9,1,4,1 = 20/6
    assert stars.alpha.value == pytest.approx(1 - 1 / (20 / 6))
    # quadratic weights, raters (5, 1) and (4, 2): 1 - mean squared difference 1 / by chance (4+1+0)
    assert stars.pairs[0].kappa.value == pytest.approx(1 - 1 / 5)
    assert question(found, "score").pairs[0].agreement is None


def test_preferences_are_compared_whichever_side_a_decision_stood_on() -> None:
    one, two = decide("one"), decide("two")
    comparison_submit(left=one, right=two, preference="left", rater="ada")
    comparison_submit(left=two, right=one, preference="right", rater="bob")
    comparison_submit(left=two, right=one, preference="tie", rater="cy")
    found = question(agreement_report(AGENT), "preference")
    assert (found.ratings, found.decisions) == (3, 1)
    agree = {(pair.first, pair.second): pair.agreement for pair in found.pairs}
    assert agree == {("ada", "bob"): 1.0, ("ada", "cy"): 0.0, ("bob", "cy"): 0.0}


def test_only_what_stands_counts() -> None:
    decision = decide()
    rate(decision, ada="down", bob="up")
    rate(decision, ada="up")
    rating_withdraw(rating_submit(decision=decision, rater="cy", thumb="down").row)
    found = question(agreement_report(AGENT), "thumb")
    assert {rater.rater: rater.agreement for rater in found.raters} == {"ada": 1.0, "bob": 1.0}


def test_other_agents_are_left_alone() -> None:
    rate(decide(), ada="up", bob="down")
    assert agreement_report("another").questions == []


def test_people_and_simulated_raters_are_never_mixed() -> None:
    rate(decide(), ada="up", bob="up", sim__rule="down")
    report = agreement_report(AGENT)
    assert (report.rater_kind, report.simulated) == ("human", False)
    assert {rater.rater for rater in question(report, "thumb").raters} == {"ada", "bob"}
    simulated = agreement_report(AGENT, "simulated")
    assert simulated.simulated
    assert [rater.rater for rater in question(simulated, "thumb").raters] == ["rule"]
    with pytest.raises(ValueError, match="expected a rater kind of human or simulated"):
        agreement_report(AGENT, "robot")


def test_simulated_raters_are_shown_where_no_person_rated() -> None:
    rate(decide(), sim__one="up", sim__two="up")
    assert agreement_report(AGENT).simulated


def crowd(bad: str = "eve") -> None:
    """Forty decisions rated by three who agree in 36 of them, and by one who rates at random."""
    random = np.random.default_rng(5)
    for number in range(40):
        truth, other = ("up", "down") if number % 2 else ("down", "up")
        rate(
            decide(),
            ada=truth,
            bob=other if number in (3, 4) else truth,
            cy=other if number in (7, 8) else truth,
            **{bad: str(random.choice(["up", "down"]))},
        )


def test_a_rater_who_agrees_with_nobody_is_pointed_out_and_kept() -> None:
    crowd()
    found = question(agreement_report(AGENT), "thumb")
    assert [rater.rater for rater in found.raters if rater.low] == ["eve"]
    assert found.raters[0].rater == "eve"
    assert len(found.raters) == 4


def test_of_a_rater_with_few_ratings_nothing_is_said() -> None:
    for _ in range(19):
        rate(decide(), ada="up", bob="down")
    found = question(agreement_report(AGENT), "thumb")
    assert [rater.low for rater in found.raters] == [False, False]
    rate(decide(), ada="up", bob="down")
    found = question(agreement_report(AGENT), "thumb")
    assert [rater.low for rater in found.raters] == [True, True]


@pytest.mark.parametrize(
    ("value", "n", "meaning"),
    [
        (0.8, 10, "reliable"),
        (0.7, 10, "good enough for tentative conclusions"),
        (0.5, 10, "agreement is too low to rely on"),
        (-0.1, 10, "no better than chance"),
        (None, 10, "all raters gave the same answer, so alpha is not defined"),
        (None, 0, "no decision has two raters yet"),
    ],
)
def test_what_alpha_means(value: float | None, n: int, meaning: str) -> None:
    assert alpha_meaning(AgreementEstimate(value, None, None, n)) == meaning


def test_a_report_asks_twice_whatever_the_size(django_assert_num_queries: Any) -> None:
    crowd()
    agreement_report(AGENT)
    with django_assert_num_queries(2):
        agreement_report(AGENT)


PANDALM = Path(__file__).resolve().parents[2] / "shared" / "data" / "pandalm" / "testset-v1.json"


@pytest.mark.slow
@pytest.mark.skipif(not PANDALM.is_file(), reason="needs ../shared/data/pandalm")
def test_pandalms_annotators_agree_as_published_through_the_database() -> None:
    """Three annotators on 999 pairs; the published kappas are .85, .88 and .86."""
    preference = {0: "tie", 1: "left", 2: "right"}
    decisions, comparisons = [], []
    for row in json.loads(PANDALM.read_text("utf-8")):
        left, right = (
            Decision(
                agent=AGENT, messages=[], prompt_hash=str(row["idx"]), response=str(row[f"response{side}"])
            )
            for side in (1, 2)
        )
        decisions += [left, right]
        comparisons += [
            Comparison(
                left=left, right=right, rater=f"annotator {i}", preference=preference[row[f"annotator{i}"]]
            )
            for i in (1, 2, 3)
        ]
    Decision.objects.bulk_create(decisions)
    Comparison.objects.bulk_create(comparisons)
    found = question(agreement_report(AGENT), "preference")
    kappas = {(pair.first[-1], pair.second[-1]): round(pair.kappa.value or 0, 2) for pair in found.pairs}
    assert kappas == {("1", "2"): 0.85, ("1", "3"): 0.88, ("2", "3"): 0.86}
    assert found.alpha.value == pytest.approx(0.864221, abs=1e-6)
    assert found.meaning == "reliable"
    assert (found.decisions, found.overlapping) == (999, 999)


def test_many_ratings_by_many_raters_are_reported(django_assert_num_queries: Any) -> None:
    """2,000 ratings by 40 raters with a third of each other's decisions: all raters, the pairs who share most."""
    random = np.random.default_rng(0)
    decisions = [Decision(agent=AGENT, messages=[], prompt_hash=str(i), response="x") for i in range(700)]
    Decision.objects.bulk_create(decisions)
    ratings = [
        Rating(decision=decision, rater=f"rater {who}", thumb=str(random.choice(["up", "down"])))
        for decision in decisions
        for who in random.choice(40, 3, replace=False)
    ]
    Rating.objects.bulk_create(ratings)
    together = {
        frozenset((one.rater, other.rater))
        for three in zip(*[iter(ratings)] * 3, strict=True)
        for one, other in combinations(three, 2)
    }
    with django_assert_num_queries(2):
        found = question(agreement_report(AGENT), "thumb")
    assert (found.ratings, len(found.raters)) == (2100, 40)
    assert len(found.pairs) == 200
    assert found.pairs_left_out == len(together) - 200
    assert [pair.shared for pair in found.pairs] == sorted((p.shared for p in found.pairs), reverse=True)
    assert abs(found.alpha.value) < 0.1


@pytest.fixture
def rated() -> None:
    """Twenty decisions on which ada and bob agree but once, and eve says the opposite of ada."""
    for number in range(20):
        decision = decision_record(agent="support-bot", messages="Where?", response=str(number)).row
        up = number % 2 == 0
        for rater, good in (("ada", up), ("bob", up or number == 1), ("eve <b>", not up)):
            rating_submit(decision=decision, rater=rater, thumb="up" if good else "down")


def page(role: str, query: str = "") -> Any:
    client = signed_in("someone", role)
    return client.get(f"/agreement/{query}")


def test_the_page_shows_who_differs(rated: None) -> None:
    response = page("operator")
    text = response.content.decode()
    assert response.status_code == 200
    assert "eve &lt;b&gt;" in text
    assert "eve <b>" not in text
    assert re.findall(r'<tr role="row" class="low">\s*<th[^>]*>([^<]*)', text)[0].startswith("eve")
    assert "Each two raters" in text
    shown = re.search(r"<strong>(−?\d\.\d\d)</strong>", text)
    assert shown
    from feedback.agreement.report import agreement_report

    (question,) = agreement_report("support-bot").questions
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
    assert (found["agent"], found["rater_kind"]) == ("support-bot", "human")
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
    [
        ({}, "agent"),
        ({"agent": "No Agent"}, "agent"),
        ({"agent": "a", "rater_kind": "robot"}, "rater_kind"),
        ({"agent": "a", "rater": "ada"}, "rater"),
    ],
)
def test_the_endpoint_refuses_what_it_does_not_know(query: dict[str, str], field: str) -> None:
    response = ApiClient("read").get("/api/agreement/", **query)
    assert response.status_code == 400
    assert field in error_of(response)["fields"]
