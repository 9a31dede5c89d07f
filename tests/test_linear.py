"""Linear policies on their way: the run, evaluation and gate, registry, gateway, experiments, export and pages."""

import dataclasses
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.test import Client

from feedback.erasure.service import unit_forget
from feedback.models import Decision
from feedback.services import decision_record, rating_submit
from rl.api.loop import policy_represent
from rl.checksums import file_sum, sums_write
from rl.datasets import prepare_training_dataset, snapshot_rows
from rl.evaluation.service import EvaluationOrder, evaluate
from rl.evaluation.sides import baseline_of
from rl.experiments.traffic import ArmOrder, experiment_create, experiment_start, plan_of
from rl.export.service import ExportOrder, ExportOrderRefused, export
from rl.gates.headlines import baseline_text
from rl.jobs import train
from rl.jobs.lifecycle import TrainOrder
from rl.linear.features import FAMILIES, prompt_features
from rl.linear.model import CLOSED, WEIGHTS, LinearPolicy
from rl.models import LearnerSettings, Policy, RewardModelVersion, ServingSettings, TrainingRun
from rl.models.runs import run_folder
from rl.online.learner import OnlineLearner
from rl.registry import gate_evidence, integrity
from rl.registry import service as registry
from rl.reward_models.service import fault_of
from rl.serving.base import BASE
from rl.serving.routing import base_model, policy_model
from rl.training import sides
from rl.training.scoring import ResponseScore
from tests.support.api_client import ApiClient
from tests.support.linear import BOT, QUEUES, asked, tickets, weighted
from tests.support.registry_rows import policy_of
from tests.support.serving import (  # noqa: F401
    Parrot,
    parrot_only,
    written_by_the_asking_thread,
)


def thumbs(count: int) -> None:
    random = Random(5)
    for text, queue in tickets(count):
        answer = queue if random.random() < 0.5 else random.choice(QUEUES)
        row = decision_record(agent="tickets", messages=asked(text), response=answer, source="simulation").row
        rating_submit(decision=row, rater="ada", thumb="up" if answer == queue else "down")


@pytest.fixture
def trained(db: None) -> dict[str, Any]:
    thumbs(120)
    knobs = {"features": "words", "penalty": "1"}  # nothing to cross-validate: one fit
    return train.train(TrainOrder("tickets", "linear", knobs=knobs, actor="train_linear"))


@pytest.mark.training
@pytest.mark.prepares
def test_a_run_leaves_a_policy_that_is_judged_gated_and_promoted(trained: dict[str, Any]) -> None:
    policy, run = Policy.objects.get(), TrainingRun.objects.get()
    assert (policy.kind, policy.base_model, policy.name) == ("linear", "", trained["policy"])
    assert (run.method, run.recipe["feedback"], run.base_model) == ("linear", "scores", "")
    assert run.feedback_count == run.learnt.filter(use="trained").count() == run.snapshot.counts["train"]
    folder = registry.home_path(policy.adapter_path)
    assert {file.name for file in folder.iterdir()} == {WEIGHTS, "sha256.json", "README.md"}
    # one that learnt the contrary is the rival: both are linear, so that no model is loaded
    worse = LinearPolicy.load(folder)
    worse = dataclasses.replace(worse, weights=-worse.weights, _row={}, _column={})
    place = {"adapter_path": registry.home_relative(worse.save(folder.parent / "v0").parent)}
    rival = policy_of("tickets-v0", "champion", "tickets", kind="linear", adapter_sha256="", **place)
    found = evaluate(EvaluationOrder(policy=policy.name, compare=rival.name))
    assert (found["carried_by"], found["valid_rate"]["value"]) == ("known", 1.0)
    assert found["evidence"]["labels"]["concordance"]["value"] > 0.8
    report = gate_evidence.policy_judge(policy)
    outcomes = {verdict.rule: verdict.outcome for verdict in report.verdicts}
    assert (outcomes["accuracy"], outcomes["kl"]) == ("passed", "not_applicable")
    assert registry.policy_promote(policy, actor="test").stage == "champion"


