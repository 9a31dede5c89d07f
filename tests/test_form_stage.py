"""RLHF on a base model without valid answers: the form of an answer is shown first, as a stage of the run."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from feedback.services import decision_record, rating_submit
from rl.agents import get_agent
from rl.agents.template import TemplateAgent
from rl.datasets.demonstrations import Undrawable, draw_answers, draw_value
from rl.jobs import progress, stages, train
from rl.jobs.lifecycle import TrainOrder
from rl.models import Policy, TrainingRun
from rl.models.runs import RunRefused
from rl.rewards.catalogue import AUTO
from rl.training import preflight
from rl.training.preflight import AnswerCheck
from tests.support.registry_rows import make_run, policy_of

pytestmark = pytest.mark.django_db

SFT = {"batch_size": 16, "learning_rate": 2e-2, "lora_r": 8, "lora_alpha": 16, "max_length": 96}
SFT |= {"max_steps": 30, "warmup_ratio": 0.0, "save_steps": 5, "patience": 0}
PPO = {"batch_size": 4, "mini_batch_size": 4, "ppo_epochs": 1, "lora_r": 8, "lora_alpha": 16}
PPO |= {"max_length": 96, "max_new_tokens": 6, "max_steps": 1, "reward": AUTO, "eval_prompts": 2}
PPO |= {"constrained_decoding": False}
STATE = {"document": "a letter", "folders": ["Mail", "Office"]}


def row(name: str, state: Any = None, **answers: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": name}], "prompt_hash": name, "state": state, **answers}


def test_listed_answers_are_drawn_evenly_one_for_each_prompt() -> None:
    rows = [row(f"p{n}", STATE, chosen='{"folder": "Mail"}', rejected="junk") for n in range(400)]
    shown = draw_answers([*rows, rows[0]], get_agent("filer"))
    assert len(shown) == 400
    mail = sum(one["completion"] == '{"folder": "Mail"}' for one in shown)
    assert {one["completion"] for one in shown} == {'{"folder": "Mail"}', '{"folder": "Office"}'}
    assert 150 < mail < 250  # not the preferred one: five standard deviations of a fair coin on either side
    assert shown == draw_answers(rows, get_agent("filer"))


def test_without_listed_answers_what_was_given_shows_the_form_liked_or_not_else_the_schema() -> None:
    schema = {"type": "object", "properties": {"drink": {"enum": ["tea", "milk"]}}, "required": ["drink"]}
    agent = TemplateAgent("bar", "Bar", "", schema=schema)
    rated = row("one", completion='{"drink": "tea"}')
    assert [one["completion"] for one in draw_answers([rated], agent)] == ['{"drink": "tea"}']
    drawn = draw_answers([row("two", completion="tea, please")], agent)
    assert json.loads(drawn[0]["completion"])["drink"] in ("tea", "milk")
    wordy = TemplateAgent(
        "bar", "Bar", "", schema={"type": "object", "properties": {"say": {"type": "string"}}}
    )
    assert draw_answers([row("two", completion="tea, please")], wordy) == []
    # what the agent reads is not in the state that an app sent
    assert (
        draw_answers([row("p", {"document": 3}, completion='{"folder": "Mail"}')], get_agent("filer")) == []
    )


def test_a_value_is_drawn_within_its_schema() -> None:
    order = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True, "minItems": 3}
    schema = {
        "type": "object",
        "properties": {
            "order": order,
            "level": {"type": "integer", "minimum": 2, "maximum": 4},
            "sure": {"type": "boolean"},
            "kind": {"const": "x"},
            "size": {"anyOf": [{"enum": [1]}, {"enum": [2]}]},
        },
    }
    for seed in range(20):
        value = draw_value(schema, Random(seed))
        assert sorted(value["order"]) == ["a", "b", "c"]
        assert (2 <= value["level"] <= 4, value["sure"] in (True, False), value["kind"]) == (True, True, "x")
        assert value["size"] in (1, 2)
    with pytest.raises(Undrawable, match="enums, numbers"):
        draw_value({"$ref": "#/x"}, Random(0))


def thumbs(n: int) -> None:
    """n thumbs on single answers of an agent that says one of two things."""
    for index in range(n):
        good = index % 2 == 0
        response = "line_chart" if index % 2 == 0 else "table"
        made = decision_record(
            agent="planner", messages=f"how did revenue change over week {index}", response=response
        )
        rating_submit(decision=made.row, rater="ada", thumb="up" if good else "down")


FREELY = {"reward": AUTO, "constrained_decoding": False}


def run_of(base: str = "base") -> TrainingRun:
    return TrainingRun.objects.create(agent="planner", method="ppo", base_model=base, recipe=FREELY)


def written(n: int, *answers: str) -> None:
    for index in range(n):
        response = answers[index % len(answers)]
        decision_record(
            agent="planner", messages=f"{n} weeks, {index}", response=response, tags=["demonstration"]
        )


@pytest.mark.slow
def test_the_form_is_shown_by_what_people_wrote_else_by_valid_answers_liked_or_not() -> None:
    run = run_of()
    assert stages.form_order(run) is None
    written(20, "line_chart")
    few = stages.form_order(run)
    assert (few.method, few.base_model) == ("sft", "base")
    assert few.knobs == {"feedback": "corrections", "start_from": "base"}
    thumbs(160)  # whoever was shown line_chart alone would never try another answer
    alike = stages.form_order(run)
    assert alike.knobs == {"feedback": "scores", "teacher": "form", "start_from": "base"}
    assert "liked or not" in alike.reason
    written(60, "table", "pie_chart")
    assert stages.form_order(run).knobs == few.knobs


def none_valid() -> AnswerCheck:
    return AnswerCheck(24, 0, 0.0, 0.14, "written", 6.0, "mumble", "expected one of the 2 answers")


def test_what_no_form_can_be_shown_for_is_refused() -> None:
    run = run_of()
    with pytest.raises(
        RunRefused, match=r"0 of 24 answers valid .* fewer than 10 rated prompts .* larger base model"
    ):
        stages.form_stage_run(run, none_valid, None)  # type: ignore[arg-type]
    # named, or insisted on: the run begins as it was asked for
    for knobs in ({"start_from": "planner-v3"}, {"allow_constant_reward": True}):
        run.recipe = {**FREELY, **knobs}
        stages.form_stage_run(run, none_valid, None)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_that_samples_within_the_form_needs_none_shown_but_takes_a_first_taste() -> None:
    run = run_of()
    run.recipe = {"reward": AUTO}
    orders: list[TrainOrder] = []

    class Entered(Exception):
        """The stage would be trained now."""

    class Stages:
        def enter(self, order: TrainOrder) -> None:
            orders.append(order)
            raise Entered

    stages.form_stage_run(run, none_valid, Stages())  # type: ignore[arg-type]
    thumbs(160)  # all liked ones are line_chart: nothing else would be tried
    stages.form_stage_run(run, none_valid, Stages())  # type: ignore[arg-type]
    assert orders == []
    written(60, "table", "pie_chart")
    with pytest.raises(Entered):
        stages.form_stage_run(run, none_valid, Stages())  # type: ignore[arg-type]
    assert orders[0].stage_of == run.pk
    assert orders[0].knobs == {"feedback": "corrections", "start_from": "base"}
    look = none_valid().as_dict()
    stage = make_run(
        "planner", method="sft", stage_of=run, result={"preflight": {"before": look, "after": look}}
    )
    policy_of("planner-form", "candidate", "planner", run=stage)
    stages.form_stage_run(run, none_valid, Stages())  # type: ignore[arg-type]
    assert run.recipe["start_from"] == "planner-form"


@pytest.mark.campaign
@pytest.mark.training
def test_rlhf_leads_a_base_without_a_valid_answer_through_sft_and_goes_on_where_it_was_killed(
    base: str, settings: Any, ratchet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATCHET_CONFIG = {"sft": SFT}
    monkeypatch.setattr(preflight, "PROMPTS", 4)
    thumbs(80)

    def judge_settled(run: TrainingRun, rooms: Any) -> None:
        assert run.recipe["start_from"] != "base", "the form comes before the reward model"
        run.recipe = {**run.recipe, "reward": "agent", "allow_constant_reward": True}
        run.save(update_fields=["recipe"])

    monkeypatch.setattr(train, "reward_model_resolve", judge_settled)  # tests/test_rlhf.py trains one
    steps: list[int] = []
    stop, tell = progress.RunListener.should_stop, progress.RunListener.on_step

    def step_noted(self: progress.RunListener, step: int, total: int) -> None:
        if self.run.method == "sft":
            steps.append(step)
        tell(self, step, total)

    monkeypatch.setattr(progress.RunListener, "on_step", step_noted)
    monkeypatch.setattr(
        progress.RunListener, "should_stop", lambda self: self.run.method == "sft" and len(steps) > 6
    )
    # one step of its own, by passes: max_steps would cap the stage too
    knobs = {**PPO, "max_steps": -1, "epochs": 0.05}
    report = train.train(TrainOrder("planner", "ppo", "cpu", base, knobs))
    run = TrainingRun.objects.get(pk=report["run"])
    form = run.stages.get()
    assert (report["status"], form.method, form.status) == ("cancelled", "sft", "cancelled")
    assert f"its stage (run {form.pk}, sft)" in run.reason
    assert "first stage" in form.result["why"]

    monkeypatch.setattr(progress.RunListener, "should_stop", stop)
    done = len(steps)
    report = train.train_resume(run.pk, actor="test")
    run.refresh_from_db()
    form.refresh_from_db()
    assert steps[done] > steps[0], "the stage went on from its checkpoint"
    stage = {"run": form.pk, "method": "sft", "status": "succeeded", "made": form.policy.name}
    assert [{name: found[name] for name in stage} for found in report["stages"]] == [stage]
    assert (form.result["preflight"]["before"]["valid"], report["status"]) == (0, "succeeded")
    assert form.result["preflight"]["after"]["share"] > 0.5
    assert run.recipe["start_from"] == form.policy.name
    assert f"run {form.pk} trained it first (valid answers: 0 % before, " in report["why"]
    # a stage takes no feedback: what was learnt stands with the run
    assert run.learnt.filter(use="trained").exists()
    assert Policy.objects.filter(kind="adapter").count() == 2


def test_a_form_that_was_shown_in_vain_is_refused_with_one_of_the_answers() -> None:
    run = run_of()
    look = none_valid().as_dict()
    TrainingRun.objects.create(
        agent="planner",
        method="sft",
        base_model="base",
        status="succeeded",
        stage_of=run,
        finished_at=run.created_at,
        result={"preflight": {"before": look, "after": look}},
    )
    with pytest.raises(
        RunRefused, match=r"was trained first \(run \d+, sft\), and still none of 24 .* 'mumble'"
    ):
        stages.form_stage_run(run, none_valid, None)  # type: ignore[arg-type]
