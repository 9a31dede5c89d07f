"""The guided start: which step an agent is at, and that each step can be done from the page alone."""

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone
from django.utils.html import escape
from django_q.models import OrmQ

from feedback.cache import StampedCache, forget_all
from feedback.models import Decision, Lease, Rating
from feedback.services import decision_record, rating_submit
from rl.models import Policy, RunMetric, TrainingRun
from rl.registry import service as registry
from rl.registry.checklist import gate_checklists
from rl.registry.incumbents import incumbent_sync
from rl.selectors import AgentCard, about_text, agent_cards, run_eta_s, work_of
from rl.views.runs import guide_of, step_next
from tests.support.api_client import person, signed_in
from tests.support.evaluations import judged
from tests.support.registry_rows import make_policy, make_run, policy_of
from tests.support.said import words
from tests.test_held_out_answers import answered

pytestmark = pytest.mark.django_db


def card_of(slug: str) -> AgentCard:
    return next(card for card in agent_cards(slug) if card.facts.slug == slug)


def states(card: AgentCard | None) -> str:
    """First letters of the six states: `dnoooo` is one done, the second to be done now."""
    return "".join(step.state[0] for step in guide_of(card))


def rated(count: int, agent: str = "shop", first: int = 0) -> None:
    for number in range(first, first + count):
        decision = decision_record(agent=agent, messages=f"question {number}", response="an answer").row
        rating_submit(decision=decision, rater="bob", thumb="up" if number % 2 else "down")


def test_the_step_follows_from_what_is_stored() -> None:
    assert states(None) == "nooooo"
    decision_record(agent="shop", messages="q", response="a")
    assert states(card_of("shop")) == "dnoooo"
    rated(10)
    assert states(card_of("shop")) == "ddnooo"
    run = make_run("shop", status="running", finished_at=None)
    assert states(card_of("shop")) == "ddnooo"
    type(run).objects.update(status="succeeded", finished_at=run.created_at)
    policy = make_policy("shop")
    assert states(card_of("shop")) == "dddnoo"
    registry.Policy.objects.update(metrics={"valid_rate": {"value": 1.0}})
    judged = {"headline": {"kind": "pairs", "value": 0.7, "low": 0.6, "high": 0.8, "n": 50}}
    registry.Policy.objects.update(metrics=judged)
    assert states(card_of("shop")) == "ddddno"
    registry.policy_promote(policy, "champion", actor="eve", force=True, reason="a test")
    assert states(card_of("shop")) == "dddddn"


def test_a_first_training_that_failed_is_a_fault_at_its_step() -> None:
    rated(10)
    make_run("shop", status="failed", reason="no memory")
    assert states(card_of("shop")) == "ddfooo"


def test_a_policy_from_elsewhere_fills_no_dot_of_ratings_or_training() -> None:
    decision_record(agent="shop", messages="q", response="a")
    policy_of("shop-v1", "candidate", "shop")
    assert states(card_of("shop")) == "doonoo"


def test_a_newer_candidate_is_led_on_beside_a_champion() -> None:
    rated(10)
    registry.policy_promote(make_policy("shop"), "champion", actor="eve", force=True, reason="a test")
    newer = make_policy("shop")
    assert states(card_of("shop")) == "dddnoo"
    registry.policy_reject(newer, actor="eve", reason="worse")
    assert states(card_of("shop")) == "dddddn"


def test_the_way_to_go_is_told_by_the_training_alone_not_by_what_came_before_it() -> None:
    now = timezone.now()
    begun = {
        "started_at": now - timedelta(hours=1),
        "phase": "training",
        "phase_at": now - timedelta(seconds=20),
    }
    run = make_run("shop", status="running", finished_at=None, heartbeat_at=now, steps_total=10, **begun)
    run.metrics.all().delete()
    type(run).objects.update(steps_done=2)
    run.refresh_from_db()
    assert run_eta_s(run) == pytest.approx(80, abs=5)