@pytest.mark.slow
def test_it_chooses_with_propensities(trained: dict[str, Any], parrot: Parrot, written_at_once: None) -> None:
    Policy.objects.update(stage="champion")
    ServingSettings.objects.create(agent="tickets", choose_temperature=1.0, epsilon=0.3)
    api = ApiClient("ingest")
    body = api.post("/api/decide/", {"agent": "tickets", "messages": asked("charged twice, b 7")}).json()
    policy = LinearPolicy.load(registry.home_path(Policy.objects.get().adapter_path))
    logps = policy.log_probabilities(asked("charged twice, b 7"), policy.answers)
    shares = {answer: 0.7 * math.exp(logp) + 0.1 for answer, logp in zip(policy.answers, logps, strict=True)}
    assert {one["response"]: one["probability"] for one in body["candidates"]} == pytest.approx(shares)
    assert body["propensity"] == pytest.approx(shares[body["response"]])
    chat = api.post(
        "/v1/chat/completions", {"model": "tickets", "messages": asked("the router blinks")}
    ).json()
    assert chat["choices"][0]["message"]["content"] == "network"
    row = Decision.objects.get(source="gateway")
    expected = (trained["policy"], 1.0, "linear")
    assert (row.policy, row.propensity, row.metadata["serving"]["backend"]) == expected
    # tools are nothing it can call: the base, which stands behind it, is asked
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    api.post("/v1/chat/completions", {"model": "tickets", "messages": asked("hello"), "tools": tools})
    assert parrot.asked[-1][1].name == BASE


@pytest.mark.slow
def test_it_is_an_arm(trained: dict[str, Any], parrot: Parrot, written_at_once: None) -> None:
    arms = (ArmOrder(BASE, "control"), ArmOrder(trained["policy"], "linear"))
    Policy.objects.update(stage="challenger")
    draft = experiment_create("tickets", "without-a-model", arms, actor="ann", ramp=100)
    experiment_start(draft, actor="ann")
    plan = plan_of("tickets")
    units = {plan.assign(unit).policy: unit for unit in (f"user-{number}" for number in range(20))}
    api = ApiClient("ingest")
    for unit in units.values():
        body = {"model": "tickets", "messages": asked("the router blinks"), "user": unit}
        assert api.post("/v1/chat/completions", body).status_code == 200
    served = {row.unit: row for row in Decision.objects.filter(source="gateway")}
    linear, base = served[units[trained["policy"]]], served[units[BASE]]
    expected = (trained["policy"], "without-a-model/linear", "network")
    assert (linear.policy, linear.arm, linear.response) == expected
    assert (linear.metadata["arm_propensity"], linear.metadata["serving"]["backend"]) == (0.5, "linear")
    assert (base.arm, parrot.asked[-1][1].name) == ("without-a-model/control", BASE)


@pytest.mark.slow
def test_a_damaged_file_is_refused(trained: dict[str, Any], parrot: Parrot, written_at_once: None) -> None:
    policy = Policy.objects.get()
    Policy.objects.update(stage="champion")
    file = registry.home_path(policy.adapter_path) / WEIGHTS
    file.write_bytes(file.read_bytes().replace(b"billing", b"bullion", 1))
    body = ApiClient("ingest").post("/api/decide/", {"agent": "tickets", "messages": asked("refund")}).json()
    assert body["policy"] == BASE
    assert base_model("tickets", policy_model(policy.name)).base_model == "bundled"


