"""`auto`: the method that fits the evidence found, and why; and the objective of a reward model."""

from __future__ import annotations

import json

import pytest

from feedback.services import comparison_submit, decision_record, rating_submit
from rl.jobs.estimates import order_automatic, order_estimate
from rl.jobs.method_selection import method_chosen

pytestmark = pytest.mark.django_db

AGENT = "support-bot"


def decided(prompt: str, response: str) -> object:
    return decision_record(agent=AGENT, messages=prompt, response=response).row


def rated(prompt: str, response: str, **said: object) -> None:
    rating_submit(decision=decided(prompt, response), rater="ada", **said)  # type: ignore[arg-type]


def test_single_thumbs_are_heard_by_kto() -> None:
    for n in range(40):
        rated(f"q{n}", f"r{n}", thumb="up" if n % 3 else "down")
    chosen = method_chosen(AGENT)
    assert chosen.method == "kto"
    assert "not enough pairs" in chosen.reason


def test_sixteen_scores_one_to_a_prompt_are_heard_by_kto() -> None:
    for n in range(16):
        rated(f"q{n}", f"r{n}", score=0.9 if n % 2 else 0.2)
    assert method_chosen(AGENT).method == "kto"


def test_two_answers_to_each_prompt_are_pairs() -> None:
    for n in range(40):
        rated(f"q{n}", "good", stars=5)
        rated(f"q{n}", "bad", stars=1)
    chosen = method_chosen(AGENT)
    assert chosen.method == "dpo"
    assert "pairs to train on" in chosen.reason


@pytest.mark.slow
def test_many_thumbs_with_few_pairs_are_not_left_to_the_pairs() -> None:
    """Of 200 thumbs on 20 prompts, 15 pairs hold 30 responses: every prompt is in a pair, most responses are not."""
    for n in range(15):
        left, right = decided(f"q{n}", "left"), decided(f"q{n}", "right")
        comparison_submit(left=left, right=right, preference="left", rater="bob")  # type: ignore[arg-type]
    for n in range(200):
        rated(f"other {n}", f"r{n}", thumb="up" if n % 2 else "down")
    chosen = method_chosen(AGENT)
    assert chosen.method == "kto", chosen.reason
    assert "of them in pairs" in chosen.reason


def test_corrections_that_are_objects_are_learnt_field_by_field_in_place_of_the_bundled_base() -> None:
    for n in range(140):
        right = {"team": {"name": f"team {n % 4}", "level": n % 3}, "days": n, "tags": ["a", "b"][: n % 3]}
        rated(f"request {n} of {n % 4} at {n % 3}", "{}", thumb="down", correction=json.dumps(right))
    chosen = method_chosen(AGENT, base_model="bundled")
    assert (chosen.method, chosen.knobs) == ("linear", {"feedback": "corrections"})
    assert chosen.reason.startswith("auto took linear: ")
    assert method_chosen(AGENT, base_model="/models/own").method == "sft"
    assert method_chosen(AGENT, "linear").knobs == {"feedback": "corrections"}


def test_corrections_are_imitated_and_not_only_preferred() -> None:
    for n in range(40):
        rated(f"q{n}", "bad", thumb="down", correction=f"what I would have said to {n}")
    chosen = method_chosen(AGENT)
    assert chosen.method == "sft"
    assert "responses written by people" in chosen.reason


def test_a_few_corrections_beside_many_preferences_do_not_decide() -> None:
    for n in range(40):
        rated(f"q{n}", "good", thumb="up")
        rated(f"q{n}", "bad", thumb="down", **({"correction": f"better {n}"} if n < 12 else {}))
    assert method_chosen(AGENT).method == "dpo"


def test_liked_responses_alone_are_imitated() -> None:
    for n in range(20):
        rated(f"q{n}", f"r{n}", thumb="up")
    assert method_chosen(AGENT).method == "sft"


def test_scores_on_one_side_of_neutral_that_nobody_likes_go_through_a_reward_model() -> None:
    for n in range(30):
        rated(f"q{n}", f"r{n}", score=0.1 + 0.01 * n)
    chosen = method_chosen(AGENT)
    assert (chosen.method, chosen.knobs) == ("ppo", {"reward": "auto"})
    assert chosen.reason.startswith("auto took rlhf: ")


def asked(facts: dict[str, object]) -> None:
    for n in range(40):
        decision_record(agent=AGENT, messages=f"q{n}", response="?", metadata={"facts": facts})


@pytest.mark.slow
def test_prompts_with_right_answers_and_no_verdict_are_for_grpo() -> None:
    asked({"answer": "4"})
    chosen = method_chosen(AGENT)
    assert (chosen.method, chosen.knobs) == ("grpo", {"reward": "answer"})
    assert "prompts with a known right answer" in chosen.reason
    plan = order_estimate(order_automatic(AGENT))
    assert (plan.policy.method, plan.policy.recipe["reward"], plan.refusal) == ("grpo", "answer", "")
    # what people say goes before what a program can tell
    for n in range(40):
        rated(f"other {n}", f"r{n}", thumb="up" if n % 2 else "down")
    assert method_chosen(AGENT).method == "kto"


def test_prompts_with_tests_are_for_grpo_where_code_may_run(settings: object) -> None:
    asked({"tests": ["assert f(1) == 2"]})
    settings.ENABLE_CODE_EXECUTION = False  # type: ignore[attr-defined]
    assert "needs ENABLE_CODE_EXECUTION=true" in method_chosen(AGENT).reason
    settings.ENABLE_CODE_EXECUTION = True  # type: ignore[attr-defined]
    assert method_chosen(AGENT).knobs == {"reward": "code_execution"}


def test_rlhf_is_ppo_against_the_reward_model_found() -> None:
    assert method_chosen(AGENT, "rlhf").knobs == {"reward": "auto"}


@pytest.mark.parametrize(
    ("values", "objective"),
    [([{"thumb": "up"}, {"thumb": "down"}], "binary"), ([{"score": 0.8}, {"score": 0.3}], "regression")],
)
def test_a_reward_models_objective_is_taken_from_the_feedback(
    values: list[dict[str, object]], objective: str
) -> None:
    for n in range(30):
        rated(f"q{n}", f"r{n}", **values[n % 2])
    chosen = method_chosen(AGENT, "reward_model")
    assert (chosen.method, chosen.knobs) == ("reward_model", {"objective": objective})


def test_pairs_make_the_objective_pairwise() -> None:
    for n in range(30):
        rated(f"q{n}", "good", score=0.9)
        rated(f"q{n}", "bad", score=0.2)
    assert method_chosen(AGENT, "reward_model").knobs == {"objective": "pairwise"}


def test_an_objective_that_is_configured_stands(settings: object) -> None:
    settings.RATCHET_CONFIG = {"reward_model": {"objective": "binary"}}  # type: ignore[attr-defined]
    assert method_chosen(AGENT, "reward_model").knobs == {}
