"""Comparisons with recorded answers: which evidence applies, how many answers of each side are right, the gate."""

import dataclasses
import json
from random import Random
from typing import Any

import pytest
from django.core.management import call_command

from feedback.services import decision_record, rating_submit
from rl.evaluation.service import EvaluationOrder, EvaluationRefused, evaluate
from rl.gates.evidence_kinds import CORRECTIONS, KNOWN, LABELS, PAIRS, REWARDS
from rl.gates.headlines import coverage_text
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.models import Policy
from rl.registry import gate_evidence
from rl.registry import service as registry
from rl.training.evaluate import evaluate_policy
from rl.training.result import TrainingRefused
from rl.training.sides import LinearSide, RecordedSide, kinds_scored
from tests.support.linear import BOT, QUEUES, asked, tickets, weighted
from tests.support.registry_rows import policy_of
from tests.support.split_prompts import stand

AGENT = dataclasses.replace(BOT, answers=("a", "b"))
SIDE = LinearSide(weighted(), AGENT)
"""Answers a to what is hot, b to what is cold."""


def prompt(number: int, **facts: Any) -> dict[str, Any]:
    text = f"{'hot' if number % 2 else 'cold'} {number}"
    return {"prompt": asked(text), "prompt_hash": text, **facts}


def recorded(rows: Any, answer: str = "a") -> RecordedSide:
    return RecordedSide("tickets-app", "your app's model", {row["prompt_hash"]: answer for row in rows})


def known(count: int) -> list[dict[str, Any]]:
    return [prompt(n, right=["a" if n % 2 else "b"], wrong=[]) for n in range(count)]


def test_recorded_answers_are_judged_on_known_answers() -> None:
    rows = known(10)
    found = evaluate_policy(SIDE, agent=AGENT, others={KNOWN: rows}, against=recorded(rows), needed=5)
    assert found["comparison"]["against"] == "tickets-app"
    assert found["evidence"][KNOWN]["own"]["value"] == 1.0
    assert found["evidence"][KNOWN]["against_value"] == 0.5
    assert found["evidence"][KNOWN]["difference"]["value"] == 0.5
    assert [one["other_answer"] for one in found["held_out"]["answers"]] == ["a"] * 10


def test_kinds_that_need_log_probabilities_do_not_apply_and_say_why() -> None:
    pairs = [prompt(n, chosen="a", rejected="b") for n in range(10)]
    labels = [prompt(n, completion="a", score=float(n % 4 > 1)) for n in range(10)]
    rows = known(10)
    others = {LABELS: labels, KNOWN: rows}
    found = evaluate_policy(SIDE, pairs, agent=AGENT, others=others, against=recorded(rows), needed=5)
    held_out = found["held_out"]
    assert found["carried_by"] == KNOWN
    assert set(held_out["barred"]) == {PAIRS, LABELS}
    assert all("log-probabilities" in reason for reason in held_out["barred"].values())
    assert held_out["cases"] == []
    assert set(held_out["others"]) == {KNOWN}
    assert found["preference_accuracy"]["n"] == 10, "of the policy alone it is still known"
    assert found["comparison"]["preference_accuracy"] is None
    assert "against_value" not in found["evidence"][PAIRS]


def test_without_an_answer_that_can_be_compared_nothing_is_compared() -> None:
    labels = [prompt(n, completion="a", score=float(n % 4 > 1)) for n in range(10)]
    free = dataclasses.replace(BOT, answers=())
    side = LinearSide(weighted(), free)
    found = evaluate_policy(side, agent=free, others={LABELS: labels}, against=recorded(labels), needed=5)
    assert found["samples"] == 0
    assert found["comparison"]["difference"] is None
    assert set(found["held_out"]["barred"]) == {LABELS}


def test_written_free_texts_need_log_probabilities_and_written_choices_do_not() -> None:
    assert CORRECTIONS in kinds_scored(dataclasses.replace(BOT, answers=()))
    assert CORRECTIONS not in kinds_scored(AGENT)


def test_prompts_without_a_recorded_answer_are_left_out() -> None:
    rows = known(10)
    side = recorded(rows[:6])
    found = evaluate_policy(SIDE, agent=AGENT, others={KNOWN: rows}, against=side, needed=5)
    assert found["prompts_answered"] == found["evidence"][KNOWN]["prompts"] == 6
    assert found["coverage"] == {"side": "your app's model", "of": 10, "unanswered": 4, "unasked": 0}
    assert "4 of 10" in coverage_text(found)
    with pytest.raises(TrainingRefused, match="tickets-app"):
        evaluate_policy(SIDE, agent=AGENT, others={KNOWN: rows}, against=recorded([]), needed=5)


def test_known_answers_beyond_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl.training.evaluate_figures.MAX_CHECKS", 6)
    found = evaluate_policy(SIDE, agent=AGENT, others={KNOWN: known(10)}, needed=5, generate_samples=2)
    assert found["coverage"] == {"unasked": 4}
    assert "4 further prompts" in coverage_text(found)
    assert "coverage" not in evaluate_policy(SIDE, agent=AGENT, others={KNOWN: known(10)}, needed=5)