@pytest.mark.django_db(transaction=True)
def test_forgetting_a_unit_takes_its_words_out_of_the_policy(ratchet_home: Path) -> None:
    thumbs(30)
    for number in range(4):
        text = f"owner: Griselda Quimby; invoice {number} xylophone"
        row = decision_record(agent="tickets", messages=asked(text), response="billing", unit="user-4711").row
        rating_submit(decision=row, rater="ada", thumb="up")
    snapshot = prepare_training_dataset("tickets", "labels").snapshot
    assert snapshot is not None
    # a policy with a weight for all that any of these prompts has
    columns = sorted(
        {name for row in snapshot_rows(snapshot) for name in prompt_features(row["prompt"], FAMILIES[1])}
    )
    rows = [f"is {queue}" for queue in QUEUES]
    weights = np.random.default_rng(0).normal(size=(3, len(columns)))
    before = LinearPolicy(
        "tickets", CLOSED, FAMILIES[1], QUEUES, False, tuple(rows), tuple(columns), weights, np.zeros(3)
    )
    file = before.save(ratchet_home / "policies" / "tickets")
    before = LinearPolicy.load(file.parent)
    sums_write(file.parent, [WEIGHTS])
    run = TrainingRun.objects.create(agent="tickets", method="linear", base_model="", snapshot=snapshot)
    place = {"adapter_path": "policies/tickets", "adapter_sha256": file_sum(file)}
    policy = policy_of("tickets-v1", "candidate", "tickets", kind="linear", run=run, base_model="", **place)
    judge = RewardModelVersion.objects.create(
        name="tickets-rm-v1",
        agent="tickets",
        run=run,
        base_model="",
        path="reward_models/tickets",
        sha256=file_sum(file),
        objective="binary",
        architecture="linear",
        feedback_count=1,
    )
    left = run_folder(run) / "linear" / "reward_model"  # of a run of `auto` that was killed
    half = ratchet_home / "reward_models" / "tickets" / f".tickets-rm-v1.{run.pk}"
    copies = [
        before.save(folder) for folder in (ratchet_home / judge.path, run_folder(run) / "policy", left, half)
    ]
    assert unit_forget("user-4711", dry_run=True).places["linear models"] == 2
    assert "xylophone" in file.read_text()
    assert unit_forget("user-4711").places["linear models"] == 2
    for place in (file, *copies):
        text = place.read_text().lower()
        assert [word for word in ("xylophone", "griselda", "quimby") if word in text] == [], place
    judge.refresh_from_db()
    assert fault_of(judge) == ""
    # what others say too goes where it names the unit, and the file is the registered one all the same
    named = dataclasses.replace(
        after_erasure := LinearPolicy.load(file.parent),
        columns=("word user-4711", *after_erasure.columns[1:]),
    ).save(file.parent)
    sums_write(file.parent, [WEIGHTS])
    Policy.objects.filter(pk=policy.pk).update(adapter_sha256=file_sum(named))
    again = decision_record(
        agent="tickets", messages=asked("hello"), response="billing", unit="user-4711"
    ).row
    rating_submit(decision=again, rater="ada", thumb="up")
    assert unit_forget("user-4711").places["linear models"] == 1
    assert "user-4711" not in file.read_text()
    # it is whole, and answers as before whatever does not speak of it
    policy.refresh_from_db()
    after = LinearPolicy.load(integrity.adapter_folder(policy))
    prompt = asked(tickets(30)[7][0])
    assert (after.answers, len(after.columns) < len(before.columns)) == (QUEUES, True)
    assert after.scores(prompt, QUEUES) == pytest.approx(before.scores(prompt, QUEUES), abs=1e-12)


@pytest.mark.slow
def test_its_one_format_is_its_file(trained: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExportOrderRefused, match="is a linear policy: it has no base model"):
        export(ExportOrder(policy=trained["policy"], format="gguf"))
    found = export(ExportOrder(policy=trained["policy"], output=tmp_path))
    assert found["format"] == "linear"
    assert set(json.loads((tmp_path / WEIGHTS).read_text("utf-8"))["answers"]) == set(QUEUES)
    assert Policy.objects.get().artifacts.get().sha256 == found["files"][0]["sha256"]


def test_the_command_refuses_and_plans(db: None, capsys: pytest.CaptureFixture[str]) -> None:
    thumbs(60)
    call_command("train_linear", "--agent", "tickets", "--dry-run", "--json")
    plan = json.loads(capsys.readouterr().out)
    assert (plan["answers"], plan["recipe"]["feedback"], plan["hardware"]) == (3, "scores", {})
    assert not Policy.objects.exists()
    with pytest.raises(Exception, match="penalty must be above 0, or auto; found '-1'"):
        call_command("train_linear", "--agent", "tickets", "--penalty", "-1")


def test_a_model_is_measured_among_the_options_as_a_linear_policy_is(monkeypatch: pytest.MonkeyPatch) -> None:
    side = sides.LinearSide(weighted(), BOT)
    row = {"prompt": asked("hot"), "completion": "a", "chosen": "b", "rejected": "a"}
    # scores 2 and 0.75: log-softmax by hand
    total = math.log(math.exp(2) + math.exp(0.75))
    (scored,) = side.responses([row])
    assert (scored.logp, scored.tokens) == (pytest.approx(2 - total), 1)
    ((chosen, rejected),) = side.pairs([row])
    assert (chosen.logp, rejected.logp) == (pytest.approx(0.75 - total), pytest.approx(2 - total))
    assert side.reference([row])[0].logp == pytest.approx(-math.log(2))
    # an answer beyond the options is measured among them and itself
    assert side.reference([{**row, "completion": "c"}])[0].logp == pytest.approx(-math.log(3))
    assert [answer.text for answer in side.answers([(asked("hot"), None), (asked("cold cold"), None)])] == [
        "a",
        "b",
    ]

    def scores(policy: Any, items: Any, **_: Any) -> list[ResponseScore]:
        return [ResponseScore({"a": -9.0, "b": -10.0}[response], 7) for _, response in items]

    monkeypatch.setattr(sides, "score_responses", scores)
    (model,) = sides.choice_scores(None, [row], side.options)  # type: ignore[arg-type]
    assert (model.logp, model.tokens) == (pytest.approx(-9 - math.log(math.exp(-9) + math.exp(-10))), 1)


