"""Evaluation: figures worked by hand from made-up answers, and a real model end to end."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.agents.base import Agent, ChoiceAgent, InvalidResponse, State
from rl.gates.report import GateBounds
from rl.gates.rules import gate_judge
from rl.linear.model import LinearPolicy
from rl.models import Evaluation
from rl.registry.gate_evidence import evidence_of
from rl.training import evaluate, evaluate_figures, held_out, sides
from rl.training.evaluate import evaluate_policy
from rl.training.policy import Generation, LoadedPolicy, load_policy
from rl.training.result import TrainingRefused
from rl.training.scoring import ResponseScore
from rl.training.sides import LinearSide
from tests.support.figures import figures_of
from tests.support.tiny_models import HARDWARE, tiny_adapter


class Picker(ChoiceAgent):
    """Picks a fruit; the state may name the ripe one."""

    def ground_truth(self, state: State) -> list[str] | None:
        return [self.respond(state["ripe"])] if "ripe" in state else None


class Talker(Agent):
    def parse(self, response: str, state: State | None = None) -> dict[str, Any]:
        if not response.strip():
            raise InvalidResponse("expected some text, found none")
        return {"text": response}


PICKER = Picker(
    slug="picker", title="", description="", answer_key="fruit", options_key="fruits", max_new_tokens=6
)
TALKER = Talker(slug="talker", title="", description="", max_new_tokens=6)

FRUITS = ["apple", "pear", "plum"]


def pick(fruit: str) -> str:
    return json.dumps({"fruit": fruit})


def a_row(ask: str, chosen: str, rejected: str, **state: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": ask}],
        "chosen": chosen,
        "rejected": rejected,
    }
    return {**row, "state": {"fruits": FRUITS, **state}} if state or chosen.startswith("{") else row


class Made:
    """A policy that is a table: log-probability per (ask, response), answer per ask."""

    @staticmethod
    def written(rows: Any) -> tuple[Any, None]:
        return rows, None

    def __init__(
        self,
        logps: Mapping[tuple[str, str], float],
        answers: Mapping[str, str],
        tokens: Mapping[str, int] | None = None,
    ) -> None:
        self.logps, self.answers, self.tokens = logps, answers, tokens or {}
        self.base_model, self.adapter = "made", "made-v1"
        self.encoder = self
        self.asked: list[str] = []
        self.chosen: dict[str, str] = {}
        """Ask -> what is the likeliest of the listed answers, where that is not what is written."""

    @contextlib.contextmanager
    def without_adapter(self) -> Iterator[None]:
        yield


@pytest.fixture(autouse=True)
def made(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies are tables, but in slow tests."""
    if request.node.get_closest_marker("slow"):
        return

    def scores(policy: Made, rows: Any, **_: Any) -> list[tuple[ResponseScore, ResponseScore]]:
        def one(row: Any, side: str) -> ResponseScore:
            ask, response = row["prompt"][-1]["content"], row[side]
            return ResponseScore(policy.logps[ask, response], policy.tokens.get(response, 4))

        return [(one(row, "chosen"), one(row, "rejected")) for row in rows]

    def answers(policy: Made, prompts: Any, **_: Any) -> list[Generation]:
        policy.asked += [messages[-1]["content"] for messages in prompts]
        return [Generation(policy.answers[messages[-1]["content"]], 3, "stop") for messages in prompts]

    def responses(policy: Made, items: Any, **_: Any) -> list[ResponseScore]:
        """A listed answer of the table is the likeliest, then those of the log-probabilities, then the others."""
        found = []
        for messages, text in items:
            ask = messages[-1]["content"]
            answered = policy.chosen.get(ask, policy.answers.get(ask)) == text
            found.append(ResponseScore(0.0 if answered else policy.logps.get((ask, text), -50.0), 4))
        return found

    monkeypatch.setattr(sides, "score_pairs", scores)
    monkeypatch.setattr(sides, "score_responses", responses)
    for module in (sides, evaluate_figures):
        monkeypatch.setattr(module, "generate", answers)
    monkeypatch.setattr(sides, "head_check", lambda policy: None)
    monkeypatch.setattr(evaluate, "LoadedPolicy", Made)


