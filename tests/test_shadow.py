"""A shadow answers beside the user's answer: recorded apart, judged, and stopped by itself."""

import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from feedback.erasure.service import unit_forget
from feedback.erasure.withdrawals import decision_withdraw
from feedback.models import Decision, shadow_id
from feedback.recording import recorder as recording
from feedback.recording.recorder import outbox_replay
from feedback.selectors import feedback_counts
from feedback.services import decision_record, rating_submit
from rl import tasks
from rl.evaluation.judging import round_answer
from rl.experiments.results import results_of
from rl.experiments.traffic import ExperimentRefused, assign, experiment_draft, experiment_start
from rl.models import Experiment, JudgedPair, JudgingRound, Policy, ServingSettings
from rl.online import learner
from rl.serving import endpoint, shadow
from rl.serving.gateway import recorder
from rl.serving.shadow import shadow_figures, shadow_turn
from tests.support.hosted import hosted, model_server  # noqa: F401
from tests.support.registry_rows import policy_of
from tests.support.said import words
from tests.support.stub_openai import ModelServer

pytestmark = pytest.mark.django_db(transaction=True)

AGENT = "bot"
LETTERS = "abcdefghij"


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(shadow.os, "getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def running(stub: ModelServer) -> Experiment:
    """A hosted candidate in the shadow of a champion; each answer costs 0.012 dollars."""
    policy_of("bot-v1", Policy.Stage.CHAMPION, AGENT)
    hosted(stub.url, "bot-own", stage="candidate", price_in=1000.0, price_out=1000.0)
    stub.sends = (
        "application/json",
        json.dumps({**stub.completion(), "usage": {"prompt_tokens": 8, "completion_tokens": 4}}).encode(),
    )
    return shadowed()


def shadowed(**settings: Any) -> Experiment:
    draft = experiment_draft("try", ["bot-own"], agent=AGENT, actor="ann", **{"shadow": 100, **settings})
    return experiment_start(draft, actor="ann")


def test_a_shadow_is_started_by_the_command_as_the_page_says(stub: ModelServer) -> None:
    policy_of("bot-v1", Policy.Stage.CHAMPION, AGENT)
    hosted(stub.url, "bot-own", stage="candidate", price_in=1000.0, price_out=1000.0)
    words = "start try-own --agent bot --challenger bot-own --shadow 10 --budget 5".split()
    call_command("experiment", *words)
    found = Experiment.objects.get(name="try-own")
    assert (found.status, found.shadow, found.shadow_budget_usd) == ("running", 10, 5)
    with pytest.raises(CommandError, match="add --shadow PERCENT"):
        call_command("experiment", "start", "other", *words[2:-4], "--budget", "5")


def answered(count: int, **facts: Any) -> list[Decision]:
    """Answers that users got."""
    return [
        decision_record(
            agent=AGENT, messages=f"Where is {LETTERS[n] * 5}?", response=f"here {n}", policy="bot-v1",
            source="gateway", unit=f"user-{n}", latency_ms=20.0, **facts,
        ).row
        for n in range(count)
    ]  # fmt: skip


def shadows() -> list[Decision]:
    assert recorder.drain(10)
    return list(Decision.objects.filter(source="shadow").order_by("created_at"))


def test_a_shadow_answers_beside_the_users_answer_and_takes_no_traffic(
    running: Experiment, stub: ModelServer
) -> None:
    rows = answered(3)
    assert {assign(AGENT, f"user-{n}").arm for n in range(50)} == {""}
    assert shadow_turn(running).answered == 3
    found = {row.pk: row for row in shadows()}
    assert set(found) == {shadow_id(row.pk) for row in rows}
    for row in rows:
        beside = found[shadow_id(row.pk)]
        assert (beside.policy, beside.unit, beside.arm) == ("bot-own", row.unit, "")
        assert beside.prompt_hash == row.prompt_hash
        assert beside.metadata["serving"]["shadow"] == {"of": str(row.pk), "experiment": "try"}
        assert beside.metadata["serving"]["cost_usd"] == pytest.approx(0.012)
    assert shadow_turn(running).answered == 0
    assert len(stub.bodies) == 3


def test_home_names_the_share_of_decisions_that_a_shadow_answers(
    running: Experiment, admin_client: Client
) -> None:
    answered(1)
    text = words(admin_client.get("/").text)
    assert "a shadow beside 100&nbsp;% of the decisions" in text
    assert "of the units" not in text


def test_a_shadow_is_in_no_count_queue_or_result_and_a_rating_of_it_counts_nowhere(
    running: Experiment,
) -> None:
    answered(2)
    shadow_turn(running)
    row = shadows()[0]
    assert feedback_counts(AGENT).decisions == 2
    assert row.ratings_wanted == 0
    assert [arm.exposures for arm in results_of(running).arms] == [0, 0]
    rating_submit(decision=row, rater="ann", thumb="up")
    assert feedback_counts(AGENT).ratings == 0


def test_erasing_a_unit_and_withdrawing_a_decision_reach_the_shadow(running: Experiment) -> None:
    first, second, _ = answered(3)
    shadow_turn(running)
    assert len(shadows()) == 3
    assert unit_forget("user-0").decisions == 2
    decision_withdraw(second.pk, actor="ann")
    assert Decision.objects.filter(source="shadow", withdrawal=None).count() == 1
    late = {"agent": AGENT, "messages": "Where is aaaaa?", "response": "late", "source": "shadow"}
    recorder.record({**late, "id": str(shadow_id(first.pk)), "created_at": timezone.now().isoformat()})
    assert len(shadows()) == 2


def test_only_the_share_is_answered_and_never_the_same_decision_twice(stub: ModelServer) -> None:
    policy_of("bot-v1", Policy.Stage.CHAMPION, AGENT)
    hosted(stub.url, "bot-own", stage="candidate")
    experiment = shadowed(shadow=50)
    rows = [
        decision_record(agent=AGENT, messages=f"question {n}", response="r", source="gateway").row
        for n in range(40)
    ]
    due = {row.pk for row in shadow.shadows_due(experiment, shadow.challenger_of(experiment))}
    assert 8 < len(due) < 32
    assert due < {row.pk for row in rows}


def test_listed_candidates_are_chosen_among(running: Experiment, stub: ModelServer) -> None:
    answered(1, candidates=["here 0", "there"])
    turn = shadow_turn(running)
    assert (turn.answered, turn.refused) == (0, 1)  # a hosted model tells no probabilities of listed answers
    assert "probabilities" in shadows()[0].metadata["serving"]["error"]


def test_an_upstream_that_is_away_loses_nothing(running: Experiment, stub: ModelServer) -> None:
    answered(2)
    stub.statuses = [503] * 3
    turn = shadow_turn(running)
    assert (turn.answered, turn.stopped) == (0, "")
    assert "503" in turn.waits
    assert shadows() == []
    assert shadow_turn(running).answered == 2


def test_a_prompt_that_is_refused_is_recorded_once_with_the_reason(
    running: Experiment, stub: ModelServer
) -> None:
    answered(2)
    stub.statuses = [400]
    turn = shadow_turn(running)
    assert (turn.answered, turn.refused) == (1, 1)
    assert {row.metadata["serving"]["finish_reason"] for row in shadows()} == {"error", "stop"}
    assert shadow_turn(running).refused == 0
    figures = shadow_figures(running)
    assert (figures.answers, figures.refused, figures.unpriced) == (1, 1, 0)


def test_a_budget_that_is_reached_mid_way_stops_after_the_answer_in_hand(
    stub: ModelServer, running: Experiment
) -> None:
    Experiment.objects.update(shadow_budget_usd=0.02)
    running.refresh_from_db()
    answered(5)
    turn = shadow_turn(running)
    assert (turn.answered, len(shadows())) == (2, 2)
    running.refresh_from_db()
    assert running.status == "stopped"
    assert "0.0240 of 0.02 USD" in running.reason == turn.stopped


@pytest.mark.parametrize(("budget", "answers", "status"), [(1.0, 1, "stopped"), (None, 3, "running")])
def test_an_unknown_price_stops_a_shadow_with_a_budget(
    stub: ModelServer, running: Experiment, budget: float | None, answers: int, status: str
) -> None:
    policy = Policy.objects.get(name="bot-own")
    assert policy.upstream is not None
    type(policy.upstream).objects.update(price_in=None, price_out=None)
    Experiment.objects.update(shadow_budget_usd=budget)
    running.refresh_from_db()
    answered(3)
    assert shadow_turn(running).answered == answers
    running.refresh_from_db()
    assert running.status == status
    assert shadow_figures(running).unpriced == len(shadows()) == answers


def test_the_agents_own_budget_goes_first(running: Experiment) -> None:
    ServingSettings.objects.create(agent=AGENT, budget_usd=0.0)
    answered(1)
    turn = shadow_turn(running)
    assert (turn.answered, turn.stopped) == (0, "")
    assert "budget of this month" in turn.waits


def test_while_the_database_is_away_an_answer_goes_to_the_outbox(
    running: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(1)

    def away(*_: Any, **__: Any) -> None:
        raise OperationalError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(recording, "decisions_ingest", away)
        assert shadow_turn(running).answered == 1
        assert Decision.objects.filter(source="shadow").count() == 0
    outbox_replay()
    assert len(shadows()) == 1


def test_a_busy_machine_makes_it_wait_and_then_stop(
    running: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(1)
    monkeypatch.setattr(shadow.os, "getloadavg", lambda: (1000.0, 0.0, 0.0))
    turns = [shadow_turn(running) for _ in range(shadow.BUSY_LOOKS)]
    assert [bool(turn.stopped) for turn in turns] == [False] * (shadow.BUSY_LOOKS - 1) + [True]
    running.refresh_from_db()
    assert running.status == "stopped"
    assert "1000.0 processes" in running.reason


def test_a_retired_challenger_ends_it(running: Experiment) -> None:
    Policy.objects.filter(name="bot-own").update(stage="retired")
    assert "retired" in shadow_turn(Experiment.objects.get()).stopped


def test_it_is_ramped_by_nobody_and_has_one_challenger(running: Experiment) -> None:
    with pytest.raises(ExperimentRefused, match="expected one challenger"):
        experiment_draft("two", ["bot-own", "bot-v1"], agent=AGENT, actor="ann", shadow=5)
    with pytest.raises(ExperimentRefused, match="expected one challenger"):
        experiment_draft("two", ["base"], agent=AGENT, actor="ann", shadow=5)


def test_the_scheduler_hands_it_over_once_and_opens_a_judging_round(
    running: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(learner, "async_task", lambda *args, **_: handed.append(args))
    monkeypatch.setattr(learner, "round_dispatch", lambda judging: handed.append(judging))
    monkeypatch.setattr(learner, "JUDGED_PROMPTS", 3)
    assert learner._shadows() == learner._shadows() == []
    running.refresh_from_db()
    assert running.shadow_until is not None
    assert handed == [("rl.tasks.shadow_answer", running.pk, running.shadow_until.isoformat())]
    answered(3)
    shadow_turn(running)
    shadows()
    (line,) = learner._shadows()
    judging = JudgingRound.objects.get()
    assert f"judging round {judging.pk}" in line
    assert handed[1:] == [judging]
    assert learner._shadows() == []


def test_of_turns_that_waited_the_last_one_handed_over_asks(
    running: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []
    monkeypatch.setattr(learner, "async_task", lambda name, *args, **_: handed.append(args))
    asked: list[Any] = []
    monkeypatch.setattr(tasks, "command_run", lambda arguments, *_, **__: asked.append(arguments))
    learner._shadows()
    Experiment.objects.update(shadow_until=timezone.now() - learner.SHADOW_LEASE)
    learner._shadows()
    for args in handed:
        tasks.shadow_answer(*args)
    assert (len(handed), len(asked)) == (2, 1)
    running.refresh_from_db()
    assert running.shadow_until is None


def test_a_judging_round_takes_the_shadow_answers(running: Experiment, stub: ModelServer) -> None:
    Policy.objects.filter(name="bot-v1").update(kind="recorded", recorded_as="the-app")
    answers = [f"here {n}" for n in range(4)]
    for n, said in enumerate(answers):
        decision_record(agent=AGENT, messages=f"Where is {LETTERS[n] * 5}?", response=said, policy="the-app")
    shadow_turn(running)
    shadows()
    asked = len(stub.bodies)
    judging = JudgingRound.objects.create(
        agent=AGENT, policy=Policy.objects.get(name="bot-own"), opponent=Policy.objects.get(name="bot-v1"),
        prompts=4, raters=1, attempt=1, alpha=0.03,
    )  # fmt: skip
    round_answer(judging)
    pairs = JudgedPair.objects.filter(round=judging)
    assert {pair.other_answer for pair in pairs} == set(answers)
    assert {pair.answer for pair in pairs} == {row.response for row in shadows()}
    assert len(stub.bodies) == asked


def test_the_page_shows_what_the_shadow_answered(running: Experiment, admin_client: Client) -> None:
    answered(2)
    shadow_turn(running)
    shadows()
    page = admin_client.get(f"/experiments/{running.pk}/")
    figures = page.context["shadow"]
    assert (figures.answers, figures.user_latency_ms, figures.same) == (2, 20.0, 0.0)
    assert figures.cost_usd == pytest.approx(0.024)
    assert admin_client.get("/experiments/").status_code == 200
    sent = {"name": "x", "challenger": "bot-own", "metric": "thumbs_up", "ramp": "1", "shadow": "5"}
    admin_client.post("/experiments/new/", {**sent, "shadow_budget_usd": "2.5"})
    made = Experiment.objects.get(name="x")
    assert (made.shadow, made.shadow_budget_usd) == (5, 2.5)
    page = admin_client.post("/experiments/new/", {**sent, "name": "y", "shadow": "many"})
    assert 'class="fault"' in page.text
