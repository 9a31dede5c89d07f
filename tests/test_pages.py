"""The start page and the runs: what is shown of an agent, of a training run and of several; the vendored library."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import DjangoAssertNumQueries

from feedback.cache import CostAwareCache
from feedback.models import Decision, ImportBatch, Trace
from feedback.selectors import FeedbackCounts, feedback_counts, feedback_counts_by_agent
from feedback.services import comparison_submit, decision_record, outcome_record, rating_submit
from rl.agents import agent_facts
from rl.models import Policy, PolicyEvent, RunMetric, Snapshot, TrainingRun
from rl.registry import service as registry
from rl.selectors import NO_FEEDBACK, AgentCard, agent_cards
from rl.views.runs import stations_of, step_next
from tests.support.api_client import signed_in
from tests.support.registry_rows import make_policy, make_run, policy_of
from tests.support.said import words

pytestmark = pytest.mark.django_db


def test_a_card_counts_decisions_and_ratings_and_says_which_are_simulated(rater: Client) -> None:
    for number in range(3):
        decision = decision_record(agent="widgets", messages=f"prompt {number}", response="r").row
        rating_submit(decision=decision, rater="sim", thumb="up", rater_kind="simulated")
    rating_submit(decision=decision, rater="bob", thumb="down")
    text = words(rater.get("/").text)
    assert "Decisions 3" in text
    assert "Ratings 4" in text
    assert "3 of these are simulated, not from people" in text


def test_a_card_counts_what_an_agent_that_nobody_rates_learns_from(rater: Client) -> None:
    decision = decision_record(agent="widgets", messages="p", response="r").row
    decision_record(agent="librarian", messages="p", response="r")
    outcome_record(decision=decision, name="solved", value=1)
    trace = Trace.objects.create(agent="widgets", steps=[])
    second = decision_record(agent="widgets", messages="q", response="r").row
    Decision.objects.filter(pk=second.pk).update(trace=trace)
    for number in range(12):
        decision_record(agent="filer", messages=f"p {number}", response="r", tags=["demonstration"])
    text = words(rater.get("/").text)
    assert "Demonstrations 12" in text
    assert "12 demonstrations are recorded" in text
    assert "Outcomes 1 and 1 trace " in text
    assert "8 more outcomes are needed for a first training" in text
    assert text.count("Ratings 0 none yet") == text.count("none yet") == 1  # the librarian's
    page = words(rater.get("/agents/widgets/").text)
    assert "outcome 1" in page
    assert "trace 1" in page
    assert "demonstrations 12" in words(rater.get("/agents/filer/").text)
    assert dataclasses.asdict(feedback_counts("filer")) == dataclasses.asdict(
        feedback_counts_by_agent()["filer"]
    )


def test_demonstrations_alone_are_enough_to_train_from_the_page(client: Client) -> None:
    client.force_login(User.objects.create_superuser("eve"))
    for number in range(40):
        decision_record(agent="filer", messages=f"p {number}", response="a wording", tags=["demonstration"])
    client.post("/runs/new/", {"agent": "filer"})
    run = TrainingRun.objects.get()
    assert (run.method, run.status) == ("sft", "queued")


def test_the_champion_is_shown_with_its_accuracy_against_the_base(rater: Client) -> None:
    champion = make_policy(
        preference_accuracy={"value": 0.934, "low": 0.871, "high": 0.968, "n": 96},
        against="base",
        against_preference_accuracy={"value": 0.534, "low": 0.43, "high": 0.63, "n": 96},
        difference={"value": 0.4, "low": 0.3, "high": 0.5},
    )
    registry.policy_promote(champion, "champion", actor="eve", force=True, reason="a test")
    newer = make_policy()
    text = words(rater.get("/").text)
    assert "Answers widgets-v9 champion" in text
    assert f"Next: {newer.name} was not evaluated" in text
    assert "It answers now." in text
    assert "93.4\u202f% preference accuracy" in text


def test_without_a_champion_the_base_model_answers_and_the_newest_policy_waits(rater: Client) -> None:
    make_policy()
    make_policy()
    assert "Answers base model no policy was promoted widgets-v9.2 candidate" in words(rater.get("/").text)
    assert "/follow-up/" not in rater.get("/").text
    User.objects.update(is_superuser=True)
    assert 'action="/policies/widgets-v9.2/follow-up/"' in rater.get("/").text


def test_the_newest_run_is_shown_with_its_status(rater: Client) -> None:
    make_run()
    refused = make_run(status="refused", reason="too little")
    html = rater.get("/").text
    assert f'href="/runs/{refused.pk}/"' not in html  # a rater's pages do not lead to trainings
    assert "status-refused" in html
    operator = signed_in("olga", "operator")
    assert f'href="/runs/{refused.pk}/"' in operator.get("/").text
    assert 'name="run"' in operator.get("/runs/").text
    refused.delete()
    assert 'name="run"' not in operator.get("/runs/").text


@pytest.mark.parametrize(("role", "address", "queries"), [("rater", "/", 26), ("operator", "/runs/", 10)])
def test_many_policies_take_as_many_queries_as_one(
    django_assert_max_num_queries: DjangoAssertNumQueries, role: str, address: str, queries: int
) -> None:
    for _ in range(20):
        make_policy()
    # the start page: session, user, slugs of decisions and of runs, newest runs, newest policies, champions, four
    # counts, two of the buffer, the learners' settings, the versions, runs at work, experiments, what gates ask for;
    # the runs: session, user, two for permissions, count, runs with their policies, agents, methods, problems, work at
    # hand
    client = signed_in("ada", role)
    with django_assert_max_num_queries(queries):
        client.get(address)


def test_what_is_costly_to_count_is_counted_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, counted = [0.0], []
    monkeypatch.setattr("feedback.cache.time.monotonic", lambda: clock[0])

    def count(seconds: float) -> int:
        clock[0] += seconds
        counted.append(seconds)
        return len(counted)

    believed: CostAwareCache[int] = CostAwareCache()
    # half a second of work is believed for a hundred
    assert believed.get("a", lambda: count(0.5)) == 1
    clock[0] += 99
    assert believed.get("a", lambda: count(0.5)) == 1
    clock[0] += 2
    assert believed.get("a", lambda: count(60.0)) == 2
    # never longer than ten minutes
    clock[0] += 601
    assert believed.get("a", lambda: count(0.0)) == 3
    # and what costs nothing is always made anew
    assert believed.get("a", lambda: count(0.0)) == 4


def test_the_start_page_counts_once(rater: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CostAwareCache, "BELIEF", 1e6)
    rater.get("/")
    with CaptureQueriesContext(connection) as queries:
        rater.get("/")
    assert [query["sql"] for query in queries if "COUNT(" in query["sql"]] == []


def test_home_counts_a_new_agent_an_import_and_a_rating_at_once(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostAwareCache, "BELIEF", 1e6)
    first = decision_record(agent="widgets", messages="p", response="r").row
    assert 'id="agent-widgets"' in operator.get("/").text
    decision_record(agent="gadgets", messages="p", response="r")
    assert 'id="agent-gadgets"' in operator.get("/").text
    rating_submit(decision=first, rater="bob", thumb="up")
    assert agent_counts("widgets").ratings == 1
    decision_record(agent="gadgets", messages="another", response="r")
    batch = ImportBatch.objects.create(file="f", sha256="a" * 64, bytes=1, format="jsonl", actor="ada")
    assert agent_counts("gadgets").decisions == 2
    decision_record(agent="gadgets", messages="a third", response="r")
    ImportBatch.objects.filter(pk=batch.pk).update(undone_at=timezone.now())
    assert agent_counts("gadgets").decisions == 3


def agent_counts(agent: str) -> FeedbackCounts:
    return next(card.counts for card in agent_cards() if card.facts.slug == agent)


def test_a_policy_that_the_gate_refused_waits_for_no_promotion(rater: Client) -> None:
    PolicyEvent.objects.create(policy=make_policy(**JUDGED), kind="gated", actor="loop", reason="it forgot")
    text = rater.get("/").text
    assert "widgets-v9 did not pass the gate: it forgot. " in text
    assert "promote or reject it" not in text


def card_of(feedback: int = 0, **facts: Any) -> AgentCard:
    counts = FeedbackCounts(
        decisions=50, ratings=feedback, comparisons=0, corrections=0, simulated=0, newest_at=None
    )
    return AgentCard(
        **(
            {
                "facts": agent_facts("widgets"),
                "counts": counts,
                "policy": None,
                "run": None,
                "retrain_threshold": 100,
            }
            | facts
        )
    )


JUDGED = {"preference_accuracy": 0.9}


@pytest.mark.parametrize(
    ("card", "kind", "now"),
    [
        (lambda: card_of(counts=NO_FEEDBACK), "record", "decisions"),
        (lambda: card_of(9), "rate", "ratings"),
        (lambda: card_of(10), "train", "training"),
        (
            lambda: card_of(counts=dataclasses.replace(NO_FEEDBACK, decisions=9, outcomes=9)),
            "rate",
            "ratings",
        ),
        (
            lambda: card_of(counts=dataclasses.replace(NO_FEEDBACK, decisions=10, outcomes=10)),
            "train",
            "training",
        ),
        (lambda: card_of(10, run=make_run(status="queued", finished_at=None)), "watch", "training"),
        (lambda: card_of(10, run=make_run(status="failed")), "look", None),
        (lambda: with_policy(make_policy()), "judge", "evaluation"),
        (lambda: with_policy(make_policy(**JUDGED)), "promote", "answers"),
        (lambda: with_policy(make_policy(**JUDGED), gate_refusal="no gain is shown"), "rate", "answers"),
        (lambda: with_policy(champion(), buffer=99), "rate", None),
        (lambda: with_policy(champion(), buffer=100), "train", None),
    ],
)
def test_what_is_missing_comes_next(card: Callable[[], AgentCard], kind: str, now: str | None) -> None:
    shown = card()
    assert step_next(shown).kind == kind
    states = dataclasses.asdict(stations_of(shown))
    assert [name for name, state in states.items() if state == "now"] == ([now] if now else [])


def test_a_station_is_reached_only_by_what_it_stands_for() -> None:
    """A policy that was not trained here, without a rating, beside a hosted champion."""
    registered = policy_of("widgets-v1", "candidate", "widgets")
    shown = card_of(newest=registered, policy=registered, incumbent=policy_of("gpt", "champion", "widgets"))
    assert dataclasses.asdict(stations_of(shown)) == {
        "decisions": "done",
        "ratings": "open",
        "training": "open",
        "evaluation": "now",
        "answers": "done",
    }


def with_policy(policy: Policy, **facts: Any) -> AgentCard:
    return card_of(200, policy=policy, newest=policy, run=policy.run, **facts)


def champion() -> Policy:
    return registry.policy_promote(
        make_policy(**JUDGED), "champion", actor="eve", force=True, reason="a test"
    )


def test_an_operator_has_an_agent_trained_by_a_button(client: Client) -> None:
    client.force_login(User.objects.create_superuser("eve"))
    for number in range(12):
        for response, thumb in (("good", "up"), ("bad", "down")):
            decision = decision_record(agent="widgets", messages=f"p {number}", response=response).row
            rating_submit(decision=decision, rater="bob", thumb=thumb)
    # the page behind the button says how long it takes
    assert 'href="/start/?agent=widgets&amp;step=train"' in client.get("/").text
    assert re.search(r"Train about \d+ s", words(client.get("/start/?agent=widgets&step=train").text))
    answer = client.post("/runs/new/", {"agent": "widgets"})
    run = TrainingRun.objects.get()
    assert (run.status, run.agent, answer["Location"]) == ("queued", "widgets", f"/runs/{run.pk}/")
    said = words(client.get(answer["Location"]).text)
    assert re.search(r"Waits for a worker ?, takes about \d+ s", said)
    assert "Its training waits for a worker." in client.get("/").text


def test_a_training_without_enough_is_refused_in_words(client: Client) -> None:
    client.force_login(User.objects.create_superuser("eve"))
    answer = client.post("/runs/new/", {"agent": "widgets"}, follow=True)
    assert "expected at least 10 ratings" in words(answer.text)
    assert not TrainingRun.objects.exists()


def test_the_list_of_runs_is_paged_and_filtered(operator: Client) -> None:
    for _ in range(31):
        make_run()
    other = make_run("helpdesk")
    first = operator.get("/runs/").text
    assert first.count("<tr") == 26  # 25 and the head
    assert "page 1 of 2" in first
    assert operator.get("/runs/?page=2").text.count("<tr") == 8
    assert operator.get("/runs/?page=nonsense").status_code == 200
    only = operator.get("/runs/?agent=helpdesk").text
    assert f"/runs/{other.pk}/" in only
    assert only.count("<tr") == 2
    failed = make_run(status="failed", method="kto", reason="out of memory")
    for query in ("status=failed", "method=kto", "agent=&status=failed&method=kto"):
        found = operator.get(f"/runs/?{query}").text
        assert (found.count("<tr"), f'href="/runs/{failed.pk}/"' in found) == (2, True)
    assert "<tr" not in operator.get("/runs/?status=failed&method=dpo").text
    assert 'href="?status=succeeded&amp;page=2"' in operator.get("/runs/?status=succeeded").text


def test_the_list_of_runs_says_what_each_came_to(operator: Client) -> None:
    make_policy(preference_accuracy={"value": 0.875, "low": 0.7, "high": 0.96, "n": 40})
    refused = make_run(status="refused", reason="3 pairs found, 10 needed")
    outcome = r'class="outcome-of">(.*?)</td>'
    below, above = re.findall(outcome, operator.get("/runs/").text)[::-1]
    assert "Preference accuracy 87.5" in below
    assert "stage-candidate" in below
    assert refused.reason in above


def test_a_run_shows_its_curves_recipe_data_and_what_was_left_out(operator: Client) -> None:
    snapshot = Snapshot.objects.create(
        agent="widgets",
        kind="pairs",
        path="s.jsonl",
        sha256="a" * 64,
        counts={"train": 812, "holdout": 96},
        left_out={"below_margin": 44},
        feedback_count=9,
        simulated_share=1.0,
    )
    run = make_run(
        snapshot=snapshot,
        recipe={"beta": 0.1},
        seed=7,
        steps_total=3,
        steps_done=3,
        libraries={"trl": "1.16.0"},
        hardware={"device": "cpu"},
        started_at=timezone.now() - timedelta(seconds=93),
    )
    for step, loss in enumerate((0.69, 0.5, 0.25), start=1):
        RunMetric.objects.create(run=run, step=step, values={"loss": loss, "note": "text", "kl": None})
    html = operator.get(f"/runs/{run.pk}/").text
    text = words(html)
    assert html.count("<figure") == 1
    assert "Loss: training from 0.69 at step 1 to 0.25 at step 3, lowest 0.25, highest 0.69" in html
    for shown in (
        "beta 0.1",
        "seed 7",
        "training 812",
        "below_margin 44",
        "trl 1.16.0",
        "device cpu",
        "1 min 33 s",
    ):
        assert shown in text
    assert "All of the feedback it was trained on is simulated" in text


def test_a_failed_run_says_why_escaped(operator: Client) -> None:
    run = make_run(status="failed", reason="<b>out of memory</b>")
    assert "&lt;b&gt;out of memory&lt;/b&gt;" in operator.get(f"/runs/{run.pk}/").text


def test_counts_of_all_agents_are_those_of_each() -> None:
    for agent in ("widgets", "helpdesk"):
        one, two = (decision_record(agent=agent, messages="p", response=text).row for text in "ab")
        rating_submit(decision=one, rater="ada", thumb="up")
        rating_submit(decision=one, rater="ada", correction="better")
        rating_submit(decision=two, rater="sim", thumb="down", rater_kind="simulated")
        comparison_submit(left=one, right=two, preference="left", rater="ada")
    decision_record(agent="silent", messages="p", response="r")
    counts = feedback_counts_by_agent()
    assert counts == {agent: feedback_counts(agent) for agent in ("helpdesk", "silent", "widgets")}
    expected = (2, 1, 1)
    assert (counts["widgets"].ratings, counts["widgets"].corrections, counts["widgets"].simulated) == expected


def test_a_form_without_its_token_says_what_to_do() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_user("ada"))
    answer = client.post("/rate/")
    assert answer.status_code == 403
    assert "reload the page and send it again" in answer.text


STATIC = Path(__file__).resolve().parent.parent / "static"


def run_logged(values: dict[str, list[float]], **facts: Any) -> TrainingRun:
    """A run whose figures were logged at steps 1, 2, 3, ..."""
    run = make_run(**facts)
    for step, row in enumerate(zip(*values.values(), strict=True), start=1):
        RunMetric.objects.create(run=run, step=step, values=dict(zip(values, row, strict=True)))
    return run


def test_a_run_shows_the_loss_first_and_the_families_below(operator: Client) -> None:
    run = run_logged({"learning_rate": [1e-4, 5e-5], "rewards/margins": [0.1, 0.4], "loss": [0.7, 0.5]})
    html = operator.get(f"/runs/{run.pk}/").text
    assert re.findall(r'data-chart="([^"]*)"', html) == ["loss", "rewards-margins", "learning_rate"]
    assert html.index("Reward margin") < html.index("Learning rate and gradient norm")


def test_every_chart_has_its_numbers_as_a_table_and_for_the_script(operator: Client) -> None:
    run = run_logged({"loss": [0.7, 0.5], "eval_loss": [0.8, 0.75]})
    html = operator.get(f"/runs/{run.pk}/").text
    assert "Step Loss, training Loss, held out 1 0.7 0.8 2 0.5 0.75" in words(html)
    (stored,) = re.findall(r'<script id="data-loss" type="application/json">(.*?)</script>', html)
    data = json.loads(stored)
    assert data["steps"] == [1, 2]
    assert [line["values"] for line in data["lines"]] == [[0.7, 0.5], [0.8, 0.75]]


def test_a_finished_run_has_no_bar_and_one_at_work_has(operator: Client) -> None:
    run = make_run(steps_total=58, steps_done=58)
    html = operator.get(f"/runs/{run.pk}/").text
    assert "<progress" not in html
    assert "58 steps, all done" in words(html)
    TrainingRun.objects.filter(pk=run.pk).update(status="running", steps_done=12, finished_at=None)
    html = operator.get(f"/runs/{run.pk}/").text
    assert "<progress" in html
    assert "Step 12 of 58" in words(html)


def test_runs_side_by_side_share_charts_and_list_what_differs(operator: Client) -> None:
    first = run_logged({"loss": [0.7, 0.5]}, recipe={"beta": 0.1, "epochs": 3}, seed=1)
    second = run_logged({"loss": [0.7, 0.25]}, recipe={"beta": 0.3, "epochs": 3}, seed=1)
    html = operator.get(f"/runs/compare/?run={first.pk}&run={second.pk}").text
    text = words(html)
    assert html.count("<figure") == 1
    assert f"run {first.pk} from 0.7 at step 1 to 0.5 at step 2" in html
    assert "beta 0.1 0.3" in text
    assert "epochs 3 3" not in text
    assert "last training loss 0.5 0.25" in text


@pytest.mark.parametrize("count", [0, 1, 6])
def test_too_few_or_too_many_runs_are_refused_in_words(operator: Client, count: int) -> None:
    query = "&".join(f"run={run.pk}" for run in [make_run() for _ in range(count)])
    answer = operator.get(f"/runs/compare/?{query}", follow=True)
    assert answer.redirect_chain[-1][0] == "/runs/"
    assert f"Choose 2 to 5 runs to compare; found {count}." in answer.text


def test_what_is_not_there_is_not_found(operator: Client) -> None:
    for query in ("77/", "?agent=No%20Slug", "?agent=a%00b", "?status=a%00b"):
        assert operator.get(f"/runs/{query}").status_code == 404
    run = make_run().pk
    for other in ("999999", "x", "-1", "1' OR 1", "9" * 30):
        assert operator.get("/runs/compare/", {"run": [run, other]}).status_code == 404


def test_vendored_files_are_published_and_safe() -> None:
    # vendored files are those that were published
    rows = re.findall(r"\| (\S+\.\w+) \|.*`([0-9a-f]{64})`", (STATIC / "vendor/README.md").read_text("utf-8"))
    kept = {"uplot/uPlot.iife.min.js", "uplot/uPlot.min.css", "inter/inter.woff2"}
    assert {name for name, _ in rows} == kept
    for name, stated in rows:
        assert hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() == stated, name
    # the library evaluates no text as code
    source = (STATIC / "vendor/uplot/uPlot.iife.min.js").read_text("utf-8")
    assert not re.search(r"\beval\s*\(|new Function|innerHTML|setAttribute\(.style", source)