def test_the_words_of_a_classifier_name_its_figure_and_how_far_the_policy_is_from_it() -> None:
    share = {"value": 0.97, "low": 0.93, "high": 0.99, "n": 150}
    baseline = {
        "carried_by": "pairs",
        "evidence": {},
        "preference_accuracy": share,
        "trained_on": {"rows": 1000},
        "policy": {"carried_by": "pairs", "preference_accuracy": {"value": 0.5}},
        "average_reward": {"value": 0.9, "low": 0.8, "high": 1.0},
        "average_reward_difference": {"value": -0.25, "low": -0.3, "high": -0.2},
    }
    assert baseline_text({"baseline": baseline}) == (
        "A simple classifier of the same 1,000 training rows gets 97.0 % [93.0, 99.0] preference accuracy, "
        "the policy by the same measure 50.0 %. Average reward of the classifier's answers: 0.900 [0.800, "
        "1.000] (1 liked, 0.5 not rated, 0 disliked); the policy's is 0.250 less (difference -0.300 to "
        "-0.200)."
    )
    assert baseline_text({}) == ""
    assert "why" in baseline_text({"baseline": {"refused": "why"}})


@pytest.mark.slow
def test_the_classifier_beside_a_policy_learns_from_its_own_training_rows(trained: dict[str, Any]) -> None:
    policy = Policy.objects.get()
    found, facts = baseline_of(policy, BOT)
    assert facts["trained_on"] == {
        "rows": policy.run.snapshot.counts["train"],
        "of": f"snapshot {policy.run.snapshot.pk}",
        "feedback": "scores",
    }
    assert np.argmax(found.scores(asked("no signal here"), QUEUES)) == QUEUES.index("network")
    assert baseline_of(None, BOT) == (None, {})


@pytest.mark.slow
def test_rest_plans_a_linear_training(db: None, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    thumbs(90)
    monkeypatch.setattr("rl.jobs.lifecycle.async_task", lambda *_, **__: None)
    plan = (
        ApiClient("operate")
        .post("/api/policies/train_policy/tickets", {"method": "linear", "dryRun": True})
        .json()
    )
    assert (plan["method"], plan["refused"], plan["modelConfig"]["feedback"]) == ("linear", "", "scores")
    assert plan["modelConfig"]["baseModel"] == ""
    settings.ENABLE_ONLINE_LEARNING = True
    LearnerSettings.objects.create(
        agent="tickets", method="linear", start_from="champion", min_samples_to_retrain=20
    )
    queued = OnlineLearner("tickets").trigger_retrain()
    assert (queued.method, queued.base_model, queued.asked_by) == ("linear", "", "online learner")
    report = train.train_queued(queued.pk, actor="test")
    policy = Policy.objects.get()
    shown = policy_represent(policy)
    expected = (policy.name, "linear", "", None)
    assert (report["policy"], shown["kind"], shown["base_model"], shown["baseline"]) == expected
    assert not OnlineLearner("tickets").should_retrain()


@pytest.mark.slow
def test_its_page_says_what_it_is(trained: dict[str, Any], admin_client: Client) -> None:
    Policy.objects.update(
        metrics={
            "headline": {"kind": "labels", "title": "T", "unit": "points", "value": 0.8},
            "baseline": {"words": "A simple classifier gets 97 %."},
        }
    )
    page = admin_client.get(f"/policies/{trained['policy']}/").content.decode()
    assert "A linear policy, without a base model" in page
    assert "A simple classifier gets 97 %." in page
    assert '<span class="dim">linear</span>' in admin_client.get("/policies/").content.decode()
    run = TrainingRun.objects.get()
    assert re.search(
        r"<p class=\"dim\">Linear\b.* for <a", admin_client.get(f"/runs/{run.pk}/").content.decode()
    )
    assert admin_client.get(f"/admin/rl/policy/{Policy.objects.get().pk}/change/").status_code == 200