def test_a_run_has_one_time_to_go_that_covers_its_stages_and_begins_with_the_estimate() -> None:
    now = timezone.now()
    waiting = {"finished_at": None, "result": {"estimated_s": 200.0}}
    run = make_run("shop", status="queued", **waiting)
    assert (work_of(run).words, work_of(run).left) == ("waits for a worker", "takes about 3 min")
    other = make_run("desk", status="running", finished_at=None)
    assert work_of(run).words == f"waits until run {other.pk} of desk ends"
    run = make_run("shop", status="running", started_at=now - timedelta(seconds=40), **waiting)
    assert work_of(run).left == "about 3 min to go"
    begun = {"phase": "sft stage, training", "phase_at": now - timedelta(seconds=10), "heartbeat_at": now}
    make_run(
        "shop",
        method="sft",
        stage_of=run,
        status="running",
        finished_at=None,
        steps_total=20,
        steps_done=10,
        **begun,
    )
    assert work_of(run).words == "sft stage, training, step 10 of 20"
    assert work_of(run).left == "about 3 min to go"  # not the ten seconds of its first stage
    assert [about_text(seconds) for seconds in (1, 27, 100, 7800)] == [
        "about 5 s",
        "about 25 s",
        "about 2 min",
        "about 2 h 10 min",
    ]


def test_a_finished_verdict_stands_while_the_next_training_runs(operator: Client) -> None:
    rated(10)
    registry.policy_promote(make_policy("shop"), "champion", actor="eve", force=True, reason="a test")
    newer = make_policy("shop")
    run = make_run("shop", status="running", finished_at=None)
    judged(newer)
    assert (
        step_next(card_of("shop")).kind == "judge"
    )  # a comparison with the base model says nothing of the champion
    judged(newer, "shop-v9")
    said = words(operator.get("/").text)
    assert f"{newer.name} is evaluated; promote or reject it. Run {run.pk} trains the next one." in said
    assert step_next(card_of("shop")).kind == "promote"


def test_an_operator_without_decisions_lands_there_and_a_rater_does_not(operator: Client) -> None:
    assert operator.get("/").headers["Location"] == "/start/"
    operator.force_login(person("the-rater", "rater"))
    assert operator.get("/").status_code == 200
    assert operator.get("/start/").status_code == 403


def test_the_navigation_leads_there_also_once_there_is_a_champion(operator: Client) -> None:
    registry.policy_promote(make_policy("shop"), "champion", actor="eve", force=True, reason="a test")
    forget_all()
    assert 'href="/start/"' in operator.get("/decisions/").text


def test_sample_rows_go_all_the_way_with_columns_that_are_guessed(operator: Client) -> None:
    sample = operator.get("/start/?agent=&by=sample").context["sample"]
    assert sample.splitlines()[0] == "customer message,routed to,ok?,should have been"
    tried = operator.post("/start/bring/", {"agent": "tickets", "text": sample})
    assert (tried.status_code, tried.context["fault"]) == (200, "")
    counts = dict(tried.context["counts"])
    assert counts["decisions"] == counts["ratings"] == 60
    assert counts["corrections"] == sample.count(",no,")
    operator.post("/start/take/", {"token": tried.context["upload"].token})
    assert Decision.objects.filter(agent="tickets").count() == 60


def test_who_comes_back_goes_on_where_they_were(operator: Client) -> None:
    rated(1, "a-first")
    rated(10, "shop")
    assert operator.get("/start/?agent=shop").context["shown"].key == "train"
    again = operator.get("/start/")
    assert (again.context["slug"], again.context["shown"].key) == ("shop", "train")
    assert operator.get("/start/?agent=").context["card"] is None


def test_an_earlier_step_can_be_looked_at_and_a_later_one_says_what_it_waits_for(operator: Client) -> None:
    rated(10)
    assert operator.get("/start/?agent=shop&step=connect").context["shown"].key == "connect"
    page = operator.get("/start/?agent=shop&step=promote")
    assert page.context["shown"].key == "promote"
    assert 'href="/start/?agent=shop">Go to step 3: Train<' in page.text
    assert page.text.count("/policies/") == 1  # the bar's; nothing is promoted here yet


