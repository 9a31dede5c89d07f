"""`auto`: the method that fits the evidence found, and why; and the objective of a reward model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from feedback.services import comparison_submit, decision_record, rating_submit
from rl.agents import AGENTS
from rl.evaluation import candidates
from rl.jobs.estimates import order_automatic, order_estimate
from rl.jobs.lifecycle import TrainOrder, run_enqueue
from rl.jobs.method_selection import method_chosen, training_plan
from rl.jobs.stages import StageRunner, start_stage_run
from rl.linear.fit import fit
from rl.models import Policy, TrainingRun
from rl.online import pipeline
from rl.registry import service as registry
from rl.selectors import agent_cards
from tests.support.registry_rows import registered
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.django_db

AGENT = "support-bot"


def decided(prompt: str, response: str) -> object:
    return decision_record(agent=AGENT, messages=prompt, response=response).row


def rated(prompt: str, response: str, **said: object) -> None:
    rating_submit(decision=decided(prompt, response), rater="ada", **said)  # type: ignore[arg-type]


def thumb(up: object, **more: object) -> dict[str, object]:
    return {"thumb": "up" if up else "down", **more}


CASES: dict[str, tuple[int, Callable[[int], list[dict[str, object]]], str, dict[str, object]]] = {
    "single thumbs": (40, lambda n: [thumb(n % 3)], "kto", {}),
    "scores, one to a prompt": (16, lambda n: [{"score": 0.9 if n % 2 else 0.2}], "kto", {}),
    "two answers to each prompt": (40, lambda n: [{"stars": 5}, {"stars": 1}], "dpo", {}),
    "corrections": (40, lambda n: [thumb(False, correction=f"what I would have said to {n}")], "sft", {}),
    "a few corrections beside many preferences": (
        40,
        lambda n: [thumb(True), thumb(False, **({"correction": f"better {n}"} if n < 12 else {}))],
        "dpo",
        {"start_from": "sft"},
    ),
    "liked responses alone": (20, lambda n: [thumb(True)], "sft", {}),
    "low scores alone": (30, lambda n: [{"score": 0.1 + 0.01 * n}], "ppo", {"reward": "auto"}),
}
"""Number of prompts, what is said of each prompt's answers, the method that hears it, and its knobs."""


@pytest.mark.parametrize("case", CASES)
def test_the_feedback_decides_the_method(case: str) -> None:
    count, said, method, knobs = CASES[case]
    for n in range(count):
        for number, facts in enumerate(said(n)):
            rated(f"q{n}", f"r{number} to {n}", **facts)
    chosen = method_chosen(AGENT)
    assert (chosen.method, chosen.knobs) == (method, knobs), chosen.reason
    assert chosen.reason == f"auto took {'rlhf' if method == 'ppo' else method}: {chosen.why}"
    started = [str(knobs["start_from"])] if "start_from" in knobs else []
    assert [one.method for one in training_plan(AGENT).trainings][-1 - len(started) :] == [*started, method]


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


def test_corrections_that_are_objects_have_a_linear_policy_beside_sft() -> None:
    for n in range(140):
        right = {"team": {"name": f"team {n % 4}", "level": n % 3}, "days": n, "tags": ["a", "b"][: n % 3]}
        rated(f"request {n} of {n % 4} at {n % 3}", "{}", thumb="down", correction=json.dumps(right))
    for base_model in ("bundled", "/models/own"):
        plan = training_plan(AGENT, base_model=base_model)
        assert [one.method for one in plan.trainings] == ["linear", "sft"]
    assert method_chosen(AGENT, "linear").knobs == {"feedback": "corrections"}


def triaged(count: int, corrected: Callable[[int], bool]) -> None:
    """Objects of two fields, wrong and corrected, wrong and disliked alone, or right and liked, by turns."""
    for n in range(count):
        right = {"queue": ("billing", "shipping", "account")[n % 3], "urgent": n % 4 == 0}
        wrong = n % 5 in (0, 1)
        said = json.dumps({"queue": right["queue"], "urgent": not right["urgent"]} if wrong else right)
        more = {"correction": json.dumps(right)} if wrong and corrected(n) else {}
        rated(
            f"{right['queue']} message {n}, {'now!' if n % 4 == 0 else 'please'}",
            said,
            thumb="down" if wrong else "up",
            **more,
        )