A, P, M = pick("apple"), pick("pear"), pick("plum")

ROWS = [a_row(f"q{i}", A, P) for i in range(10)]


def prefers(right: int, answers: str | None = None) -> Made:
    """Holds the chosen response more likely for the first `right` of ten asks."""
    logps = {}
    for i in range(10):
        logps[f"q{i}", A], logps[f"q{i}", P] = (-1.0, -2.0) if i < right else (-2.0, -1.0)
    return Made(logps, {f"q{i}": answers or A for i in range(10)})


def test_preference_accuracy_is_the_share_of_pairs_whose_chosen_side_is_likelier() -> None:
    outcome = evaluate_policy(prefers(7), ROWS, agent=PICKER)
    share = outcome["preference_accuracy"]
    assert (share["value"], share["n"]) == (0.7, 10)
    # Wilson: (0.7 + 1.9208/10) / (1 + 3.8415/10) -/+ ..., R: binom.wilson(7, 10) -> 0.3967781, 0.8922087
    assert (share["low"], share["high"]) == pytest.approx((0.3967781, 0.8922087), abs=1e-6)
    assert outcome["samples"] == 10


def test_a_tie_is_not_a_preference() -> None:
    policy = Made({("q0", A): -1.0, ("q0", P): -1.0}, {"q0": A})
    assert evaluate_policy(policy, ROWS[:1], agent=PICKER)["preference_accuracy"]["value"] == 0.0


def test_the_length_normalised_share_divides_by_tokens() -> None:
    # chosen: -6 over 6 tokens is -1 a token; rejected: -4 over 2 is -2
    policy = Made({("q0", A): -6.0, ("q0", P): -4.0}, {"q0": A}, {A: 6, P: 2})
    outcome = evaluate_policy(policy, ROWS[:1], agent=PICKER)
    assert outcome["preference_accuracy"]["value"] == 0.0
    assert outcome["preference_accuracy_length_normalised"]["value"] == 1.0


def test_the_comparison_counts_the_pairs_only_one_side_gets_right() -> None:
    comparison = evaluate_policy(prefers(9), ROWS, agent=PICKER, against=prefers(3))["comparison"]
    assert comparison["against"] == "made-v1"
    assert comparison["preference_accuracy"]["value"] == 0.3
    assert (comparison["b"], comparison["c"]) == (6, 0)
    assert comparison["difference"]["value"] == pytest.approx(0.6)
    assert 0 < comparison["difference"]["low"] < 0.6 < comparison["difference"]["high"] < 1
    assert comparison["p_value"] == pytest.approx(2 / 2**6)


def test_the_pairs_of_a_prompt_share_one_vote() -> None:
    rows = [a_row("q0", A, P), a_row("q0", A, M), *ROWS[1:3]]
    one, two = prefers(10), prefers(0)
    one.logps = {**one.logps, ("q0", M): 0.0}
    two.logps = {**two.logps, ("q0", M): -1.0, ("q2", A): 0.0}
    found = evaluate_policy(one, rows, agent=PICKER, against=two)
    pairs = found["evidence"]["pairs"]
    assert (found["samples"], pairs["prompts"], pairs["pairs"]) == (3, 3, 4)
    # right on 1/2, 1, 1 of the pairs of three prompts, the other on 0, 0, 1
    assert found["preference_accuracy"]["value"] == pairs["value"] == pytest.approx(2.5 / 3)
    assert found["preference_accuracy"]["n"] == 3
    assert pairs["against_value"] == pytest.approx(1 / 3)
    # differences 1/2, 1, 0: mean 1/2, standard error 1/2 / sqrt(3), Student's t with 2 degrees 4.302653
    assert pairs["difference"] == pytest.approx(
        {"value": 0.5, "low": 0.5 - 1.242069, "high": 0.5 + 1.242069}, abs=1e-5
    )
    # of the four patterns of signs one has a sum of 1.5
    assert pairs["p_value"] == pytest.approx(2 / 4)
    assert "b" not in pairs
    single = evaluate_policy(one, rows, agent=PICKER, against=two, max_samples=1)
    assert single["evidence"]["pairs"]["pairs"] == 2


