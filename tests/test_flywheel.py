"""`flywheel AGENT`: five stations from a hosted model to an own one, each answered by what is stored."""

import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from feedback.services import decision_record
from rl import flywheel as wheels
from rl.experiments import schedule
from rl.experiments.traffic import ExperimentRefused, experiment_stop, experiments_running
from rl.flywheel import FlywheelWaits, flywheel, flywheel_step
from rl.models import Policy, TrainingRun
from rl.registry.service import champion_of
from tests.support.evaluations import judged
from tests.support.experiments import expose
from tests.support.hosted import hosted as hosted_policy
from tests.support.registry_rows import policy_of

pytestmark = pytest.mark.django_db

AGENT = "filer"
OWN = "filer-v2"


def states() -> dict[str, str]:
    return {one.name: one.state for one in flywheel(AGENT).stations}


@pytest.fixture
def hosted() -> Policy:
    policy = hosted_policy("http://127.0.0.1:1/v1", "filer-gpt", agent=AGENT)
    for n in range(12):
        decision_record(
            agent=AGENT, messages=f"question {n}", response=f"r{n}", policy="filer-gpt", source="gateway"
        )
    return policy


def test_it_waits_for_answers_first(hosted: Policy) -> None:
    assert states() == {"record": "now", "train": "open", "prove": "open", "ramp": "open", "save": "open"}
    at = flywheel(AGENT).at
    assert (at.waits_for, at.automatic) == ("288 more answers", False)
    with pytest.raises(FlywheelWaits, match="288 more answers"):
        flywheel_step(AGENT, actor="ada")


def test_enough_answers_train_by_distil(hosted: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "FEWEST_ANSWERS", 10)
    orders: list[Any] = []

    def placed(order: Any, *, judge: bool) -> TrainingRun:
        orders.append((order.method, order.knobs, judge))
        return TrainingRun.objects.create(agent=AGENT, method="sft", base_model="b", recipe={}, seed=1)

    monkeypatch.setattr(wheels, "order_place", placed)
    assert "waits for a worker" in flywheel_step(AGENT, actor="ada")
    assert orders == [("sft", {"sources": "distil"}, True)]
    at = flywheel(AGENT).at
    assert (at.name, at.waits_for) == ("train", "the run")


def test_a_candidate_waits_for_its_gate_and_then_gets_a_ticket(hosted: Policy) -> None:
    own = policy_of(OWN, Policy.Stage.CANDIDATE)
    assert states() == {"record": "done", "train": "done", "prove": "now", "ramp": "open", "save": "open"}
    with pytest.raises(FlywheelWaits):
        flywheel_step(AGENT, actor="ada")
    judged(own, "filer-gpt", both=30, wins=5, losses=5, neither=0)
    assert flywheel_step(AGENT, actor="ada") == f"{OWN} is challenger"
    assert "1 % of the traffic" in flywheel_step(AGENT, actor="ada")
    (running,) = experiments_running(AGENT)
    assert (running.ramp, running.not_inferior, running.auto_ramp) == (1, wheels.MARGIN, True)
    at = flywheel(AGENT).at
    assert (at.name, at.waits_for) == ("ramp", "50 more users with a value in each arm")


def test_a_ramp_that_cannot_start_leaves_no_draft(hosted: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    policy_of("Filer.v2", Policy.Stage.CHALLENGER)

    def refused(*_: Any, **__: Any) -> None:
        raise ExperimentRefused("another is running")

    with monkeypatch.context() as patched:
        patched.setattr(wheels, "experiment_start", refused)
        with pytest.raises(ExperimentRefused):
            flywheel_step(AGENT, actor="ada")
    flywheel_step(AGENT, actor="ada")
    experiment_stop(experiments_running(AGENT)[0], actor="ada", reason="the app was down")
    at = flywheel(AGENT).at
    assert (at.name, at.automatic) == ("ramp", False)
    assert "the app was down" in at.found


def test_the_ramp_goes_up_step_by_step_and_ends_in_a_promotion(hosted: Policy) -> None:
    own = policy_of(OWN, Policy.Stage.CHALLENGER)
    judged(own, "filer-gpt", both=30, wins=5, losses=5, neither=0)
    flywheel_step(AGENT, actor="ada")
    experiment = experiments_running(AGENT)[0]
    type(experiment).objects.filter(pk=experiment.pk).update(ramp=100, min_units=20, not_inferior=0.4)
    expose(range(60), lambda n, new: {"thumb": n % 5 > 0})
    type(experiment).objects.filter(pk=experiment.pk).update(ramp=5)
    assert any("takes 25 %" in line for line in schedule.tick())
    with pytest.raises(FlywheelWaits, match="Give it more of the traffic"):
        flywheel_step(AGENT, actor="ada")
    type(experiment).objects.filter(pk=experiment.pk).update(ramp=100)
    expose(range(60, 400), lambda n, new: {"thumb": n % 5 > 0})
    assert flywheel_step(AGENT, actor="ada") == f"{OWN} is champion"
    assert champion_of(AGENT).name == OWN  # type: ignore[union-attr]
    assert flywheel(AGENT).at is None
    assert set(states().values()) == {"done"}
    with pytest.raises(FlywheelWaits, match="passed all stations"):
        flywheel_step(AGENT, actor="ada")


def test_the_command_says_where_it_stands(hosted: Policy, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("flywheel", AGENT, json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in found["stations"]] == ["record", "train", "prove", "ramp", "save"]
    with pytest.raises(CommandError, match="no decision of agent"):
        call_command("flywheel", "nobody")
    with pytest.raises(CommandError, match="288 more answers"):
        call_command("flywheel", AGENT, step=True)


def test_the_pages_button_takes_the_step(admin_client: Client, hosted: Policy) -> None:
    assert admin_client.get("/agents/nobody/flywheel/").status_code == 404
    policy_of(OWN, Policy.Stage.CHALLENGER)
    assert 'aria-current="step"' in admin_client.get(f"/agents/{AGENT}/flywheel/").content.decode()
    said = admin_client.post(f"/agents/{AGENT}/flywheel/step/", follow=True)
    assert "1 % of the traffic" in said.content.decode()
    assert len(experiments_running(AGENT)) == 1
