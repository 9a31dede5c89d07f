"""Experiments where people and programs meet them: pages, REST, the command, the drawing; who may do what."""

import re
from functools import partial
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management.base import CommandError
from django.test import Client

from rl.experiments.traffic import experiment_stop
from rl.models import Experiment, Policy
from rl.registry import service as registry
from tests.support.api_client import ApiClient, error_of
from tests.support.evaluations import judged
from tests.support.experiments import draft_of, expose, policy_of, running_of
from tests.support.said import command, words

pytestmark = pytest.mark.django_db

experiment = partial(command, "experiment")


@pytest.fixture(autouse=True)
def policies() -> tuple[Policy, Policy]:
    return policy_of("filer-v1", Policy.Stage.CHAMPION), policy_of("filer-v2")


def change(client: Client, experiment: Experiment, **sent: Any) -> str:
    return words(client.post(f"/experiments/{experiment.pk}/change/", sent, follow=True).text)


def test_a_draft_is_made_started_ramped_and_stopped_from_its_page(operator: Client) -> None:
    sent = {"name": "shorter", "challenger": "filer-v2", "control": "", "metric": "thumbs_up", "ramp": "5"}
    page = operator.post("/experiments/new/", sent, follow=True)
    made = Experiment.objects.get()
    assert page.redirect_chain[-1][0] == f"/experiments/{made.pk}/"
    assert [arm.policy_name for arm in made.arms.all()] == ["filer-v1", "filer-v2"]
    assert "shorter runs now" in change(operator, made, action="start")
    assert "takes 25 % of the units" in change(operator, made, action="ramp", ramp="25")
    assert "expected a reason" in change(operator, made, action="stop")
    assert "everybody gets the champion" in change(operator, made, action="stop", reason="enough")
    expected = [("created", "olga"), ("started", "olga"), ("ramped", "olga"), ("stopped", "olga")]
    assert list(made.events.order_by("pk").values_list("kind", "actor")) == expected


def test_an_ended_experiment_says_what_was_found_then_and_a_discarded_draft_that_it_never_started(
    operator: Client,
) -> None:
    ended, draft = running_of(), draft_of(name="longer")
    for one in (ended, draft):
        experiment_stop(one, actor="ann", reason="the shop closes")
    assert "When it ended: " in words(operator.get(f"/experiments/{ended.pk}/").text)
    page = words(operator.get(f"/experiments/{draft.pk}/").text)
    assert "Never started" in page
    assert "When it ended" not in page


@pytest.mark.parametrize(
    "wrong",
    [{"challenger": "nobody"}, {"ramp": "7"}, {"ramp": "x"}, {"name": "Not A Slug"}, {"metric": "joy"}],
)
def test_a_form_that_cannot_be_is_refused_in_words(operator: Client, wrong: dict[str, str]) -> None:
    sent = {"name": "shorter", "challenger": "filer-v2", "metric": "thumbs_up", "ramp": "5"}
    assert 'class="fault"' in operator.post("/experiments/new/", {**sent, **wrong}, follow=True).text
    assert not Experiment.objects.exists()


def test_the_form_has_an_address_and_keeps_what_was_typed(operator: Client) -> None:
    page = operator.get("/experiments/new/")
    assert (page.status_code, page.context["making"]) == (200, True)
    assert page.text.index('action="/experiments/new/"') < page.text.index("No experiment yet")
    sent = {"name": "Not A Slug", "challenger": "filer-v2", "metric": "thumbs_up", "ramp": "5"}
    again = operator.post("/experiments/new/", {**sent, "hypothesis": "People like short answers"})
    assert 'value="Not A Slug"' in again.text
    assert 'value="People like short answers"' in again.text
    running_of(slices=["source"])
    assert operator.get("/experiments/").context["making"] is False


def test_the_page_says_how_it_stands(operator: Client) -> None:
    experiment = running_of(slices=["source"])
    expose(range(400), lambda n, new: {"thumb": n % 10 < (9 if new else 4), "latency_ms": 100.0 + n % 9})
    said = words(operator.get(f"/experiments/{experiment.pk}/").text)
    assert "Challenger (filer-v2) is better than control (filer-v1), by an anytime-valid test" in said
    assert "96\u202f% intervals, valid at every look" in said
    assert "Promote challenger" in said
    assert "&gt; 99.9\u202f%" in said  # never certain
    assert "source app: challenger" in said
    assert "unless p is below 0.001" in said
    assert "as planned" in said


def test_an_experiment_that_collects_names_the_arm_that_is_short_and_nothing_else(operator: Client) -> None:
    experiment = running_of(min_units=50)
    expose(range(120), lambda n, new: {"thumb": n % 10 < (9 if new else 4)} if new or n < 80 else {})
    said = words(operator.get(f"/experiments/{experiment.pk}/").text)
    counts = re.search(
        r"Control \(filer-v1\) has (\d+) of the 50 units with a value that each arm needs\.", said
    )
    assert counts
    assert 0 < int(counts[1]) < 50
    assert "To settle" not in said
    assert said.index("Stop it") < said.index("Guardrails")


def test_a_winner_is_promoted_from_its_page(operator: Client, policies: Any) -> None:
    experiment = running_of()
    judged(policies[1], "filer-v1", both=30, wins=5, losses=5, neither=0)
    assert "has not won" in change(operator, experiment, action="promote", arm="challenger")
    expose(range(400), lambda n, new: {"thumb": n % 10 < (9 if new else 4)})
    assert "filer-v2 is champion now" in change(operator, experiment, action="promote", arm="challenger")
    assert registry.champion_of("filer").name == "filer-v2"  # type: ignore[union-attr]