def test_the_same_policy_twice_shows_no_difference() -> None:
    comparison = evaluate_policy(prefers(6), ROWS, agent=PICKER, against=prefers(6))["comparison"]
    assert comparison["difference"]["value"] == 0
    assert comparison["difference"]["low"] < 0 < comparison["difference"]["high"]
    assert comparison["p_value"] == 1.0
    assert comparison["average_reward_difference"]["value"] == 0


def test_both_sides_answer_the_same_prompts_each_prompt_once() -> None:
    rows = [a_row("q0", A, P), a_row("q0", A, M), *ROWS[1:4]]
    one, two = prefers(10), prefers(10)
    for policy in (one, two):
        policy.logps = {**policy.logps, ("q0", M): -9.0}
    outcome = evaluate_policy(one, rows, agent=PICKER, against=two, generate_samples=3)
    assert one.asked == two.asked == ["q0", "q1", "q2"]
    assert outcome["samples"] == 4
    assert outcome["prompts_answered"] == outcome["valid_rate"]["n"] == 3


def test_an_answer_that_is_not_listed_in_the_state_is_not_valid() -> None:
    policy = prefers(10)
    policy.answers = {**policy.answers, "q0": "no json", "q1": pick("banana"), "q2": M}
    outcome = evaluate_policy(policy, ROWS, agent=PICKER)
    assert outcome["written"]["valid_rate"]["value"] == 0.8
    assert outcome["valid_rate"]["value"] == 1.0  # as it is served: chosen out of what the state lists
    reasons = [error["reason"] for error in outcome["errors"]]
    assert len(reasons) == 2
    assert "found 'no json'" in reasons[0]
    assert "which was not listed" in reasons[1]
    assert outcome["errors"][0]["prompt"] == "q0"
    assert outcome["errors"][0]["expected"] == A


