"""Pages say what is so: cut answers, overfit runs, the newest candidate, what is missing until the next training."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from feedback.cache import forget_all
from feedback.models import Decision
from feedback.services import agent_set_up, decision_record, rating_submit
from rl.jobs.estimates import automatic_plan
from rl.models import Snapshot
from rl.registry import service as registry
from rl.registry.comparisons import policy_diff
from rl.selectors import agent_cards, agent_overview
from tests.support.api_client import person
from tests.test_pages import make_policy

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


# --- What is missing ----------------------------------------------------------------------------------------


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