def test_a_draft_without_arms_says_what_it_needs(operator: Client) -> None:
    made = Experiment.objects.create(name="bare", agent="filer")
    assert "needs a control" in operator.get(f"/experiments/{made.pk}/").text


def test_a_draft_that_cannot_start_says_so_once_and_leads_to_what_is_missing(operator: Client) -> None:
    policy_of("filer-v3", Policy.Stage.CANDIDATE)
    sent = {"name": "early", "challenger": "filer-v3", "metric": "thumbs_up", "ramp": "1"}
    page = operator.post("/experiments/new/", sent, follow=True).text
    assert "collecting" not in words(page)
    assert page.count('class="fault') == 0
    assert 'href="/policies/filer-v3/">Open filer-v3' in page
    assert re.search(r'value="start" class="quiet" disabled>', page)
    assert 'name="ramp"' not in page
    draft = draft_of()
    page = operator.get(f"/experiments/{draft.pk}/").text
    assert "collecting" not in words(page)
    assert re.search(r'value="start">Start with', page)


def test_the_list_shows_verdicts_and_the_start_page_what_runs(operator: Client) -> None:
    experiment = running_of()
    expose(range(60), lambda n, _new: {"thumb": bool(n % 2)})
    assert "collecting" in words(operator.get("/experiments/?agent=filer").text)
    home = operator.get("/").text
    assert f'href="/experiments/{experiment.pk}/"' in home


def test_a_running_experiment_cannot_be_bent_in_the_admin() -> None:
    experiment = running_of()
    admin = Client()
    admin.force_login(User.objects.create_superuser("root"))
    page = admin.get(f"/admin/rl/experiment/{experiment.pk}/change/")
    assert page.status_code == 200
    assert 'name="alpha"' not in page.text
    assert 'name="on_win"' in page.text
    assert 'name="arms-0-weight"' not in page.text


def test_experiments_are_listed_and_told_apart() -> None:
    running_of("one")
    experiment_stop(Experiment.objects.get(name="one"), actor="ann", reason="enough")
    draft_of("two")
    reader = ApiClient("read")
    assert [row["name"] for row in reader.get("/api/experiments/").json()["results"]] == ["two", "one"]
    stopped = reader.get("/api/experiments/", status="stopped", agent="filer").json()["results"]
    assert [(row["name"], row["reason"]) for row in stopped] == [("one", "enough")]
    assert reader.get("/api/experiments/", agent="other").json()["results"] == []
    fields = error_of(reader.get("/api/experiments/", status="asleep"))["fields"]
    assert list(fields) == ["status"]
    assert "draft, running, stopped" in fields["status"]


def test_results_have_exposures_effect_and_verdict() -> None:
    experiment = running_of()
    expose(range(400), lambda n, new: {"thumb": n % 10 < (9 if new else 4)})
    found = ApiClient("read").get(f"/api/experiments/{experiment.pk}/results/").json()
    control, challenger = found["arms"]
    assert found["verdict"] == "better"
    assert control["exposures"] + challenger["exposures"] == 400
    assert control["effect"] is None
    effect = challenger["effect"]
    assert 0 < effect["low"] < effect["value"] < effect["high"]
    assert effect["needed"] == 0
    assert [guard["state"] for guard in challenger["guardrails"]] == ["undecided", "collecting"]


def test_no_such_experiment_and_one_without_arms() -> None:
    reader = ApiClient("read")
    assert reader.get("/api/experiments/99/results/").status_code == 404
    bare = Experiment.objects.create(name="bare", agent="filer")
    assert reader.get(f"/api/experiments/{bare.pk}/results/").status_code == 409


def test_the_command_walks_an_experiment_through_its_life() -> None:
    started = experiment("start", "shorter", "--agent", "filer", "--challenger", "filer-v2", "--ramp", "50")
    expected = ("running", ["filer-v1", "filer-v2"])
    assert (started["status"], [arm["policy"] for arm in started["arms"]]) == expected
    assert experiment("ramp", "shorter", "--to", "100")["ramp"] == 100
    found = experiment("assign", "user-1", "--agent", "filer")
    assert found["arm"] in ("shorter/control", "shorter/challenger")
    assert found["propensity"] == 0.5
    expose(range(400), lambda n, new: {"thumb": n % 10 < (9 if new else 4)})
    assert "promote filer-v2" in experiment("tick")["done"][0]
    assert experiment("show", "shorter")["results"]["verdict"] == "better"
    assert experiment("stop", "shorter", "--reason", "enough")["status"] == "stopped"
    assert experiment("list")["experiments"][0]["reason"] == "enough"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nobody"], "no experiment is named"),
        (["start", "one"], "expected --agent"),
        (["start", "one", "--agent", "filer"], "--challenger"),
        (["ramp", "shorter"], "--to"),
        (["stop", "shorter"], "expected a reason"),
        (["promote", "shorter"], "has not won"),
    ],
)
def test_the_command_refuses_in_one_line(arguments: list[str], said: str) -> None:
    running_of()
    with pytest.raises(CommandError, match=said):
        experiment(*arguments)


def test_the_operators_file_sets_what_a_new_experiment_is_made_with(settings: Any) -> None:
    settings.RATCHET_CONFIG = {"ab_testing": {"alpha": 0.01, "min_units": 200}}
    made = draft_of(min_units=300)
    assert (made.alpha, made.min_units) == (0.01, 300)
    settings.RATCHET_CONFIG = {"ab_testing": {"alhpa": 0.01}}
    with pytest.raises(ValueError, match="no knob 'alhpa'"):
        draft_of("other")