def test_what_nobody_judged_of_a_policy_is_no_loss_of_reward() -> None:
    """The recorded answer is what people rated; half a point for every other answer would be a loss of its own."""
    labels = [prompt(n, completion="a", score=1.0) for n in range(0, 20, 2)]  # the policy answers b
    found = evaluate_policy(SIDE, agent=AGENT, others={LABELS: labels}, against=recorded(labels), needed=5)
    assert [one["judged"] for one in found["held_out"]["answers"]] == [False] * 10


@pytest.mark.parametrize(
    ("beside", "right"),
    [
        ({}, {"policy": (10, 10)}),
        ({"incumbent": recorded(known(10))}, {"policy": (10, 10), "incumbent": (5, 10)}),
        ({"incumbent": recorded(known(4))}, {"policy": (10, 10), "incumbent": (2, 4)}),
        ({"incumbent": recorded([])}, {"policy": (10, 10)}),
        (
            {"against": recorded(known(10), "b"), "incumbent": "against"},
            {"policy": (10, 10), "incumbent": (5, 10)},
        ),
    ],
)
def test_right_answers_are_counted_of_each_side(beside: dict[str, Any], right: dict[str, Any]) -> None:
    found = evaluate_policy(SIDE, agent=AGENT, others={KNOWN: known(10)}, needed=5, **beside)
    counts = {side: (round(one["value"] * one["n"]), one["n"]) for side, one in found["right"].items()}
    assert counts == right
    assert all(one["low"] <= one["value"] <= one["high"] for one in found["right"].values())


def test_without_a_known_answer_none_is_counted() -> None:
    rows = [prompt(n) for n in range(6)]
    checks = {REWARDS: lambda rows, answers: [0.5] * len(answers)}
    assert evaluate_policy(SIDE, agent=AGENT, others={REWARDS: rows}, checks=checks)["right"] == {}


@pytest.fixture
def trained(db: None) -> Policy:
    """A linear policy trained on corrections of an app's model that is right in about half of its answers."""
    random = Random(5)
    for text, queue in tickets(130):
        answer = queue if random.random() < 0.5 else random.choice(QUEUES)
        row = decision_record(agent="tickets", messages=asked(text), response=answer).row
        rating_submit(decision=row, rater="ada", thumb="up" if answer == queue else "down")
        if answer != queue:
            rating_submit(decision=row, rater="ada", correction=queue)
    knobs = {"features": "words", "penalty": "1"}
    return Policy.objects.get(
        name=train.train(TrainOrder("tickets", "linear", knobs=knobs, actor="train_linear"))["policy"]
    )


@pytest.mark.campaign
@pytest.mark.training
def test_three_sides_are_reported(trained: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    assert (trained.parent.name, trained.parent.kind) == ("tickets-app", "recorded")
    assert gate_evidence.rival_name(trained) == "tickets-app"
    call_command("evaluate_model", policy=trained.name, compare="incumbent", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"]["against"] == "tickets-app"
    assert found["incumbent"] == {"name": "tickets-app", "title": "your app's model", "kind": "recorded"}
    right = found["right"]
    assert set(right) == {"policy", "incumbent", "base"}
    assert len({side["n"] for side in right.values()}) == 1
    assert right["policy"]["value"] > right["incumbent"]["value"] > 0.4
    report = gate_evidence.policy_judge(trained)
    outcomes = {verdict.rule: verdict.outcome for verdict in report.verdicts}
    assert (report.against, outcomes["accuracy"]) == ("tickets-app", "passed")
    assert report.passed, report.reason
    assert registry.policy_promote(trained, actor="test").stage == "champion"
    trained.refresh_from_db()
    assert trained.metrics["right"] == right
    assert trained.metrics["against_title"] == "your app's model"


@pytest.mark.training
def test_an_evaluation_names_whom_it_cannot_compare_with(trained: Policy) -> None:
    registry.policy_promote(trained, actor="ada", force=True, reason="a test")
    for order, fault in (
        (EvaluationOrder(policy=trained.name, compare="incumbent"), "is the incumbent itself"),
        (EvaluationOrder(policy="tickets-app"), "no files to evaluate"),
    ):
        with pytest.raises(ValueError, match=fault):
            evaluate(order)


@pytest.mark.django_db
def test_an_incumbent_without_an_answer_to_these_prompts_is_refused(ratchet_home: Any) -> None:
    for number in range(4):
        stand("tickets", asked(f"hot {number}"), "holdout")
        row = decision_record(
            agent="tickets", messages=asked(f"hot {number}"), response="a", source="simulation"
        ).row
        rating_submit(decision=row, rater="ada", thumb="up" if number % 2 else "down")
    Policy.objects.create(name="gone", kind="recorded", agent="tickets", recorded_as="gone", stage="champion")
    folder = weighted().save(ratchet_home / "policies" / "one").parent
    policy = policy_of(
        "one", "candidate", "tickets", kind="linear", adapter_path=str(folder), adapter_sha256=""
    )
    with pytest.raises(EvaluationRefused, match="policy retire gone"):
        evaluate(EvaluationOrder(policy=policy.name, compare="incumbent"))


@pytest.mark.django_db
def test_an_agent_without_an_incumbent_says_so(ratchet_home: Any) -> None:
    folder = weighted().save(ratchet_home / "policies" / "one").parent
    policy = policy_of(
        "one", "candidate", "tickets", kind="linear", adapter_path=str(folder), adapter_sha256=""
    )
    with pytest.raises(EvaluationRefused, match="no incumbent"):
        evaluate(EvaluationOrder(policy=policy.name, compare="incumbent"))