def test_the_policy_of_no_run_is_compared_with_a_button(operator: Client) -> None:
    rated(10)
    policy = policy_of("shop-v1", Policy.Stage.CANDIDATE, agent="shop")
    assert f'action="/policies/{policy.name}/judge/"' in operator.get("/start/?agent=shop").text


def stalled(run: TrainingRun) -> str:
    run.refresh_from_db()
    return work_of(run).stalled


def test_a_run_that_stands_still_says_for_how_long(operator: Client) -> None:
    now = timezone.now()
    begun = {"phase": "training", "phase_at": now - timedelta(minutes=20), "heartbeat_at": now}
    run = make_run("shop", status="running", finished_at=None, steps_total=40, steps_done=18, **begun)
    RunMetric.objects.create(run=run, step=18, values={"loss": 0.5}, at=now - timedelta(minutes=2))
    assert stalled(run) == ""
    RunMetric.objects.update(at=now - timedelta(minutes=12))
    # a step took 27 s: twelve minutes are far more
    assert stalled(run) == "no step for 12 min"
    for address in (f"/runs/{run.pk}/", "/runs/", "/start/?agent=shop"):
        assert "no step for 12 min" in operator.get(address).text
    assert operator.get(f"/api/runs/{run.pk}/").json()["stalled"] == "no step for 12 min"
    # five steps of twelve minutes each: it may be one slow step
    TrainingRun.objects.update(phase_at=now - timedelta(minutes=72), steps_done=5)
    RunMetric.objects.update(step=5)
    assert stalled(run) == ""
    # a resumed run repeats steps, whose figures it has
    TrainingRun.objects.update(steps_done=2)
    assert stalled(run) == ""


def test_a_silent_process_is_said_before_the_first_step() -> None:
    now = timezone.now()
    silent = {"phase": "loading the model", "heartbeat_at": now - timedelta(minutes=7)}
    run = make_run("shop", status="running", finished_at=None, **silent)
    assert work_of(run).left == "no sign of life for 7 min"
    TrainingRun.objects.update(heartbeat_at=now)
    assert stalled(run) == ""
    TrainingRun.objects.update(status="failed", finished_at=now, heartbeat_at=now - timedelta(minutes=7))
    assert stalled(run) == ""


LINES = "\n".join(
    json.dumps({"prompt": f"question {n}", "response": f"answer {n}", "thumb": "up" if n % 2 else "down"})
    for n in range(10)
)


def bring(client: Client, text: str = "", **more: Any) -> Any:
    return client.post("/start/bring/", {"text": text, **more})


def test_pasted_lines_are_recognised_and_then_taken_in(operator: Client) -> None:
    tried = bring(operator, LINES, agent="shop")
    assert tried.status_code == 200
    assert dict(tried.context["counts"]) == {"decisions": 10, "ratings": 10}
    assert tried.context["whose"] == ["shop"]
    assert Decision.objects.count() == 0
    taken = operator.post("/start/take/", {"token": tried.context["upload"].token})
    assert taken.headers["Location"] == "/start/?agent=shop"
    assert (Decision.objects.filter(agent="shop").count(), Rating.objects.count()) == (10, 10)


@pytest.mark.parametrize(
    "text",
    [
        "question,answer,stars\nmay I?,yes,5\nmust I?,no,1",
        "question\tanswer\tstars\nmay I?\tyes\t5\nmust I?\tno\t1",
        "\nquestion\tanswer\tstars\tcorrection\r\nmust I?\tno\t1\tyes\r\nmay I?\tyes\t5\t\r\n",
        '[{"prompt": "may I?", "response": "yes", "stars": 5}, {"prompt": "must I?", "response": "no", "stars": 1}]',
    ],
)
def test_tables_and_arrays_are_read_as_they_are_pasted(operator: Client, text: str) -> None:
    counts = dict(bring(operator, text).context["counts"])
    assert (counts.pop("decisions"), counts.pop("ratings")) == (2, 2)
    assert counts == ({"corrections": 1} if "correction" in text else {})


