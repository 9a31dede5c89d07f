"""Pages say what is so: cut answers, overfit runs, the newest candidate, what is missing until the next training."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from feedback.cache import forget_all
from feedback.models import Decision
from feedback.services import agent_set_up, decision_record, rating_submit
from rl.charts.run_figures import overfit_words
from rl.jobs.estimates import automatic_plan
from rl.models import Policy, Snapshot
from rl.registry import service as registry
from rl.registry.comparisons import policy_diff
from rl.selectors import agent_cards, agent_overview
from rl.views.next_step import guide_of, step_next
from tests.support.api_client import person
from tests.test_pages import make_policy, words

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(person("the-operator", "operator"))
    return client


def card_of(slug: str) -> Any:
    forget_all()
    return next(card for card in agent_cards(slug) if card.facts.slug == slug)


def rated(count: int, agent: str = "shop") -> None:
    for number in range(count):
        decision = decision_record(agent=agent, messages=f"question {number}", response="an answer").row
        rating_submit(decision=decision, rater="bob", thumb="up" if number % 2 else "down")


# --- The playground -----------------------------------------------------------------------------------------


def playground(client: Client, **facts: Any) -> Any:
    metadata = facts.pop("metadata", {})
    row = decision_record(agent="shop", messages="Where is it?", **facts).row
    Decision.objects.filter(pk=row.pk).update(metadata=metadata)  # as the gateway writes it
    return client.get(f"/agents/shop/playground/?answers={row.pk}")


@pytest.mark.parametrize(("reason", "unusable"), [("length", "cut off"), ("stop", "")])
def test_an_answer_that_stops_at_its_limit_is_said_to_be_cut_off(
    operator: Client, reason: str, unusable: str
) -> None:
    page = playground(
        operator, response="We are sor", tokens_out=48, metadata={"serving": {"finish_reason": reason}}
    )
    (answer,) = page.context["answers"]
    assert answer["unusable"].startswith(unusable)
    assert bool(answer["unusable"]) is bool(unusable)


def test_an_answer_outside_the_closed_set_is_said_to_be_invalid(operator: Client) -> None:
    for number in range(40):
        decision_record(
            agent="shop", messages=f"question {number}", response=["billing", "returns"][number % 2]
        )
    forget_all()
    (answer,) = playground(
        operator, response="bill", metadata={"serving": {"backend": "in-process", "finish_reason": "stop"}}
    ).context["answers"]
    assert answer["unusable"].startswith("not valid")


def test_a_probability_is_said_to_be_no_calibrated_one(operator: Client) -> None:
    listed = [{"response": "billing", "probability": 1.0}, {"response": "returns", "probability": 0.0}]
    text = words(playground(operator, response="billing", candidates=listed, propensity=1.0).text)
    assert "not calibrated" in text
    assert "probability 1.000" not in text


# --- What is missing ----------------------------------------------------------------------------------------


def test_nobody_is_told_to_wait_for_a_training_that_never_starts(settings: Any) -> None:
    rated(12)
    make_policy("shop")
    Policy.objects.update(
        stage="champion",
        metrics={"headline": {"kind": "pairs", "value": 0.7, "low": 0.6, "high": 0.8, "n": 50}},
    )
    settings.ENABLE_ONLINE_LEARNING = False
    assert "until the next training" not in step_next(card_of("shop")).words
    settings.ENABLE_ONLINE_LEARNING = True
    assert "until the next training" in step_next(card_of("shop")).words


@pytest.mark.parametrize(("count", "asks"), [(3, True), (12, False)])
def test_nobody_is_told_that_ratings_are_needed_that_are_there(count: int, asks: bool) -> None:
    rated(count)
    step = next(step for step in guide_of(card_of("shop")) if step.key == "rate")
    assert ("needs" in step.effect) is asks


# --- Agents, policies and runs ------------------------------------------------------------------------------


def test_the_agents_page_shows_no_older_candidate_than_the_newest() -> None:
    rated(1)
    older, newer = make_policy("shop"), make_policy("shop")
    overview = agent_overview("shop")
    assert overview is not None
    assert overview.waiting == newer
    registry.policy_reject(newer, actor="eve", reason="worse")
    overview = agent_overview("shop")
    assert overview is not None
    assert overview.waiting is None
    assert older.stage == "candidate"


def test_an_agent_that_was_only_connected_has_a_page_and_a_card(operator: Client) -> None:
    agent_set_up("shop")
    assert operator.get("/agents/shop/").status_code == 200
    page = operator.get("/")
    assert [one["card"].facts.slug for one in page.context["shown"]] == ["shop"]
    assert "/start/?agent=shop" in page.text
    assert operator.get("/start/?agent=shop").context["connected"]


@pytest.mark.parametrize(
    ("verdicts", "method"),
    [
        ({"up": 2, "down": 3, "correct": 5}, "SFT"),
        ({"up": 5, "down": 5}, "SFT"),
        ({"down": 10}, ""),
    ],
)
def test_ten_ratings_of_any_mixture_are_enough_for_a_first_training(
    verdicts: dict[str, int], method: str
) -> None:
    said = [verdict for verdict, count in verdicts.items() for _ in range(count)]
    for number, verdict in enumerate(said):
        decision = decision_record(agent="shop", messages=f"question {number}", response="an answer").row
        facts = {"correction": f"answer {number}"} if verdict == "correct" else {"thumb": verdict}
        rating_submit(decision=decision, rater="bob", **facts)
    plan = automatic_plan("shop")
    assert plan.get("method", "") == method
    assert bool(plan["refusal"]) is not bool(method)


def test_rows_of_a_data_set_go_by_its_kind() -> None:
    policies = []
    for name in ("a", "b"):
        policy = make_policy("shop")
        assert policy.run is not None
        snapshot = Snapshot.objects.create(
            agent="shop", kind="labels", path=name, sha256=name * 64, feedback_count=3, counts={"train": len(policies)}
        )  # fmt: skip
        policy.run.snapshot = snapshot
        policy.run.save()
        policies.append(policy)
    assert "labels, train" in policy_diff(*policies)["data"]


@pytest.mark.parametrize(
    ("loss", "held_out", "warned"),
    [(1e-4, 0.47, True), (0.4, 0.47, False), (0.01, 0.05, False), (0.5, 0.9, False)],
)
def test_a_run_that_learnt_its_rows_by_heart_is_called_overfit(
    loss: float, held_out: float, warned: bool
) -> None:
    series = {"loss": [(1, 2.0), (9, loss)], "eval_loss": [(9, held_out)]}
    assert bool(overfit_words(series)) is warned
    assert overfit_words({"loss": [(1, 1e-4)]}) == ""


def test_pages_offer_buttons_and_no_commands_of_a_shell(operator: Client) -> None:
    rated(1)
    policy = make_policy("shop")
    for address in (
        "/",
        "/policies/",
        f"/policies/{policy.name}/",
        "/agents/shop/",
        f"/runs/{policy.run.pk}/",
        "/runs/?agent=none",
        "/reward-models/?agent=shop",
        "/experiments/",
        "/imports/",
        "/rate/?agent=shop",
        "/rate/?agent=none",
        "/decisions/",
    ):
        named = set(re.findall(r"manage\.py (\w+)", operator.get(address).text))
        assert named <= {"benchmark_model", "qcluster", "serve"}, address
    assert 'value="judge"' in operator.get("/").text


# --- Corrections --------------------------------------------------------------------------------------------


def test_corrections_of_a_closed_set_are_picked(operator: Client) -> None:
    queues = ["billing", "returns", "other"]
    for number in range(42):
        decision_record(agent="shop", messages=f"question {number}", response=queues[number % 3])
    forget_all()
    page = operator.get("/rate/?agent=shop")
    offered = {option.response for option in page.context["corrections"]}
    assert offered == set(queues) - {page.context["decision"].response}
    assert '<select name="correction">' in page.text


def test_corrections_of_free_text_are_written(operator: Client) -> None:
    decision_record(agent="shop", messages="Where is it?", response="On its way.")
    page = operator.get("/rate/?agent=shop")
    assert page.context["corrections"] == []
    assert '<textarea name="correction"' in page.text
