"""Pages say what is so: cut answers, overfit runs, the newest candidate, what is missing until the next training."""

import re
import uuid
from typing import Any

import pytest
from django.test import Client

from feedback.cache import forget_all
from feedback.models import Decision, Rating
from feedback.rating.requests import verdict_ask
from feedback.services import agent_set_up, decision_record, rating_submit
from rl.jobs.estimates import automatic_plan
from rl.models import Policy, Snapshot
from rl.models.agent_definitions import agent_served
from rl.registry import service as registry
from rl.registry.comparisons import policy_diff
from rl.selectors import agent_overview
from tests.support.hosted import hosted
from tests.support.registry_rows import make_policy

pytestmark = pytest.mark.django_db


def rated(count: int, agent: str = "shop") -> None:
    for number in range(count):
        decision = decision_record(agent=agent, messages=f"question {number}", response="an answer").row
        rating_submit(decision=decision, rater="bob", thumb="up" if number % 2 else "down")


def playground(client: Client, **facts: Any) -> Any:
    metadata = facts.pop("metadata", {})
    row = decision_record(agent="shop", messages="Where is it?", **facts).row
    Decision.objects.filter(pk=row.pk).update(metadata=metadata)  # as the gateway writes it
    return client.get(f"/agents/shop/playground/?answers={row.pk}")


def test_the_agents_page_shows_no_older_candidate_than_the_newest() -> None:
    rated(1)
    older, newer = make_policy("shop"), make_policy("shop")
    overview = agent_overview("shop")
    assert overview.waiting == newer
    registry.policy_reject(newer, actor="eve", reason="worse")
    overview = agent_overview("shop")
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
    [({"up": 2, "down": 3, "correct": 5}, "SFT"), ({"up": 5, "down": 5}, "SFT"), ({"down": 10}, "")],
)
def test_ten_ratings_are_enough_to_train(verdicts: dict[str, int], method: str) -> None:
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
            agent="shop",
            kind="labels",
            path=name,
            sha256=name * 64,
            feedback_count=3,
            counts={"train": len(policies)},
        )
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
        "/experiments/",
        "/imports/",
        "/rate/?agent=shop",
        "/rate/?agent=none",
        "/decisions/",
    ):
        named = set(re.findall(r"manage\.py (\w+)", operator.get(address).text))
        assert named <= {"benchmark_model", "serve"}, address
    assert 'value="judge"' in operator.get("/").text


def test_the_lineage_has_no_policy_that_was_not_trained_here(operator: Client) -> None:
    trained = [make_policy("shop"), make_policy("shop")]
    hosted("http://localhost:1/v1", "shop-hosted", stage="candidate")
    Policy.objects.filter(name="shop-hosted").update(agent="shop")
    block = next(one for one in operator.get("/policies/").context["agents"] if one["agent"] == "shop")
    assert {node.name for node in block["lineage"].nodes} == {one.name for one in trained}
    assert "shop-hosted" in block["names"]


def test_corrections_of_a_closed_set_are_picked(operator: Client) -> None:
    queues = ["billing", "returns", "other"]
    for number in range(42):
        decision_record(agent="shop", messages=f"question {number}", response=queues[number % 3])
    forget_all()
    page = operator.get("/rate/?agent=shop")
    shown = page.context["decision"]
    assert set(page.context["picks"]) == set(queues) - {shown.response}
    offered = re.findall(r'name="pick" value="(\w+)"', page.text)
    assert set(offered) == set(queues) - {shown.response}
    assert '<textarea name="correction"' in page.text  # another answer can be written
    sent = {"id": str(uuid.uuid4()), "decision": str(shown.pk), "correction": shown.response}
    sent |= {"pick": offered[0]}
    assert operator.post("/rate/?agent=shop", sent).status_code == 302
    assert Rating.objects.get().correction == offered[0]


def test_options_that_stand_in_the_prompts_have_buttons_too(operator: Client) -> None:
    """They are no closed set for policies."""
    for number in range(42):
        text = f"{number}: where is it? Answer with one of: refund, shipping, other"
        decision_record(agent="shop", messages=text, response=("refund", "shipping", "other")[number % 3])
    forget_all()
    assert agent_served("shop").answers == ()
    assert len(operator.get("/rate/?agent=shop").context["picks"]) == 2


def test_few_or_varied_answers_have_no_buttons(operator: Client) -> None:
    for number in range(39):
        decision_record(agent="few", messages=f"question {number}", response=("yes", "no")[number % 2])
    for number in range(60):
        decision_record(agent="words", messages=f"question {number}", response=f"answer {number}")
    for agent in ("few", "words"):
        assert operator.get(f"/rate/?agent={agent}").context["picks"] == []


def test_a_card_that_returns_for_a_correction_says_why(operator: Client) -> None:
    made = [decision_record(agent="shop", messages=f"question {n}", response="yes").row for n in range(3)]
    rating_submit(decision=made[0], rater="ada", thumb="down")
    verdict_ask("shop", [made[0].prompt_hash, made[1].prompt_hash])
    for decision, again in zip(made, (True, False, False), strict=True):
        page = operator.get(f"/rate/?decision={decision.pk}")
        assert page.context["correction_wanted"] is again
        assert ('class="asked-again"' in page.text) is again
        assert ('<details class="correct" data-goto-key="c" open>' in page.text) is again
    rating_submit(decision=made[0], rater="bob", correction="no")
    page = operator.get(f"/rate/?decision={made[0].pk}")
    assert page.context["correction_wanted"] is False


def test_corrections_of_free_text_are_written(operator: Client) -> None:
    decision_record(agent="shop", messages="Where is it?", response="On its way.")
    page = operator.get("/rate/?agent=shop")
    assert page.context["corrections"] == []
    assert '<textarea name="correction"' in page.text