def test_lines_within_a_pasted_cell_end_as_they_were_typed(operator: Client) -> None:
    tried = bring(operator, 'question,answer,stars\r\n"may I?\r\nor not",yes,5', agent="shop")
    operator.post("/start/take/", {"token": tried.context["upload"].token})
    assert Decision.objects.get().messages == [{"role": "user", "content": "may I?\nor not"}]


def test_columns_of_ones_own_are_guessed_and_asked_about(operator: Client) -> None:
    tried = bring(operator, "customer wrote\tassistant reply\tgrade\nmay I?\tyes\t5\nmust I?\tno\t1")
    assert [field for _, field in tried.context["columns"]] == ["prompt", "response", "rating"]
    assert "--map" not in tried.text
    sent = {"column-0": "prompt", "column-1": "response", "column-2": "rating"}
    again = operator.post("/start/bring/", {"token": tried.context["upload"].token, **sent})
    assert dict(again.context["counts"]) == {"decisions": 2, "ratings": 2}


def test_a_file_is_taken_in_place_of_text(operator: Client) -> None:
    tried = bring(operator, file=SimpleUploadedFile("mine.jsonl", LINES.encode()))
    assert tried.context["name"] == "mine.jsonl"


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        ({}, "found neither"),
        ({"text": LINES, "agent": "Not a slug!"}, "expected a short name"),
        ({"text": "just words\nwithout a header"}, "pasted.csv"),
    ],
)
def test_unreadable_stays_as_it_was_pasted(operator: Client, sent: dict[str, str], fault: str) -> None:
    page = operator.post("/start/bring/", sent)
    assert page.status_code == 400
    text = words(page.text)
    assert fault in text
    assert sent.get("text", "").partition("\n")[0].replace('"', "&quot;") in text
    assert Decision.objects.count() == 0


def test_lines_belong_to_who_tried_them(operator: Client) -> None:
    tried = bring(operator, LINES)
    other = signed_in("another", "operator")
    assert other.post("/start/take/", {"token": tried.context["upload"].token}).status_code == 400
    assert Decision.objects.count() == 0


def test_the_next_decision_is_rated_in_place_and_the_way_leads_back(operator: Client) -> None:
    for number in range(3):
        decision_record(agent="shop", messages=f"question {number}", response="an answer")
    page = operator.get("/start/?agent=shop")
    assert page.context["further"] == 10
    assert "0</strong> of 10 ratings; 10 more, about 50 s" in page.text
    sent = {"id": page.context["rating_id"], "decision": page.context["decision"].pk, "verdict": "up"}
    done = operator.post("/rate/?agent=shop", {**sent, "back": page.context["back"]})
    assert done.headers["Location"] == "/start/?agent=shop"
    assert Rating.objects.get().thumb == "up"


def test_the_bars_are_asked_for_without_taking_a_decision_from_others(operator: Client) -> None:
    decision_record(agent="shop", messages="question", response="an answer")
    assert operator.get("/start/?agent=shop", headers={"X-Live": "1"}).context["stage"] is False
    assert not Lease.objects.exists()


def test_a_button_trains_and_leads_back_to_the_phases(operator: Client) -> None:
    rated(40)
    page = operator.get("/start/?agent=shop")
    assert page.context["plan"]["refusal"] == ""
    assert "about" in words(page.text)
    placed = operator.post("/runs/new/", {"agent": "shop", "back": "/start/?agent=shop"})
    assert placed.headers["Location"] == "/start/?agent=shop"
    run = TrainingRun.objects.get()
    assert (run.status, run.follow_up) == ("queued", "judge")
    assert "Waits for a worker" in words(operator.get("/start/?agent=shop").text)
    TrainingRun.objects.update(status="running", phase="training", steps_done=12, steps_total=58)
    for address in ("/start/?agent=shop", f"/runs/{run.pk}/"):
        assert "Training, step 12 of 58" in words(operator.get(address).text)
    TrainingRun.objects.update(status="succeeded", finished_at=run.created_at, phase="judging, 120 of 400")
    make_policy("shop")
    registry.Policy.objects.filter(kind="adapter").update(run=run)
    assert operator.get("/start/?agent=shop").context["shown"].key == "compare"


