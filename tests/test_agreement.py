"""Agreement among the raters of an agent, and what they say together."""

from __future__ import annotations

import json
import uuid
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feedback.agreement.report import (
    AgreementReport,
    LabelAggregated,
    QuestionAgreement,
    agreement_report,
    alpha_meaning,
    labels_aggregated,
    verdict,
)
from feedback.agreement.statistics import AgreementEstimate
from feedback.models import AgentSettings, Comparison, Decision, Rating
from feedback.services import comparison_submit, decision_record, rating_submit, rating_withdraw

pytestmark = pytest.mark.django_db
AGENT = "support-bot"


def decide(response: str = "ok") -> uuid.UUID:
    pk: uuid.UUID = decision_record(agent=AGENT, messages="Where?", response=response).row.pk
    return pk


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


def labels(agent: str = AGENT, aggregation: str | None = None) -> dict[uuid.UUID, LabelAggregated]:
    return {label.decision: label for label in labels_aggregated(agent, aggregation)}


# --- The report ---------------------------------------------------------------------------------------------


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


def test_the_alpha_of_the_question_is_made_up_of_the_raters() -> None:
    random = np.random.default_rng(3)
    for _ in range(30):
        some = random.choice(["ada", "bob", "cy", "dee"], random.integers(1, 5), replace=False)
        rate(decide(), **{str(name): int(random.integers(1, 6)) for name in some})
    found = question(agreement_report(AGENT), "stars")
    shared = [(rater.alpha, rater.shared) for rater in found.raters if rater.alpha is not None]
    assert sum(n for _, n in shared) == found.alpha.n
    assert sum(a * n for a, n in shared) / found.alpha.n == pytest.approx(found.alpha.value)


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
    withdrawn = rating_submit(decision=decision, rater="cy", thumb="down").row
    rating_withdraw(withdrawn)
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
    reliability = {rater.rater: rater.reliability or 0.0 for rater in found.raters}
    assert reliability["ada"] > 0.95
    assert reliability["eve"] < 0.65
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


def test_a_report_is_json() -> None:
    crowd()
    found = json.loads(json.dumps(agreement_report(AGENT).as_dict(), allow_nan=False))
    assert found["questions"][0]["alpha"].keys() == {"value", "low", "high", "n"}


def test_a_report_asks_twice_whatever_the_size(django_assert_num_queries: Any) -> None:
    crowd()
    agreement_report(AGENT)
    with django_assert_num_queries(2):
        agreement_report(AGENT)


# --- Labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("up", None, None), 1.0),
        (("down", None, None), 0.0),
        (("down", 4, None), 1.0),
        (("", 3, None), 0.5),
        (("up", 5, 0.2), 0.0),
        (("up", 1, 0.5), 0.5),
        (("", None, None), None),
    ],
)
def test_the_finest_signal_is_the_verdict(
    said: tuple[str, int | None, float | None], expected: float | None
) -> None:
    assert verdict(*said) == expected


def test_the_majority_decides_and_a_tie_does_not() -> None:
    clear, tied, neutral = decide(), decide(), decide()
    rate(clear, ada="up", bob=4, cy=0.1)
    rate(tied, ada="up", bob="down")
    rate(neutral, ada=3)
    rating_submit(decision=decide(), rater="ada", notes="says nothing of good or bad")
    found = labels()
    assert found.keys() == {clear, tied, neutral}
    assert found[clear][1:] == (1.0, pytest.approx(2 / 3), 3, False)
    assert found[tied][1:] == (0.5, 0.5, 2, False)
    assert found[neutral][1:] == (0.5, 0.5, 1, False)


def test_a_person_outweighs_any_number_of_simulated_raters() -> None:
    both, simulated = decide(), decide()
    rate(both, ada="up", sim__one="down", sim__two="down")
    rate(simulated, sim__one="down", sim__two="down")
    found = labels()
    assert found[both][1:] == (1.0, 1.0, 1, False)
    assert found[simulated][1:] == (0.0, 1.0, 2, True)


def test_dawid_skene_settles_by_reliability_where_the_agent_wants_it() -> None:
    crowd()
    split = decide()
    rate(split, ada="up", eve="down")
    assert labels()[split].value == 0.5
    AgentSettings.objects.create(agent=AGENT, aggregation="dawid_skene")
    from feedback.cache import forget_all

    forget_all()
    found = labels()[split]
    assert found.value == 1.0
    assert found.confidence > 0.9


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="expected an aggregation of majority or dawid_skene"):
        list(labels_aggregated(AGENT, "loudest"))


def test_without_ratings_there_are_no_labels() -> None:
    decide()
    assert labels() == {}


# --- Outside data -------------------------------------------------------------------------------------------

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
    with django_assert_num_queries(3):  # and the agent's settings
        found = question(agreement_report(AGENT), "thumb")
    assert (found.ratings, len(found.raters)) == (2100, 40)
    assert len(found.pairs) == 200
    assert found.pairs_left_out == len(together) - 200
    assert [pair.shared for pair in found.pairs] == sorted((p.shared for p in found.pairs), reverse=True)
    assert found.alpha.value is not None
    assert abs(found.alpha.value) < 0.1