def test_without_a_reward_function_an_answer_is_worth_what_people_thought_of_it() -> None:
    # liked 1, only rejected 0, invalid 0, not rated 0.5; written differently but the same choice counts as the same
    policy = prefers(10)
    policy.answers = {"q0": '{"fruit":"apple"}', "q1": P, "q2": "no json", "q3": M}
    policy.chosen = {"q0": A, "q2": P}
    outcome = evaluate_policy(policy, ROWS[:4], agent=PICKER)
    assert outcome["written"]["average_reward"]["value"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert outcome["average_reward"]["value"] == pytest.approx((1 + 0 + 0 + 0.5) / 4)
    assert 0 <= outcome["average_reward"]["low"] < outcome["average_reward"]["high"] <= 1
    # of the three answers that were rated one was liked; the fourth may be either
    liked = outcome["liked"]
    assert (liked["value"], liked["n"], liked["of"]) == (pytest.approx(1 / 3), 3, 4)
    assert (liked["least"], liked["most"]) == (1 / 4, 2 / 4)
    # Wilson: R: binom.wilson(1, 3) -> 0.06149194, 0.79234040
    assert (liked["low"], liked["high"]) == pytest.approx((0.06149194, 0.79234040), abs=1e-7)
    assert "people rejected this answer" in [error["reason"] for error in outcome["errors"]]


def test_an_answer_both_preferred_and_rejected_is_worth_a_half() -> None:
    rows = [a_row("q0", A, P), a_row("q0", M, A)]
    policy = Made({("q0", A): -1.0, ("q0", P): -2.0, ("q0", M): -3.0}, {"q0": A})
    assert evaluate_policy(policy, rows, agent=PICKER)["average_reward"]["value"] == 0.5


def test_agreement_with_the_truth_counts_only_prompts_whose_truth_is_known() -> None:
    rows = [a_row("q0", A, P, ripe="apple"), a_row("q1", A, P, ripe="plum"), a_row("q2", A, P)]
    outcome = evaluate_policy(prefers(10), rows, agent=PICKER, against=prefers(10, answers=M))
    assert outcome["ground_truth"]["value"] == 0.5
    assert outcome["ground_truth"]["n"] == 2
    assert outcome["comparison"]["ground_truth"]["value"] == 0.5
    assert evaluate_policy(prefers(10), ROWS, agent=PICKER)["ground_truth"] is None


def test_a_pair_judged_the_other_way_round_is_shown_with_by_how_much() -> None:
    (error,) = evaluate_policy(prefers(9), ROWS, agent=PICKER)["errors"]
    assert figures_of(error.pop("reason")) == [1.0]
    assert error == {"prompt": "q9", "answer": P, "expected": A}


def test_free_text_answers_are_compared_without_surrounding_space() -> None:
    rows = [a_row("q0", "yes please", "no")]
    policy = Made({("q0", "yes please"): -1.0, ("q0", "no"): -2.0}, {"q0": " yes please\n"})
    outcome = evaluate_policy(policy, rows, agent=TALKER)
    assert outcome["average_reward"]["value"] == 1.0
    assert outcome["valid_rate"]["value"] == 1.0


def test_max_samples_and_no_generation_are_respected() -> None:
    policy = prefers(10)
    outcome = evaluate_policy(policy, ROWS, agent=PICKER, max_samples=4, generate_samples=0)
    assert outcome["samples"] == 4
    assert outcome["valid_rate"] == {"value": None, "low": None, "high": None, "n": 0}
    assert policy.asked == []


def test_prompts_that_nobody_judged_show_whether_answers_are_valid_and_no_more() -> None:
    spare = [
        {"prompt": [{"role": "user", "content": ask}], "state": {"fruits": FRUITS}}
        for ask in ("q0", "s0", "s1")
    ]
    policy = prefers(10)
    policy.answers = {**policy.answers, "s0": "no fruit", "s1": A}
    rival = prefers(10)
    rival.answers = {**rival.answers, "s0": A, "s1": A}
    outcome = evaluate_policy(policy, ROWS, agent=PICKER, against=rival, spare=spare)
    written = outcome["written"]["valid_rate"]
    assert (outcome["valid_rate"]["value"], written["value"], written["n"]) == (1.0, 11 / 12, 12)
    assert (outcome["average_reward"]["value"], outcome["average_reward"]["n"]) == (1.0, 10)
    assert [answer["judged"] for answer in outcome["held_out"]["answers"]] == [True] * 10 + [False] * 2
    policy.asked.clear()
    evaluate_policy(policy, ROWS, agent=PICKER, generate_samples=3, spare=spare)
    assert policy.asked == ["q0", "q1", "q2", "s0"], (
        "however many are rated, some are asked that nobody rated"
    )


@pytest.mark.django_db
def test_a_policy_that_chooses_well_is_not_shut_out_for_how_it_would_write() -> None:
    """Right in 61 of 100 against 20, and 93 % valid where it writes, of which it is never asked."""
    prompts = [
        {
            "prompt": [{"role": "user", "content": f"k{i}"}],
            "state": {"fruits": FRUITS, "ripe": "apple"},
            "right": [A],
        }
        for i in range(100)
    ]
    policy, rival = Made({}, {f"k{i}": A for i in range(100)}), Made({}, {f"k{i}": A for i in range(100)})
    policy.answers = {**policy.answers, **{f"k{i}": "no json" for i in range(7)}}
    policy.chosen = {f"k{i}": A if i < 61 else P for i in range(100)}
    rival.chosen = {f"k{i}": A if i < 20 else P for i in range(100)}
    outcome = evaluate_policy(policy, agent=PICKER, others={"known": prompts}, against=rival)
    assert outcome["carried_by"] == "known"
    known = outcome["evidence"]["known"]
    assert (known["value"], known["against_value"]) == (0.61, 0.20)
    assert (outcome["valid_rate"]["value"], outcome["written"]["valid_rate"]["value"]) == (1.0, 0.93)
    evaluation = Evaluation.objects.create(
        agent="picker", against="base", evidence=outcome["held_out"], split="holdout", figures={}, samples=100
    )
    report = gate_judge(evidence_of(evaluation), GateBounds())
    verdicts = {verdict.rule: verdict for verdict in report.verdicts}
    # 41 won and none lost: 41 points, with p = 2^-41 or so
    assert verdicts["accuracy"].outcome == "passed"
    assert verdicts["accuracy"].figures["value"] == pytest.approx(0.41)
    assert verdicts["valid"].outcome == "passed", verdicts["valid"].words
    assert (verdicts["valid"].figures["written"], verdicts["valid"].figures["against_written"]) == (0.93, 1.0)
    assert "93.0 % and 100.0 %" in verdicts["valid"].words
    assert report.passed, report.reason


def test_answers_on_a_quantised_base_stand_beside_those_in_full_precision() -> None:
    seven = {f"q{i}" for i in range(7)}
    asked: list[str] = []

    def quantised(prompt: held_out.HeldOutPrompt) -> Generation:
        asked.append(prompt.messages[-1]["content"])
        return Generation(A if asked[-1] in seven else "no fruit", 3, "stop")

    found = evaluate_policy(prefers(10), ROWS, agent=PICKER, quantised=quantised)["quantised"]
    assert asked == [f"q{i}" for i in range(10)]
    assert (found["same_answers"]["value"], found["same_answers"]["n"]) == (0.7, 10)
    assert (found["valid_rate"]["value"], found["average_reward"]["value"]) == (0.7, 0.7)


def test_nothing_to_evaluate_is_refused() -> None:
    # no pairs are refused
    with pytest.raises(TrainingRefused, match="at least one held-out pair"):
        evaluate_policy(None, [], agent=PICKER)  # type: ignore[arg-type]
    # an unknown opponent is an error
    with pytest.raises(ValueError, match="against='base'"):
        evaluate_policy(None, ROWS, agent=PICKER, against="champion")  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_real_policy_is_evaluated_against_its_base_into_json(base_path: Path, tmp_path: Path) -> None:
    policy: LoadedPolicy = load_policy(
        str(base_path), tiny_adapter(base_path, tmp_path / "adapter"), hardware=HARDWARE
    )
    outcome = evaluate_policy(policy, ROWS, agent=PICKER, against="base", generate_samples=2)
    assert json.loads(json.dumps(outcome)) == outcome
    comparison = outcome["comparison"]
    assert comparison["against"] == "base"
    n = outcome["samples"]
    gained = round(n * (outcome["preference_accuracy"]["value"] - comparison["preference_accuracy"]["value"]))
    assert gained == comparison["b"] - comparison["c"]
    # random weights write nothing of use, and choose all the same
    assert outcome["written"]["valid_rate"]["value"] == 0.0
    assert outcome["valid_rate"]["value"] == 1.0
    assert "served answers are chosen or within a schema): expected JSON" in outcome["errors"][-1]["reason"]
    alone = evaluate_policy(
        load_policy(str(base_path), hardware=HARDWARE), ROWS, agent=PICKER, generate_samples=2
    )
    assert alone["preference_accuracy"] == comparison["preference_accuracy"]
    assert "comparison" not in alone


def test_a_classifier_stands_beside_the_policy_on_the_same_prompts() -> None:
    apple = LinearPolicy(
        "picker",
        "closed",
        ("words",),
        (A, P),
        False,
        (f"is {A}", f"is {P}"),
        (),
        np.zeros((2, 0)),
        np.array([1.0, 0.0]),
    )
    outcome = evaluate_policy(prefers(7, answers=P), ROWS, agent=PICKER, baseline=LinearSide(apple, PICKER))
    found = outcome["baseline"]
    assert (found["preference_accuracy"]["value"], found["carried_by"]) == (1.0, "pairs")
    # it is wrong nowhere, the policy in three of ten; it answers what people preferred, the policy what they rejected
    assert found["preference_accuracy_difference"]["difference"]["value"] == pytest.approx(-0.3)
    assert (found["average_reward"]["value"], found["average_reward_difference"]["value"]) == (1.0, -1.0)
    assert found["valid_rate"]["n"] == 10
    assert found["policy"]["preference_accuracy"]["value"] == 0.7


def test_a_text_loops_where_most_of_it_stands_in_it_before() -> None:
    assert held_out.loops("W" + "er" * 40)
    assert not held_out.loops("er" * 31)  # 62 characters: too short to tell
    assert not held_out.loops(
        "Let the soil dry before you water it again; your basil will thank you within two weeks."
    )