def test_the_plan_is_of_all_ratings_there_are(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StampedCache, "BELIEF", 1e6)
    rated(30)
    samples = operator.get("/start/?agent=shop").context["plan"]["samples"]
    rated(30, first=30)
    assert operator.get("/start/?agent=shop").context["plan"]["samples"] >= samples + 10


def test_what_a_training_would_refuse_is_said_before_the_button(operator: Client) -> None:
    for number in range(12):
        decision = decision_record(agent="shop", messages=f"question {number}", response="an answer").row
        rating_submit(decision=decision, rater="bob", thumb="up")
    plan = operator.get("/start/?agent=shop").context["plan"]
    text = words(operator.get("/start/?agent=shop").text)
    assert (plan["refusal"][1:60] in text) if plan["refusal"] else ("Train" in text)


@pytest.mark.parametrize("back", ["//elsewhere.example/", "https://elsewhere.example/", "start"])
def test_the_way_back_never_leads_elsewhere(operator: Client, back: str) -> None:
    rated(1)
    assert operator.post("/runs/new/", {"agent": "shop", "back": back}).headers["Location"] == "/"


def judged_policy(*, wins: int) -> Policy:
    """A candidate judged on 40 held-out prompts, of which it wins so many; one answer won, the others tied."""
    rated(10)
    incumbent_sync("shop")
    policy = make_policy("shop")
    found = judged(policy, "shop-app", wins=wins)
    found.evidence["answers"] = [answered(1, reward=1.0), *(answered(number) for number in range(2, 81))]
    found.save()
    return policy


def test_where_the_gate_is_open_a_button_promotes_and_the_next_step_asks(operator: Client) -> None:
    policy = judged_policy(wins=15)
    page = operator.get("/start/?agent=shop")
    text = words(page.text)
    assert f"{policy.name} was preferred in 15 of 15 decided prompts" in text
    assert text.count("Ready to promote.") == 1
    assert f"Promote {policy.name}" in text
    assert f"/policies/{policy.name}/answers/?show=win" in page.text
    registry.policy_promote(policy, "champion", actor="eve", force=True, reason="a test")
    again = words(operator.get("/start/?agent=shop&step=promote").text)
    assert f"{policy.name} is the champion" in again
    assert f"Promote {policy.name}" not in again
    asked = operator.get("/start/?agent=shop")
    assert asked.context["shown"].key == "ask"
    assert 'action="/agents/shop/playground/#answers"' in asked.text
    assert "question 1" in asked.text


def test_a_closed_gate_is_shown_with_its_reason_and_two_ways_on(operator: Client) -> None:
    policy = judged_policy(wins=2)
    (check,) = gate_checklists(policy, ["champion"])
    text = words(operator.get("/start/?agent=shop").text)
    assert "not yet" in text
    assert [item.words for item in check.unmet if escape(item.words) not in text] == []
    assert check.unmet
    assert "Rate more" in text
    assert f"Promote {policy.name}" not in text
    sent = {"move": "champion", "force": "on", "reason": "trying", "back": "/start/?agent=shop"}
    done = operator.post(f"/policies/{policy.name}/move/", sent)
    assert done.headers["Location"] == "/start/?agent=shop"
    assert operator.get("/start/?agent=shop").context["shown"].key == "ask"