def test_few_prompts_have_a_linear_policy_beside_a_real_base_alone() -> None:
    triaged(50, lambda n: True)
    plans = {name: training_plan(AGENT, base_model=name).trainings for name in ("bundled", "/models/smollm2")}
    expected = {"bundled": False, "/models/smollm2": True}
    assert {name: plan[0].method == "linear" for name, plan in plans.items()} == expected


@pytest.mark.slow
def test_122_corrections_beside_178_thumbs_are_imitated_whatever_the_base_model() -> None:
    triaged(300, lambda n: True)
    plan = training_plan(AGENT, base_model="/models/smollm2")
    linear, main = plan.trainings
    assert (linear.method, linear.knobs) == ("linear", {"feedback": "corrections"})
    assert (main.method, main.knobs) == ("sft", {})
    assert all(training.reason for training in plan.trainings)


def test_few_corrections_and_named_methods() -> None:
    # few corrections beside many dislikes are shown before the dislikes are heard
    triaged(200, lambda n: n < 40)
    plan = training_plan(AGENT, base_model="/models/smollm2")
    assert [one.method for one in plan.trainings] == ["linear", "sft", "kto"]
    assert plan.main.knobs == {"start_from": "sft"}
    # a method that is named is the whole plan
    triaged(60, lambda n: True)
    assert [one.method for one in training_plan(AGENT, "kto", base_model="/models/smollm2").trainings] == [
        "kto"
    ]


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
    assert "ENABLE_CODE_EXECUTION=true" in method_chosen(AGENT).reason
    settings.ENABLE_CODE_EXECUTION = True  # type: ignore[attr-defined]
    assert method_chosen(AGENT).knobs == {"reward": "code_execution"}


def test_rlhf_is_ppo_against_the_reward_model_found() -> None:
    assert method_chosen(AGENT, "rlhf").knobs == {"reward": "auto"}


@pytest.mark.parametrize(
    ("values", "objective"),
    [([{"thumb": "up"}, {"thumb": "down"}], "binary"), ([{"score": 0.8}, {"score": 0.3}], "regression")],
)
def test_the_feedback_sets_the_objective(values: list[dict[str, object]], objective: str) -> None:
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


def test_a_run_that_starts_from_sft_has_it_trained_first_and_starts_from_its_policy() -> None:
    limits = {"minutes": 20.0, "max_steps": 7}
    run = TrainingRun.objects.create(
        agent=AGENT, method="kto", base_model="b", recipe={"start_from": "sft", **limits}
    )
    orders: list[TrainOrder] = []

    def enter(order: TrainOrder) -> TrainingRun:
        orders.append(order)
        return TrainingRun.objects.create(
            agent=order.agent, method=order.method, base_model="b", stage_of_id=order.stage_of
        )

    def trained(stage: TrainingRun) -> dict[str, object]:
        registered(stage, "shown", registry.home_path("shown"))
        TrainingRun.objects.filter(pk=stage.pk).update(status="succeeded", finished_at=timezone.now())
        return {"status": "succeeded"}

    start_stage_run(run, StageRunner(enter, trained))
    run.refresh_from_db()
    assert run.recipe["start_from"] == "shown"
    (order,) = orders
    assert (order.method, order.base_model, order.stage_of) == ("sft", "b", run.pk)
    assert order.knobs == {"start_from": "base", "minutes": 10.0, "max_steps": 7}


def test_limits_of_a_training_are_left_out_where_a_fit_takes_seconds() -> None:
    triaged(30, lambda n: True)
    order = order_automatic(AGENT, "linear", knobs={"minutes": 5.0, "max_steps": 9, "features": "words"})
    assert order.method == "linear"
    assert not {"minutes", "max_steps"} & set(order.knobs)
    assert order.knobs["features"] == "words"


@pytest.mark.parametrize(
    ("linear", "run", "kept"),
    [
        ([1.0] * 10, [1.0] * 10, "run"),
        ([1.0] * 10, [0.0] * 5 + [1.0] * 5, "linear"),
        ([1.0] * 10, [0.5] + [1.0] * 9, "run"),
        ([], [], "run"),
    ],
)
def test_the_best_on_the_eval_split_is_kept_and_the_run_where_none_is_clearly_better(
    monkeypatch: pytest.MonkeyPatch, linear: list[float], run: list[float], kept: str
) -> None:
    values = {"linear": linear, "run": run}
    monkeypatch.setattr(candidates, "_eval_values", lambda policy, *args, **options: values[policy.name])
    monkeypatch.setattr(candidates, "eval_rows", lambda agent: {})
    compared = candidates.candidates_compared([Policy(name=name, agent=AGENT) for name in values])
    assert [one.policy for one in compared if one.kept] == [kept]