def test_a_policy_compared_with_another_than_the_champion_is_evaluated_from_the_start(
    operator: Client,
) -> None:
    first = judged_policy(wins=12)
    registry.policy_promote(first, "champion", actor="eve", force=True, reason="a test")
    judged(make_policy("shop"), wins=12)
    text = operator.get("/start/?agent=shop&step=compare").text
    assert f"Evaluate it against {first.name}</button>" in text
    assert '<input type="hidden" name="back" value="/start/?agent=shop">' in text


def test_a_policy_of_no_run_is_evaluated_by_the_command_that_the_start_shows(operator: Client) -> None:
    policy = make_policy("shop")
    rated(3)
    offered = words(operator.get("/start/?agent=shop&step=compare").text)
    assert "Evaluate it" in offered
    Policy.objects.filter(pk=policy.pk).update(run=None)
    text = words(operator.get("/start/?agent=shop&step=compare").text)
    assert f"evaluate_model --policy {policy.name} --compare" in text
    assert f"Open {policy.name}" in words(operator.get("/").text)
    assert "follow-up" not in operator.get("/").text


def test_judging_and_exporting_have_buttons_that_hand_them_to_the_workers(operator: Client) -> None:
    policy = make_policy("shop")
    address = f"/policies/{policy.name}/"
    text = words(operator.get(address).text)
    assert "Evaluate it against the base model" in text
    assert "Export as" in text
    assert "Q4_K_M" in text.upper()
    assert operator.post(f"{address}follow-up/", {"job": "judge"}).headers["Location"] == address
    run = TrainingRun.objects.get()
    assert (run.follow_up, run.is_followed) == ("judge", True)
    assert OrmQ.objects.count() == 1
    again = operator.post(f"{address}follow-up/", {"job": "export"}, follow=True)
    assert "being evaluated or exported already" in again.text
    assert "Evaluate on" not in words(again.text)
    assert OrmQ.objects.count() == 1
    TrainingRun.objects.update(follow_up="done")
    stranger = operator.post(f"{address}follow-up/", {"job": "judge", "compare": "nobody"}, follow=True)
    assert "expected one of base" in stranger.text
    operator.post(f"{address}follow-up/", {"job": "judge", "compare": "base"})
    assert TrainingRun.objects.get().compare == "base"
    TrainingRun.objects.update(follow_up="done")
    unknown = operator.post(f"{address}follow-up/", {"job": "export", "as": "gguf:q9"}, follow=True)
    assert "expected one of gguf:q2_k" in unknown.text
    operator.post(f"{address}follow-up/", {"job": "export", "as": "gguf:q8_0"})
    run = TrainingRun.objects.get()
    assert (run.follow_up, run.export_as) == ("export", "gguf:q8_0")
    assert work_of(run).words == "its policy is exported next"
    files = operator.get(address).text.partition('id="files"')[2].partition("</section>")[0]
    assert "Its policy is exported next" in files
    assert "<progress" in files
    assert re.findall(r"<(?:select|button)[^>]* disabled", files) != []
    assert re.findall(r"<(?:select|button)(?![^>]* disabled)[^>]*>", files) == []
    assert (
        "expected one of judge, export"
        in operator.post(f"{address}follow-up/", {"job": "x"}, follow=True).text
    )


def test_the_base_model_is_chosen_on_the_page_and_added_by_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[tuple[Any, ...]] = []
    monkeypatch.setattr("rl.jobs.child_process.async_task", lambda *words, **more: queued.append(words))
    decision_record(agent="shop", messages="Where is my parcel?", response="On its way.")
    client = signed_in("bob", "operator")
    page = client.get("/start/?agent=shop").content.decode()
    assert 'value="bundled" aria-pressed="true"' in page
    client.post("/agents/shop/base-model/", {"base_model": "smollm2", "back": "/start/?agent=shop"})
    assert queued == [("rl.tasks.base_model_add", "smollm2")]
    page = client.get("/start/?agent=shop").content.decode()
    assert 'value="smollm2" aria-pressed="true"' in page
    assert "smollm2 is being added" in page