def test_right_is_what_people_wrote_or_liked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{name} {n}"}],
            "prompt_hash": f"{name} {n}",
            "completion": name,
        }
        for name in ("billing", "shipping")
        for n in range(4)
    ]
    agent = dataclasses.replace(AGENTS["assistant"], answers=("billing", "shipping"))
    fit(rows, agent, families=[("words",)], penalties=(10.0,)).policy.save(tmp_path)
    monkeypatch.setattr(candidates, "adapter_folder", lambda policy: tmp_path)
    held_out: dict[str, list[dict[str, Any]]] = {
        "corrections": [rows[0], {**rows[5], "completion": "billing"}],
        "labels": [
            {**rows[4], "score": 0.0},
            {**rows[0], "prompt": [{"role": "user", "content": "?"}], "score": 0.5},
        ],
    }
    policy = Policy(name="p", agent=AGENT)
    assert candidates._eval_values(policy, held_out, agent, by_answers=True) == [1.0, 0.0, 0.0, 0.5]


def test_linear_and_language_models_share_a_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def values(policy: Policy, *args: Any, by_answers: bool) -> list[float]:
        asked.append(by_answers)
        return [1.0]

    monkeypatch.setattr(candidates, "_eval_values", values)
    monkeypatch.setattr(candidates, "eval_rows", lambda agent: {})
    pair = [Policy(name=kind, agent=AGENT, kind=kind) for kind in ("linear", "adapter")]
    candidates.candidates_compared(pair)
    candidates.candidates_compared(pair[1:] * 2)
    assert asked == [True, True, False, False]


@pytest.mark.slow
def test_a_dry_run_explains_each_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    triaged(120, lambda n: n < 20)
    base = str(tiny_model(tmp_path / "base"))
    limited = ("--config", "cpu", "--minutes", "4")
    call_command("run_pipeline", "--agent", AGENT, "--model", base, *limited, "--dry-run", "--json")
    found = json.loads(capsys.readouterr().out)["trainings"]
    assert [one["method"] for one in found] == ["linear", "sft", "kto"]
    assert all(one["reason"] and one["samples"]["train"] and one["estimated_memory_gb"] for one in found)
    assert found[2]["recipe"]["start_from"] == "sft"
    assert [one["recipe"]["minutes"] for one in found[1:]] == [2.0, 4.0]
    assert not TrainingRun.objects.exists()


@pytest.mark.training
def test_auto_goes_on_with_the_best_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triaged(120, lambda n: n < 20)
    base = str(tiny_model(tmp_path / "base"))
    limited = {"max_steps": 1, "warm_up_steps": 0}
    run = run_enqueue(order_automatic(AGENT, knobs=limited, base_model=base, actor="ada"))
    TrainingRun.objects.filter(pk=run.pk).update(follow_up="judge")
    compared: list[list[str]] = []

    def linear_ahead(policies: list[Policy], progress: Any) -> list[candidates.CandidateScore]:
        compared.append([str(policy.run and policy.run.method) for policy in policies])
        return [
            candidates.CandidateScore(policy=one.name, share=0.5, compared=10, kept=one == policies[0])
            for one in policies
        ]

    monkeypatch.setattr(pipeline, "candidates_compared", linear_ahead)
    report = pipeline.run_train(run.pk, actor="ada")
    run.refresh_from_db()
    assert compared == [["linear", "sft", "kto"]]
    assert [stage.method for stage in run.stages.order_by("pk")] == ["linear", "sft"]
    assert (run.kept_run.method, run.follow_up, run.kept_run.follow_up) == ("linear", "done", "judge")
    assert report["policy"] == run.kept_run.policy.name
    assert [one["kept"] for one in report["candidates"]] == [True, False, False]
    assert next(iter(agent_cards())).newest == run.kept_run.policy
    assert pipeline.candidate_kept(run) == run.kept_run
    assert len(compared) == 1
